"""One rank of ``dist-ckpt bench``: ``python -m dist_ckpt_strategies.cli.bench_rank RANK TASK``.

It holds an equal part of a state like a GPT's, and saves and loads it through Megatron-Core's own
``dist_checkpointing`` and as one plain stream. Every load is compared with what was saved.
"""

from __future__ import annotations

import math
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
import xxhash
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor

import dist_ckpt_strategies
from dist_ckpt_strategies.cli.bench import BASELINE, LOAD, SAVE, BenchTask
from dist_ckpt_strategies.cli.ranks import rank_process, task_of, write_event

_BACKENDS: Final = {
    "zarr 1": ("zarr", 1),
    "zarr 2": ("zarr", 2),
    "torch_dist": ("torch_dist", 1),
}
_NUM_LAYERS = 24
_NUM_ROWS = {
    "self_attention.linear_qkv": 3,
    "self_attention.linear_proj": 1,
    "mlp.linear_fc1": 4,
    "mlp.linear_fc2": 4,
}
"""Matrices of a layer, and their rows in times of ``hidden``."""
_NORMS = ("input_layernorm", "pre_mlp_layernorm")
_MEAN_ITEMSIZE = 3
"""Half of the layers are float32, half bfloat16."""


@dataclass(frozen=True, slots=True)
class Part:
    """This rank's part of an array, which is divided by rows.

    Attributes:
        key: name of the array.
        tensor: the part.
        digest: of the saved content.
    """

    key: str
    tensor: torch.Tensor
    digest: int

    def is_as_saved(self) -> bool:
        """Whether the tensor holds the saved content."""
        return _digest(self.tensor) == self.digest


