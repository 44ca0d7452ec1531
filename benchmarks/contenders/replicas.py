"""Ways for ranks that are replicas of each other to load the same state, and what bounds them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import torch
from torch import distributed as dist

from benchmarks.contenders.one_state import (
    TORCH_DIST,
    ZARR,
    Contender,
    Make,
    Megatron,
    Tensors,
    stand_in_for_cuda,
    zarr,
)
from benchmarks.contenders.roster import (
    PARALLEL,
    PARALLEL_IN_PLACE,
    PLAIN_ZARR,
    TWO_STAGE_GLOO,
    TWO_STAGE_TORCH_DIST,
    TWO_STAGE_ZARR,
)
from benchmarks.measuring.gpt_state import Shard
from benchmarks.measuring.quiet import quiet_imports

with quiet_imports():
    from megatron.core.dist_checkpointing.strategies.fully_parallel import (
        FullyParallelLoadStrategyWrapper,
    )
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy

    from dist_ckpt_strategies.strategies.two_stage import TwoStageDataParallelLoadShardedStrategy

_MESSAGE_NBYTES = 32 << 20
_NUM_GROUPS = 2
"""Gloo moves twice as much over two groups side by side, and no more over four."""

_empty_like = torch.empty_like


def _two_stage_zarr(shards: tuple[Shard, ...]) -> Contender:
    zarr(shards)
    return Megatron(shards, ZARR, _two_stage())


class _OverGloo(Megatron):
    """As between hosts: nothing is read through a page cache that others have filled."""

    def load(self, directory: Path) -> Tensors:
        """See Contender."""
        with patch("dist_ckpt_strategies.two_stage.load.page_cache_of", lambda _: None):
            return super().load(directory)


def _two_stage_gloo(shards: tuple[Shard, ...]) -> Contender:
    zarr(shards)
    return _OverGloo(shards, ZARR, _two_stage())


def _two_stage_torch_dist(shards: tuple[Shard, ...]) -> Contender:
    stand_in_for_cuda()
    loader = _two_stage(base_strategy=TorchDistLoadShardedStrategy())
    return Megatron(shards, TORCH_DIST, loader)


def _two_stage(**options: Any) -> TwoStageDataParallelLoadShardedStrategy:
    """The strategy with its groups made, as a training script does it before it starts."""
    strategy = TwoStageDataParallelLoadShardedStrategy(_everyone(), **options)
    strategy.maybe_init_gloo_group()
    return strategy


class _FullyParallel(Megatron):
    """Megatron's own way, for tensors of a CPU: it moves what it exchanges to CUDA, always.

    ``Tensor.cuda`` is the tensor itself here, and ``empty_like(tensor, device="cuda")`` is what
    ``receiving`` says. The exchange is ``broadcast``, its default and its fastest over gloo:
    ``gather_object`` pickles every tensor; ``gather_rounds`` gathers tensors of unequal shapes,
    which gloo refuses.
    """

    def __init__(
        self,
        shards: tuple[Shard, ...],
        receiving: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        stand_in_for_cuda()
        base = TorchDistLoadShardedStrategy()
        super().__init__(shards, TORCH_DIST, FullyParallelLoadStrategyWrapper(base, _everyone()))
        self._receiving = receiving

    def load(self, directory: Path) -> Tensors:
        """See Contender."""
        with (
            patch.object(torch.Tensor, "cuda", _itself),
            patch.object(torch, "empty_like", self._empty_like),
        ):
            return super().load(directory)

    def _empty_like(self, tensor: torch.Tensor, **options: Any) -> torch.Tensor:
        if options.get("device") == "cuda":
            return self._receiving(tensor)
        return _empty_like(tensor, **options)


def _fully_parallel(shards: tuple[Shard, ...]) -> Contender:
    """A CPU is what CUDA stands for: each tensor is received into a new one."""
    return _FullyParallel(shards, _empty_like)


def _fully_parallel_in_place(shards: tuple[Shard, ...]) -> Contender:
    """As where the state lies on a GPU: each tensor is received where it is wanted."""
    return _FullyParallel(shards, _itself)


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class Sending:
    """Each rank sends its share of some memory to all others, and receives theirs. Nothing else."""

    def __init__(self, shares: Sequence[Shard]) -> None:
        self._shares = {share.key: share.tensor for share in shares}
        self._groups = [dist.new_group() for _ in range(_NUM_GROUPS)]
        parts = [torch.split(share.tensor, _MESSAGE_NBYTES) for share in shares]
        # In turn, so that at any time some ranks send and all receive.
        self._messages = [
            (source, own[number])
            for number in range(max(map(len, parts)))
            for source, own in enumerate(parts)
            if number < len(own)
        ]

    def save(self, directory: Path) -> None:
        """Nothing: what is sent lies in memory."""

    def load(self, directory: Path) -> Tensors:
        """See Contender."""
        del directory
        works = [
            dist.broadcast(part, source, self._groups[number % _NUM_GROUPS], async_op=True)
            for number, (source, part) in enumerate(self._messages)
        ]
        for work in works:
            work.wait()
        return self._shares


def _everyone() -> Any:
    return dist.group.WORLD


GROUP_MAKERS: Final[Mapping[str, Make]] = {
    TWO_STAGE_ZARR: _two_stage_zarr,
    TWO_STAGE_GLOO: _two_stage_gloo,
    TWO_STAGE_TORCH_DIST: _two_stage_torch_dist,
    PARALLEL: _fully_parallel,
    PARALLEL_IN_PLACE: _fully_parallel_in_place,
    PLAIN_ZARR: zarr,
}
"""For each name of the roster but the floors, what builds it in a rank process."""
