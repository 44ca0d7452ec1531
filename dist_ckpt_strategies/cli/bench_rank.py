"""One rank of ``dist-ckpt bench``.

It holds its shards of matrices, and saves and loads them through Megatron-Core's own
``dist_checkpointing`` and as one plain stream. Every load is compared with what was saved.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import xxhash
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor

import dist_ckpt_strategies
from dist_ckpt_strategies.cli.bench import BACKENDS, STEPS, drop_cache
from dist_ckpt_strategies.comm.base import Communicator

_NUM_LAYERS = 24
_SHAPES = {"qkv": (3, 1), "proj": (1, 1), "fc1": (4, 1), "fc2": (4, 1), "norm": (1, 0)}
"""Arrays of a layer: rows and columns in times of the width; 0: one column."""
_MEAN_ITEMSIZE = 3
"""Half of the layers are float32, half bfloat16."""

Tensors = dict[str, torch.Tensor]


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


def _digests(tensors: Tensors) -> dict[str, int]:
    return {key: xxhash.xxh3_64_intdigest(_bytes(tensor)) for key, tensor in tensors.items()}


def measure(task: dict[str, Any], comm: Communicator, report: Callable[..., None]) -> None:
    """Save and load with every candidate in turn, and report each as a sample. Collective."""
    dist_ckpt_strategies.register()
    tensors = build_state(task["nbytes"], comm.rank, comm.size)
    nbytes = sum(comm.all_gather(sum(tensor.nbytes for tensor in tensors.values())))
    report("state", nbytes=nbytes, num_arrays=len(tensors))
    # torch_dist calls both, also for tensors on the CPU.
    with (
        patch.object(torch.cuda, "synchronize", lambda _device=None: None),
        patch.object(torch.cuda, "current_device", lambda: torch.device("cpu")),
    ):
        for repetition in range(task["repetitions"] + 1):
            # Forwards and backwards in turn, so that what each leaves behind affects all.
            for name in task["candidates"][:: -1 if repetition % 2 else 1]:
                directory = task["workspace"] / f"{name} {repetition}"
                for step, seconds in _save_and_load(tensors, name, directory, comm):
                    report(
                        "sample", step=step, contender=name, repetition=repetition, seconds=seconds
                    )


def _save_and_load(
    tensors: Tensors, name: str, directory: Path, comm: Communicator
) -> Iterator[tuple[str, float]]:
    """The steps and their seconds. Collective."""
    if comm.rank == 0:
        directory.mkdir()
    digests = _digests(tensors)
    save: Callable[[Tensors, Path], None] = write_stream
    load: Callable[[Tensors, Path], None] = read_stream
    target = directory / f"rank{comm.rank}.bin"
    if name in BACKENDS:
        save, load = partial(_save, backend=BACKENDS[name], comm=comm), partial(_load, comm=comm)
        target = directory
    yield STEPS[0], _seconds(partial(save, tensors, target), comm)
    for tensor in tensors.values():
        tensor.zero_()  # a load that does nothing is detected
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    own_files = files[comm.rank :: comm.size]
    drop_cache(own_files)
    yield STEPS[1], _seconds(partial(load, tensors, target), comm)
    for key, digest in _digests(tensors).items():
        if digest != digests[key]:
            raise ValueError(f"{key}: {name} loaded other values than were saved")
    comm.all_gather(None)
    # Truncated now and removed at the end: some file systems are slow at making directories right
    # after many files were removed.
    for path in own_files:
        os.truncate(path, 0)


def _seconds(step: Callable[[], None], comm: Communicator) -> float:
    """From the first rank's start to the last rank's end. Collective."""
    comm.all_gather(None)
    began = time.perf_counter()
    step()
    times = comm.all_gather([began, time.perf_counter()])
    return float(max(ended for _, ended in times) - min(began for began, _ in times))


def _save(tensors: Tensors, directory: Path, backend: tuple[str, int], comm: Communicator) -> None:
    state = {"iteration": 1, **_sharded(tensors, comm)}
    dist_checkpointing.save(state, str(directory), backend)


def _load(tensors: Tensors, directory: Path, comm: Communicator) -> None:
    loaded = dist_checkpointing.load(_sharded(tensors, comm), str(directory))
    for key, tensor in tensors.items():
        if loaded[key].data_ptr() != tensor.data_ptr():
            tensor.copy_(loaded[key])


def _sharded(tensors: Tensors, comm: Communicator) -> dict[str, Any]:
    return {
        key: ShardedTensor.from_rank_offsets(key, tensor, (0, comm.rank, comm.size))
        for key, tensor in tensors.items()
    }


def write_stream(tensors: Mapping[str, torch.Tensor], path: Path, *, flushes: bool = True) -> None:
    """The baseline: this rank's bytes into one file of its own."""
    with path.open("wb") as file:
        for tensor in tensors.values():
            file.write(_bytes(tensor))
        file.flush()
        if flushes:
            os.fsync(file.fileno())


def read_stream(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """Fill the tensors with what ``write_stream`` has written of them."""
    with path.open("rb") as file:
        for tensor in tensors.values():
            if file.readinto(memory := _bytes(tensor)) != len(memory):
                raise EOFError(f"{path}: expected more bytes")
