"""One rank of ``dist-ckpt bench``.

It holds an equal part of a state like a GPT's, and saves and loads it through Megatron-Core's own
``dist_checkpointing`` and as one plain stream. Every load is compared with what was saved.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import torch
import xxhash
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor

import dist_ckpt_strategies
from dist_ckpt_strategies.cli.bench import BASELINE, BenchTask
from dist_ckpt_strategies.comm.base import Communicator

_BACKENDS: Final = {"zarr 1": ("zarr", 1), "zarr 2": ("zarr", 2), "torch_dist": ("torch_dist", 1)}
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

Tensors = Mapping[str, torch.Tensor]


def build_state(nbytes: int, rank: int, num_ranks: int) -> dict[str, torch.Tensor]:
    """One rank's rows of every array, of a state of about ``nbytes`` on all ranks together."""
    generator = torch.Generator().manual_seed(rank)
    # A multiple of the ranks, so that all have as much.
    width = math.sqrt(nbytes / (_NUM_LAYERS * sum(_NUM_ROWS.values()) * _MEAN_ITEMSIZE))
    width = max(1, round(width / num_ranks)) * num_ranks
    return {
        key: torch.empty((rows // num_ranks, *rest), dtype=dtype).normal_(generator=generator)
        for key, (rows, *rest), dtype in _arrays(width)
    }


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


def digests_of(tensors: Tensors) -> dict[str, int]:
    """The digest of each tensor's content."""
    return {key: xxhash.xxh3_64_intdigest(_bytes(tensor)) for key, tensor in tensors.items()}


class _Megatron:
    """``dist_checkpointing.save`` and ``load`` with a backend. Both methods are collective."""

    def __init__(self, tensors: Tensors, comm: Communicator, backend: tuple[str, int]) -> None:
        self._tensors, self._backend = tensors, backend
        self._offset = (0, comm.rank, comm.size)

    def save(self, directory: Path) -> None:
        """Store the tensors in an existing, empty directory; flushed when it returns."""
        state = {"iteration": 1, **self._sharded()}
        dist_checkpointing.save(state, str(directory), self._backend)

    def load(self, directory: Path) -> None:
        """Fill the tensors with the stored content."""
        loaded = dist_checkpointing.load(self._sharded(), str(directory))
        for key, tensor in self._tensors.items():
            if loaded[key].data_ptr() != tensor.data_ptr():
                tensor.copy_(loaded[key])

    def _sharded(self) -> dict[str, Any]:
        return {
            key: ShardedTensor.from_rank_offsets(key, tensor, self._offset)
            for key, tensor in self._tensors.items()
        }


class _Stream:
    """The baseline: this rank's bytes into one file of its own, and from it, in one stream."""

    def __init__(self, tensors: Tensors, comm: Communicator) -> None:
        self._memories = [_bytes(tensor) for tensor in tensors.values()]
        self._name = f"rank{comm.rank}.bin"

    def save(self, directory: Path) -> None:
        """See _Megatron."""
        with (directory / self._name).open("wb") as file:
            for memory in self._memories:
                file.write(memory)
            file.flush()
            os.fsync(file.fileno())

    def load(self, directory: Path) -> None:
        """See _Megatron."""
        with (directory / self._name).open("rb") as file:
            for memory in self._memories:
                if file.readinto(memory) != len(memory):
                    raise EOFError(f"{file.name}: expected more bytes")


def measure(task: BenchTask, comm: Communicator, report: Callable[..., None]) -> None:
    """Save and load with every candidate in turn, and report each as a sample. Collective."""
    dist_ckpt_strategies.register()
    tensors = build_state(task.nbytes, comm.rank, comm.size)
    digests = digests_of(tensors)
    sizes = comm.all_gather(sum(tensor.nbytes for tensor in tensors.values()))
    report("state", nbytes=sum(sizes), num_arrays=len(tensors))
    candidates: dict[str, _Megatron | _Stream] = {
        name: _Megatron(tensors, comm, backend) for name, backend in _BACKENDS.items()
    }
    candidates[BASELINE] = _Stream(tensors, comm)

    def timed(step: str, repetition: int, name: str, directory: Path) -> None:
        call = getattr(candidates[name], step)
        comm.all_gather(None)
        began = time.perf_counter()
        call(directory)
        times = comm.all_gather([began, time.perf_counter()])
        seconds = max(ended for _, ended in times) - min(began for began, _ in times)
        report("sample", step=step, contender=name, repetition=repetition, seconds=seconds)

    # torch_dist calls both, also for tensors on the CPU.
    with (
        patch.object(torch.cuda, "synchronize", lambda _device=None: None),
        patch.object(torch.cuda, "current_device", lambda: torch.device("cpu")),
    ):
        for turn, (repetition, name) in enumerate(task.turns()):
            directory = task.workspace / str(turn)
            if comm.rank == 0:
                directory.mkdir()
            timed("save", repetition, name, directory)
            for tensor in tensors.values():
                tensor.zero_()  # a load that does nothing is detected
            files = sorted(path for path in directory.rglob("*") if path.is_file())
            own_files = files[comm.rank :: comm.size]
            _drop_cache(own_files)
            timed("load", repetition, name, directory)
            for key, digest in digests_of(tensors).items():
                if digest != digests[key]:
                    raise ValueError(f"{key}: {name} loaded other values than were saved")
            comm.all_gather(None)
            # Truncated now and removed at the end: some file systems are slow at making
            # directories right after many files were removed.
            for path in own_files:
                os.truncate(path, 0)


def _drop_cache(files: list[Path]) -> None:
    """Drop files, which are flushed, from the page cache; where the kernel can do that."""
    for path in files if hasattr(os, "posix_fadvise") else ():
        handle = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)