def build_parts(nbytes: int, global_rank: int, num_ranks: int) -> tuple[Part, ...]:
    """One part of every array, of a state of about ``nbytes`` in all parts together."""
    generator = torch.Generator().manual_seed(global_rank)
    parameters = _NUM_LAYERS * sum(_NUM_ROWS.values())
    # A multiple of the ranks, so that all parts are equal.
    width = math.sqrt(nbytes / (parameters * _MEAN_ITEMSIZE))
    parts = []
    for key, shape, dtype in _arrays(max(1, round(width / num_ranks)) * num_ranks):
        rows = (shape[0] // num_ranks, *shape[1:])
        tensor = torch.empty(rows, dtype=dtype).normal_(generator=generator)
        parts.append(Part(key, tensor, _digest(tensor)))
    return tuple(parts)


def _arrays(width: int) -> Iterator[tuple[str, tuple[int, ...], torch.dtype]]:
    """Key, shape and dtype of every array."""
    for layer in range(_NUM_LAYERS):
        dtype = torch.bfloat16 if layer % 2 else torch.float32
        for name, times in _NUM_ROWS.items():
            yield f"decoder.layers.{layer}.{name}.weight", (times * width, width), dtype
        for name in _NORMS:
            for kind in ("weight", "bias"):
                yield f"decoder.layers.{layer}.{name}.{kind}", (width,), dtype


def _bytes(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.view(-1).view(torch.uint8).numpy().data)


def _digest(tensor: torch.Tensor) -> int:
    return int(xxhash.xxh3_64_intdigest(_bytes(tensor)))


class _Megatron:
    """``dist_checkpointing.save`` and ``load`` with a backend. Both methods are collective."""

    def __init__(self, parts: Sequence[Part], backend: tuple[str, int]) -> None:
        self._parts = parts
        self._backend = backend

    def save(self, directory: Path) -> None:
        """Store the parts in an existing, empty directory; flushed when it returns."""
        state = {"iteration": 1, **self._sharded()}
        dist_checkpointing.save(state, str(directory), self._backend)

    def load(self, directory: Path) -> None:
        """Fill the parts with the stored content."""
        loaded = dist_checkpointing.load(self._sharded(), str(directory))
        for part in self._parts:
            if loaded[part.key].data_ptr() != part.tensor.data_ptr():
                part.tensor.copy_(loaded[part.key])

    def _sharded(self) -> dict[str, Any]:
        offset = (0, dist.get_rank(), dist.get_world_size())
        return {
            part.key: ShardedTensor.from_rank_offsets(part.key, part.tensor, offset)
            for part in self._parts
        }


class _Stream:
    """The baseline: this rank's bytes into one file of its own, and from it, in one stream."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._memories = [_bytes(part.tensor) for part in parts]

    def save(self, directory: Path) -> None:
        """See _Megatron."""
        with _own_file(directory).open("wb", buffering=0) as file:
            for memory in self._memories:
                done = 0
                while done < len(memory):
                    done += file.write(memory[done:])
            os.fsync(file.fileno())

    def load(self, directory: Path) -> None:
        """See _Megatron."""
        with _own_file(directory).open("rb", buffering=0) as file:
            for memory in self._memories:
                done = 0
                while done < len(memory):
                    found = file.readinto(memory[done:])
                    if not found:
                        raise EOFError(f"{file.name}: expected more bytes")
                    done += found


class _Rank:
    """Saves and loads with every candidate in turn. Every method is collective over the world."""

    def __init__(self, global_rank: int, task: BenchTask) -> None:
        self._task = task
        self._is_first = global_rank == 0
        self._parts = build_parts(task.nbytes, global_rank, task.num_ranks)
        self._nbytes = sum(part.tensor.nbytes for part in self._parts)

    def run(self) -> None:
        candidates: dict[str, _Megatron | _Stream] = {BASELINE: _Stream(self._parts)}
        for name, backend in _BACKENDS.items():
            candidates[name] = _Megatron(self._parts, backend)
        for turn, (repetition, name) in enumerate(self._task.turns()):
            self._save_and_load(candidates[name], turn, repetition, name)

    def _save_and_load(
        self, candidate: _Megatron | _Stream, turn: int, repetition: int, name: str
    ) -> None:
        directory = self._task.workspace / str(turn)
        if self._is_first:
            directory.mkdir()
        self._time(lambda: candidate.save(directory), SAVE, repetition, name)
        for part in self._parts:
            part.tensor.zero_()  # a load that does nothing is detected
        _drop_cache(_own_share(directory))
        self._time(lambda: candidate.load(directory), LOAD, repetition, name)
        wrong = next((part.key for part in self._parts if not part.is_as_saved()), None)
        if wrong is not None:
            raise ValueError(f"{wrong}: {name} loaded other values than were saved")
        dist.barrier()
        # Truncated now and removed at the end: some file systems are slow at making directories
        # right after many files were removed.
        for path in _own_share(directory):
            os.truncate(path, 0)

    def _time(self, step: Callable[[], None], what: str, repetition: int, name: str) -> None:
        """Report the seconds from the first rank's start to the last rank's end."""
        dist.barrier()
        began = time.perf_counter()
        step()
        own = torch.tensor([began, time.perf_counter(), self._nbytes], dtype=torch.float64)
        found = [torch.empty_like(own) for _ in range(self._task.num_ranks)]
        dist.all_gather(found, own)
        times = torch.stack(found)
        if self._is_first:
            write_event(
                self._task.scratch,
                "sample",
                step=what,
                candidate=name,
                repetition=repetition,
                seconds=float(times[:, 1].max() - times[:, 0].min()),
                nbytes=int(times[:, 2].sum()),
                num_arrays=len(self._parts),
            )


def _own_file(directory: Path) -> Path:
    return directory / f"rank{dist.get_rank()}.bin"


def _own_share(directory: Path) -> list[Path]:
    """This rank's share of the files below."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return files[dist.get_rank() :: dist.get_world_size()]


def _drop_cache(files: Sequence[Path]) -> None:
    """Drop files, which are flushed, from the page cache; where the kernel can do that."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path in files:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)


def _synchronize(_device: object = None) -> None:
    """Nothing runs beside the CPU."""


def _current_device() -> torch.device:
    return torch.device("cpu")


def main(arguments: list[str]) -> None:
    """Run one rank.

    Args:
        arguments: the global rank, and the task.
    """
    global_rank, task = task_of(arguments)
    with rank_process(task.scratch, global_rank, task.num_ranks, task.timeout_s):
        warnings.simplefilter("ignore")
        dist_ckpt_strategies.register()
        # torch_dist calls both, also for tensors on the CPU.
        for name, stand_in in (("synchronize", _synchronize), ("current_device", _current_device)):
            setattr(torch.cuda, name, stand_in)
        _Rank(global_rank, task).run()


if __name__ == "__main__":
    main(sys.argv[1:])
