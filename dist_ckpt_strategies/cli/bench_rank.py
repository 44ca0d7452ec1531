"""One rank of ``dist-ckpt bench``.

It holds its shards of matrices, and saves and loads them through Megatron-Core's own
``dist_checkpointing`` and as one plain stream. Every load is compared with what was saved.
"""

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import xxhash
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor

import dist_ckpt_strategies
from dist_ckpt_strategies.cli.bench import BACKENDS, STEPS, Sample, drop_cache
from dist_ckpt_strategies.comm.base import (
    Communicator,
    run_and_gather,
    run_collectively,
    run_on_first_rank,
)

_NUM_LAYERS = 24
_SHAPES = {"qkv": (3, 1), "proj": (1, 1), "fc1": (4, 1), "fc2": (4, 1), "norm": (1, 0)}
"""Arrays of a layer: rows and columns in times of the width; 0: one column."""
_MEAN_ITEMSIZE = 3
"""Half of the layers are float32, half bfloat16."""

Tensors = Mapping[str, torch.Tensor]


def build_state(nbytes: int, rank: int, num_ranks: int) -> Tensors:
    """One rank's rows of every array, of a state of about ``nbytes`` on all ranks together."""
    generator = torch.Generator().manual_seed(rank)
    num_squares = _NUM_LAYERS * sum(rows * columns for rows, columns in _SHAPES.values())
    # A multiple of the ranks, so that all have as much.
    width = (
        max(1, round(math.sqrt(nbytes / (num_squares * _MEAN_ITEMSIZE)) / num_ranks)) * num_ranks
    )
    return {
        f"decoder.layers.{layer}.{name}.weight": torch.empty(
            (rows * width // num_ranks, columns * width or 1),
            dtype=torch.bfloat16 if layer % 2 else torch.float32,
        ).normal_(generator=generator)
        for layer in range(_NUM_LAYERS)
        for name, (rows, columns) in _SHAPES.items()
    }


def _bytes(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.view(-1).view(torch.uint8).numpy().data)


def _digest(tensor: torch.Tensor) -> int:
    return xxhash.xxh3_64_intdigest(_bytes(tensor))


class Target:
    """Tensors that loads fill, and what they are to be filled with: what they hold now."""

    def __init__(self, tensors: Tensors) -> None:
        self._tensors = tensors
        self._digests = {key: _digest(tensor) for key, tensor in tensors.items()}

    def clear(self) -> None:
        """Overwrite the tensors, so that a load that does nothing is found out."""
        for tensor in self._tensors.values():
            tensor.zero_()

    def accept(self, loaded: Tensors) -> None:
        """Copy from tensors that are not these themselves."""
        for key, tensor in self._tensors.items():
            if loaded[key].data_ptr() != tensor.data_ptr():
                tensor.copy_(loaded[key])

    def check(self, name: str) -> None:
        """Compare the tensors with what they are to hold.

        Raises:
            ValueError: one differs.
        """
        for key, tensor in self._tensors.items():
            if _digest(tensor) != self._digests[key]:
                raise ValueError(f"{key}: {name} loaded other values than were saved")


class BenchRank:
    """One rank's share of about ``nbytes`` on all ranks. Every method is collective over these.

    The workspace is an empty directory.
    """

    def __init__(self, comm: Communicator, nbytes: int, workspace: Path) -> None:
        dist_ckpt_strategies.register()
        self._comm, self._workspace = comm, workspace
        self._tensors = build_state(nbytes, comm.rank, comm.size)
        own_nbytes = sum(tensor.nbytes for tensor in self._tensors.values())
        self.nbytes = sum(comm.all_gather(own_nbytes))
        self.num_arrays = len(self._tensors)

    def samples(self, candidates: Sequence[str], repetitions: int) -> Iterator[Sample]:
        """Save and load with every candidate in turn; each step is a sample."""
        # torch_dist calls both, also for tensors on the CPU.
        with (
            patch.object(torch.cuda, "synchronize", lambda _device=None: None),
            patch.object(torch.cuda, "current_device", lambda: torch.device("cpu")),
        ):
            for repetition in range(repetitions + 1):
                # Forwards and backwards in turn, so that what each leaves behind affects all.
                for name in candidates[:: -1 if repetition % 2 else 1]:
                    directory = self._workspace / f"{name} {repetition}"
                    of_name = {"candidate": name, "repetition": repetition}
                    for step, seconds in self._save_and_load(name, directory):
                        yield {"step": step, **of_name, "seconds": seconds}

    def _save_and_load(self, name: str, directory: Path) -> Iterator[tuple[str, float]]:
        """The steps and their seconds."""
        tensors, comm = self._tensors, self._comm
        target = Target(tensors)
        stream = directory / f"rank{comm.rank}.bin"
        save, load = partial(write_stream, tensors, stream), partial(read_stream, tensors, stream)
        if name in BACKENDS:
            save = partial(self._save, directory, BACKENDS[name])
            load = partial(self._load, directory, target)

        def forget() -> list[Path]:
            target.clear()
            files = sorted(path for path in directory.rglob("*") if path.is_file())
            own_files = files[comm.rank :: comm.size]
            drop_cache(own_files)
            return own_files

        def finish() -> None:
            target.check(name)
            # Truncated now and removed at the end: some file systems are slow at making
            # directories right after many files were removed.
            for path in own_files:
                os.truncate(path, 0)

        run_on_first_rank(comm, directory.mkdir)
        yield STEPS[0], self._seconds(save)
        own_files = run_collectively(comm, forget)
        yield STEPS[1], self._seconds(load)
        run_collectively(comm, finish)

    def _seconds(self, step: Callable[[], None]) -> float:
        """From the first rank's start to the last rank's end."""

        def timed() -> list[float]:
            began = time.perf_counter()
            step()
            return [began, time.perf_counter()]

        times = run_and_gather(self._comm, timed)
        return float(max(ended for _, ended in times) - min(began for began, _ in times))

    def _save(self, directory: Path, backend: tuple[str, int]) -> None:
        state = {"iteration": 1, **self._sharded()}
        dist_checkpointing.save(state, str(directory), backend)

    def _load(self, directory: Path, target: Target) -> None:
        target.accept(dist_checkpointing.load(self._sharded(), str(directory)))

    def _sharded(self) -> dict[str, Any]:
        comm = self._comm
        return {
            key: ShardedTensor.from_rank_offsets(key, tensor, (0, comm.rank, comm.size))
            for key, tensor in self._tensors.items()
        }


def write_stream(tensors: Tensors, path: Path, *, flushes: bool = True) -> None:
    """The baseline: this rank's bytes into one file of its own."""
    with path.open("wb") as file:
        for tensor in tensors.values():
            file.write(_bytes(tensor))
        file.flush()
        if flushes:
            os.fsync(file.fileno())


def read_stream(tensors: Tensors, path: Path) -> None:
    """Fill the tensors with what ``write_stream`` has written of them."""
    with path.open("rb") as file:
        for tensor in tensors.values():
            if file.readinto(memory := _bytes(tensor)) != len(memory):
                raise EOFError(f"{path}: expected more bytes")
