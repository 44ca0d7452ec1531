"""Ways to save and load the same shards, each as its documentation tells people to call it."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from torch import distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as Divided

from benchmarks.common.processes import quiet_imports
from benchmarks.common.states import Shard

with quiet_imports():
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.strategies.base import (
        LoadShardedStrategy,
        SaveShardedStrategy,
    )

    import dist_ckpt_strategies
    from dist_ckpt_strategies.cli.bench_rank import read_stream, write_stream

RAW_FLUSHED, RAW_PLAIN = "raw write+fsync", "raw write"

Tensors = Mapping[str, torch.Tensor]


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


Make = Callable[[tuple[Shard, ...]], Candidate]

ZARR: Final = ("zarr", 1)
ZARR_2: Final = ("zarr", 2)
TORCH_DIST: Final = ("torch_dist", 1)


class Megatron:
    """``dist_checkpointing.save`` and ``load`` with a backend chosen by its tuple.

    Ranks beyond the parts of an array hold replicas of them. The loader is the backend's own where
    none is given.
    """

    def __init__(
        self, shards: tuple[Shard, ...], backend: tuple[str, int] | Any, loader: Any = None
    ) -> None:
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


def zarr(shards: tuple[Shard, ...]) -> Candidate:
    """This package's backend, made known to Megatron-Core."""
    dist_ckpt_strategies.register()
    return Megatron(shards, ZARR)


def zarr_2(shards: tuple[Shard, ...]) -> Candidate:
    """This package's second format: it takes digests, and compares them at a load."""
    dist_ckpt_strategies.register()
    return Megatron(shards, ZARR_2)


def torch_dist(shards: tuple[Shard, ...]) -> Candidate:
    """Megatron's own backend."""
    stand_in_for_cuda()
    return Megatron(shards, TORCH_DIST)


def stand_in_for_cuda() -> None:
    """Give CPU forms to the two CUDA calls that Megatron's own backend makes without asking.

    Both are harmless here: nothing runs beside the CPU, so there is nothing to wait for.
    """
    warnings.filterwarnings("ignore", category=FutureWarning, module="megatron")
    for name, stand_in in (("synchronize", _synchronize), ("current_device", _current_device)):
        setattr(torch.cuda, name, stand_in)


def _synchronize(_device: object = None) -> None:
    """Nothing runs beside the CPU."""


def _current_device() -> Any:
    return torch.device("cpu")


class _TorchDcp:
    """``torch.distributed.checkpoint`` of DTensors, with its defaults."""

    def __init__(self, shards: tuple[Shard, ...]) -> None:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self._shards = shards
        self._state: dict[str, Any] = {
            shard.key: DTensor.from_local(shard.tensor, mesh, [Divided(shard.axis)])
            for shard in shards
        }

    def save(self, directory: Path) -> None:
        dcp_save(self._state, checkpoint_id=directory)

    def load(self, directory: Path) -> Tensors:
        dcp_load(self._state, checkpoint_id=directory)
        return {shard.key: shard.tensor for shard in self._shards}


class _TorchSave:
    """``torch.save`` of a rank's shards into a file of its own; memory-mapped when loaded."""

    def __init__(self, shards: tuple[Shard, ...]) -> None:
        self._tensors = {shard.key: shard.tensor for shard in shards}

    def save(self, directory: Path) -> None:
        torch.save(self._tensors, _own_file(directory, "pt"))

    def load(self, directory: Path) -> Tensors:
        loaded: Tensors = torch.load(_own_file(directory, "pt"), weights_only=True, mmap=True)
        return loaded


class _Safetensors:
    """``safetensors`` of a rank's shards in a file of its own; it maps the file when it loads."""

    def __init__(self, shards: tuple[Shard, ...]) -> None:
        # Named at run time: the package is a peer, not a dependency.
        self._library = importlib.import_module("safetensors.torch")
        self._tensors = {shard.key: shard.tensor for shard in shards}

    def save(self, directory: Path) -> None:
        self._library.save_file(self._tensors, _own_file(directory, "safetensors"))

    def load(self, directory: Path) -> Tensors:
        loaded: Tensors = self._library.load_file(_own_file(directory, "safetensors"))
        return loaded


class Raw:
    """The baseline: the same bytes through one plain stream per rank."""

    def __init__(self, shards: tuple[Shard, ...], *, flushes: bool) -> None:
        self._tensors = {shard.key: shard.tensor for shard in shards}
        self._flushes = flushes

    def save(self, directory: Path) -> None:
        write_stream(self._tensors, _own_file(directory, "bin"), flushes=self._flushes)

    def load(self, directory: Path) -> Tensors:
        read_stream(self._tensors, _own_file(directory, "bin"))
        return self._tensors


class _RawSave(SaveShardedStrategy):  # type: ignore[misc]
    """The baseline as a strategy of Megatron-Core, which adds what it does around any strategy."""

    def __init__(self, raw: Raw) -> None:
        super().__init__("raw", 1)
        self._raw = raw

    def save(self, sharded_state_dict: object, checkpoint_dir: str | Path) -> None:  # noqa: ARG002
        """Write what the baseline writes, whatever is asked for."""
        self._raw.save(Path(checkpoint_dir))


class _RawLoad(LoadShardedStrategy):  # type: ignore[misc]
    """Its other half."""

    def __init__(self, raw: Raw) -> None:
        super().__init__()
        self._raw = raw

    def load(self, sharded_state_dict: object, checkpoint_dir: str | Path) -> Tensors:  # noqa: ARG002
        """Read what the baseline reads, whatever is asked for."""
        return dict(self._raw.load(Path(checkpoint_dir)))

    def load_tensors_metadata(self, checkpoint_dir: str | Path) -> dict[str, Any]:
        """Nothing asks for it: the load is told what there is."""
        raise NotImplementedError

    def check_backend_compatibility(self, loaded_backend: str) -> None:
        """Nothing to check."""

    def check_version_compatibility(self, loaded_version: int) -> None:
        """Nothing to check."""


def _raw_in_megatron(shards: tuple[Shard, ...]) -> Candidate:
    raw = Raw(shards, flushes=True)
    return Megatron(shards, _RawSave(raw), _RawLoad(raw))


def raw_flushed(shards: tuple[Shard, ...]) -> Candidate:
    """The baseline that flushes what it writes."""
    return Raw(shards, flushes=True)


def _raw_plain(shards: tuple[Shard, ...]) -> Candidate:
    return Raw(shards, flushes=False)


def _own_file(directory: Path, suffix: str) -> Path:
    return directory / f"rank_{dist.get_rank()}.{suffix}"


MAKERS: Final[Mapping[str, Make]] = {
    RAW_FLUSHED: raw_flushed,
    RAW_PLAIN: _raw_plain,
    "raw write+fsync in Megatron-Core": _raw_in_megatron,
    "zarr 1": zarr,
    "zarr 2": zarr_2,
    "torch_dist": torch_dist,
    "torch dcp": _TorchDcp,
    "torch.save": _TorchSave,
    "safetensors": _Safetensors,
}
"""Everyone who saves and loads, baselines first; builds it in a rank process, for its shards."""
