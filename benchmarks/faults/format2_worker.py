"""What a rank does in the campaign against format 2: saves and loads, and whether it came back.

Everything follows from an array's key and the iteration, so that whoever loads knows what it has to
be, in any layout.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor

import dist_ckpt_strategies
from benchmarks.faults.local_worker import fingerprint
from benchmarks.faults.outcomes import Ending, Outcome, refused
from benchmarks.measuring.harness import RankContext, join_gloo
from dist_ckpt_strategies.config import Options
from dist_ckpt_strategies.errors import CheckpointError

PRELOAD = ("benchmarks.format2_faults",)
"""What ranks are forked with. To import TensorStore is not to use it."""

FORMAT2 = ("zarr", 2)
NUM_WRITERS = 4
_POISON = 0xA5

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """An array of the campaign.

    Attributes:
        key: of the array.
        shape: of the whole.
        dtype: of its elements.
        is_regular: whether its shards lie on a grid; those of others have unequal sizes.
    """

    key: str
    shape: Shape
    dtype: torch.dtype
    is_regular: bool = True

    def whole(self, iteration: int) -> torch.Tensor:
        """All of it: random bits."""
        seed = zlib.crc32(self.key.encode()) + iteration
        generator = torch.Generator().manual_seed(seed)
        nbytes = math.prod(self.shape) * self.dtype.itemsize
        bits = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)
        if self.dtype is torch.bool:
            bits &= 1
        return bits.view(self.dtype).reshape(self.shape)

    def part(self, rank: int, num_ranks: int, axis: int) -> tuple[Shape, Shape]:
        """Offset and shape of what a rank has, cut along an axis."""
        extent = self.shape[axis]
        ends = [extent * n // num_ranks for n in range(num_ranks + 1)]
        if not self.is_regular:
            ends = [min(extent, end + 7 * n) for n, end in enumerate(ends[:-1])] + [extent]
        offset, shape = [0] * len(self.shape), list(self.shape)
        offset[axis], shape[axis] = ends[rank], ends[rank + 1] - ends[rank]
        return tuple(offset), tuple(shape)

    def sharded(self, rank: int, num_ranks: int, axis: int, data: torch.Tensor) -> ShardedTensor:
        """What a rank has, as Megatron-Core describes it."""
        offset, shape = self.part(rank, num_ranks, axis)
        grid = tuple(num_ranks if dim == axis else 1 for dim in range(len(self.shape)))
        return ShardedTensor(
            self.key,
            data,
            self.dtype,
            shape,
            self.shape,
            offset,
            grid if self.is_regular else None,
        )


def plans(rows: int) -> tuple[Plan, ...]:
    """The arrays: two large ones, of several inner chunks to a file, and small ones."""
    return (
        Plan("decoder/weight", (rows, 512), torch.float32),
        Plan("embedding.weight", (rows, 64), torch.bfloat16),
        Plan("optimizer.flat", (rows + 113,), torch.float32, is_regular=False),
        Plan("scale", (64, 8), torch.float8_e4m3fn),
        Plan("mask", (32,), torch.bool),
        Plan("ids", (16, 4), torch.int64),
    )


@dataclass(frozen=True, slots=True)
class Spec:
    """What all ranks of a campaign have in common.

    Attributes:
        root: holds the checkpoints.
        rows: of the large arrays.
        timeout_s: longest wait for a peer.
    """

    root: Path
    rows: int
    timeout_s: float

    def directory(self, iteration: int) -> Path:
        """Where an iteration is saved, as Megatron-LM names it."""
        return self.root / f"iter_{iteration:07d}"

    def saved(self, rank: int, iteration: int) -> dict[str, Any]:
        """What a rank saves."""
        state: dict[str, Any] = {}
        for plan in plans(self.rows):
            offset, shape = plan.part(rank, NUM_WRITERS, 0)
            whole = plan.whole(iteration)
            data = whole[offset[0] : offset[0] + shape[0]].clone()
            state[plan.key] = plan.sharded(rank, NUM_WRITERS, 0, data)
        state |= {name: _object(name, v, rank) for name, v in _objects(rank, iteration).items()}
        return state | _common(iteration)

    def wanted(self, rank: int, num_ranks: int) -> dict[str, Any]:
        """What a rank asks for: cut along the last axis; its memory holds something else."""
        state: dict[str, Any] = {}
        for plan in plans(self.rows):
            _, shape = plan.part(rank, num_ranks, len(plan.shape) - 1)
            bits = torch.full((math.prod(shape) * plan.dtype.itemsize,), _POISON, dtype=torch.uint8)
            if plan.dtype is torch.bool:
                bits.zero_()
            data = bits.view(plan.dtype).reshape(shape)
            state[plan.key] = plan.sharded(rank, num_ranks, len(plan.shape) - 1, data)
        for name in _objects(0, 0):
            for owner in range(rank, NUM_WRITERS, num_ranks):
                state[f"{name} {owner}"] = _object(name, None, owner)
        return state

    def expected(self, rank: int, num_ranks: int, iteration: int) -> str:
        """The fingerprint of what a rank has to get."""
        state: dict[str, Any] = {}
        for plan in plans(self.rows):
            offset, shape = plan.part(rank, num_ranks, len(plan.shape) - 1)
            place = tuple(slice(a, a + n) for a, n in zip(offset, shape, strict=True))
            state[plan.key] = plan.whole(iteration)[place]
        for name in _objects(0, 0):
            for owner in range(rank, NUM_WRITERS, num_ranks):
                state[f"{name} {owner}"] = _objects(owner, iteration)[name]
        return fingerprint(_sorted(state | _common(iteration)))


def _object(name: str, value: Any, rank: int) -> ShardedObject:
    return ShardedObject(name, value, (NUM_WRITERS,), (rank,))


def _objects(rank: int, iteration: int) -> dict[str, Any]:
    """One that the manifest holds, and two that a file of objects does."""
    return {
        "rerun/state": {"rank": rank, "iteration": iteration, "name": "text"},
        "rng": {"tensor": torch.arange(300) * (rank + 1) + iteration, "seeds": (rank, iteration)},
        "history": f"{rank} {iteration} " * 1500,
    }


def _common(iteration: int) -> dict[str, Any]:
    return {
        "iteration": iteration,
        "args": {"lr": 1e-4, "layers": 12, "name": "run"},
        "param_groups": [{"step": torch.tensor(float(iteration)), "betas": (0.9, 0.95)}],
    }


def _sorted(state: dict[str, Any]) -> dict[str, Any]:
    return {key: state[key] for key in sorted(state)}


class Loader:
    """Loads, and compares every bit with what was saved."""

    def __init__(self, spec: Spec, rank: int, num_ranks: int) -> None:
        self._spec = spec
        self._place = (rank, num_ranks)
        self._expected: dict[int, str] = {}

    def load(self, iteration: int, directory: Path) -> Outcome:
        """How a load ends. Collective: world."""
        try:
            loaded = dist_ckpt_strategies.load(
                self._spec.wanted(*self._place), directory, timeout_s=self._spec.timeout_s
            )
        except CheckpointError as error:
            return refused(error)
        if iteration not in self._expected:
            self._expected[iteration] = self._spec.expected(*self._place, iteration)
        if (
            not isinstance(loaded, dict)
            or fingerprint(_sorted(loaded)) != self._expected[iteration]
        ):
            return Outcome(Ending.DIFFERENT, iteration, f"{directory} is not what was saved")
        return Outcome(Ending.LOADED, iteration)


class Format2Worker:
    """One rank."""

    def __init__(self, context: RankContext, spec: Spec) -> None:
        join_gloo(context)
        dist_ckpt_strategies.register(options=Options(timeout_s=spec.timeout_s))
        self._rank, self._spec = context.global_rank, spec
        self._loader = Loader(spec, context.global_rank, context.num_ranks)

    def save(self, iteration: int) -> Outcome:
        """Save."""
        return self._saved(iteration, is_async=False)

    def save_behind(self, iteration: int) -> Outcome:
        """Save asynchronously, overwrite everything, and wait for the end."""
        return self._saved(iteration, is_async=True)

    def load(self, iteration: int) -> Outcome:
        """Load, and compare every bit with what this rank has to get."""
        return self._loader.load(iteration, self._spec.directory(iteration))

    def _saved(self, iteration: int, *, is_async: bool) -> Outcome:
        state, limit_s = self._spec.saved(self._rank, iteration), self._spec.timeout_s
        directory = self._spec.directory(iteration)
        try:
            if is_async:
                handle = dist_ckpt_strategies.save_async(
                    dict(state), directory, FORMAT2, timeout_s=limit_s
                )
                for value in state.values():
                    if isinstance(value, ShardedTensor) and value.data is not None:
                        value.data.zero_()
                handle.wait()
            else:
                dist_ckpt_strategies.save(state, directory, FORMAT2, timeout_s=limit_s)
        except CheckpointError as error:
            return refused(error)
        return Outcome(Ending.SAVED, iteration)


def make_worker(spec: Spec, context: RankContext) -> Format2Worker:
    """The worker of one rank, made in its process."""
    return Format2Worker(context, spec)
