"""Those who save and load this rank's parts: Megatron-Core with a backend, and one plain stream."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor

import dist_ckpt_strategies
from dist_ckpt_strategies.cli.bench.state import Part
from dist_ckpt_strategies.cli.bench.task import FLOOR

_BACKENDS: Final[Mapping[str, tuple[str, int]]] = {
    "zarr 1": ("zarr", 1),
    "zarr 2": ("zarr", 2),
    "torch_dist": ("torch_dist", 1),
}


class Contender(Protocol):
    """One way to save and load the parts of all ranks. Both methods are collective."""

    def save(self, directory: Path) -> None:
        """Store the parts in a directory that is there and empty; flushed when it returns."""
        ...

    def load(self, directory: Path) -> None:
        """Fill the parts with what is stored."""
        ...


def build_contender(name: str, parts: Sequence[Part]) -> Contender:
    """The contender of that name."""
    return _Stream(parts) if name == FLOOR else _Megatron(parts, _BACKENDS[name])


def prepare_megatron() -> None:
    """Make our backends known, and give CPU forms to what ``torch_dist`` asks of CUDA.

    Both calls are harmless here: nothing runs beside the CPU, so there is nothing to wait for.
    """
    warnings.simplefilter("ignore")
    dist_ckpt_strategies.register()
    for name, stand_in in (("synchronize", _synchronize), ("current_device", _current_device)):
        setattr(torch.cuda, name, stand_in)


def _synchronize(_device: object = None) -> None:
    """Nothing runs beside the CPU."""


def _current_device() -> torch.device:
    return torch.device("cpu")


class _Megatron:
    """``dist_checkpointing.save`` and ``load``."""

    def __init__(self, parts: Sequence[Part], backend: tuple[str, int]) -> None:
        self._parts = parts
        self._backend = backend

    def save(self, directory: Path) -> None:
        """See Contender."""
        state = {"iteration": 1, **self._sharded()}
        dist_checkpointing.save(state, str(directory), self._backend)

    def load(self, directory: Path) -> None:
        """See Contender."""
        loaded = dist_checkpointing.load(self._sharded(), str(directory))
        for part in self._parts:
            if loaded[part.key].data_ptr() != part.tensor.data_ptr():
                part.tensor.copy_(loaded[part.key])

    def _sharded(self) -> dict[str, Any]:
        place = (0, dist.get_rank(), dist.get_world_size())
        return {
            part.key: ShardedTensor.from_rank_offsets(part.key, part.tensor, place)
            for part in self._parts
        }


class _Stream:
    """The floor: this rank's bytes into one file of its own, and from it, in one plain stream."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._memories = [
            memoryview(part.tensor.view(-1).view(torch.uint8).numpy().data) for part in parts
        ]

    def save(self, directory: Path) -> None:
        """See Contender."""
        with _own_file(directory).open("wb", buffering=0) as file:
            for memory in self._memories:
                done = 0
                while done < len(memory):
                    done += file.write(memory[done:])
            os.fsync(file.fileno())

    def load(self, directory: Path) -> None:
        """See Contender."""
        with _own_file(directory).open("rb", buffering=0) as file:
            for memory in self._memories:
                done = 0
                while done < len(memory):
                    found = file.readinto(memory[done:])
                    if not found:
                        raise EOFError(f"{file.name}: expected more bytes")
                    done += found


def _own_file(directory: Path) -> Path:
    return directory / f"rank{dist.get_rank()}.bin"
