"""Ways to save and load the same shards, each as its documentation tells people to call it."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from torch import distributed as dist

import dist_ckpt_strategies
from benchmarks.common.states import Shard
from dist_ckpt_strategies.cli.bench_rank import Tensors, read_stream, write_stream
from tests.support.ranks import allow_torch_dist

RAW_FLUSHED, RAW_PLAIN = "raw write+fsync", "raw write"
ZARR_1: Final = ("zarr", 1)
ZARR_2: Final = ("zarr", 2)
TORCH_DIST: Final = ("torch_dist", 1)

Shards = Sequence[Shard]


class Candidate(Protocol):
    """One way to save and load."""

    def save(self, directory: Path) -> None:
        """Store this rank's shards in ``directory``, which exists and is empty. Collective."""
        ...

    def load(self, directory: Path) -> Tensors:
        """This rank's shards as stored, by key; in the target's memory where that is possible.

        Collective.
        """
        ...


class Megatron:
    """``dist_checkpointing.save`` and ``load`` with a backend chosen by its tuple.

    Ranks beyond the parts of an array hold replicas of them. The loader is the backend's own where
    none is given. ``torch_dist`` has its queue of results in the process, which costs it less.
    """

    def __init__(self, shards: Shards, backend: tuple[str, int], loader: Any = None) -> None:
        if backend == TORCH_DIST:
            allow_torch_dist()
            stand_in_for_cuda()
        else:
            dist_ckpt_strategies.register()
        self._shards = shards
        self.backend = backend
        self._loader = loader

    def save(self, directory: Path) -> None:
        dist_checkpointing.save(self.state(), str(directory), self.backend)

    def load(self, directory: Path) -> Tensors:
        loaded = dist_checkpointing.load(self.sharded(), str(directory), self._loader)
        return {shard.key: loaded[shard.key] for shard in self._shards}

    def state(self) -> dict[str, Any]:
        """What is saved: the shards and a common state."""
        return {"iteration": 1, "args": {"hidden": 1}, **self.sharded()}

    def sharded(self) -> dict[str, Any]:
        """This rank's shards, as Megatron-Core describes them."""
        return {
            shard.key: ShardedTensor.from_rank_offsets(
                shard.key,
                shard.tensor,
                (shard.axis, shard.part, shard.num_parts),
                replica_id=dist.get_rank() // shard.num_parts,
            )
            for shard in self._shards
        }


def stand_in_for_cuda() -> None:
    """Give CPU forms to the two CUDA calls that Megatron-Core's backend makes on any device."""
    setattr(torch.cuda, "synchronize", lambda _device=None: None)  # noqa: B010 - typed otherwise
    setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))  # noqa: B010


class Raw:
    """The baseline: the same bytes through one plain stream per rank."""

    def __init__(self, shards: Shards, *, flushes: bool = True) -> None:
        self._tensors = {shard.key: shard.tensor for shard in shards}
        self._flushes = flushes

    def save(self, directory: Path) -> None:
        write_stream(self._tensors, _own_file(directory), flushes=self._flushes)

    def load(self, directory: Path) -> Tensors:
        read_stream(self._tensors, _own_file(directory))
        return self._tensors


def _own_file(directory: Path) -> Path:
    return directory / f"rank_{dist.get_rank()}"


MAKERS: Final[Mapping[str, Callable[[Shards], Candidate]]] = {
    RAW_FLUSHED: Raw,
    RAW_PLAIN: partial(Raw, flushes=False),
    "zarr 1": partial(Megatron, backend=ZARR_1),
    "zarr 2": partial(Megatron, backend=ZARR_2),
    "torch_dist": partial(Megatron, backend=TORCH_DIST),
}
"""Every candidate, baselines first; made in a rank process, for its shards."""
