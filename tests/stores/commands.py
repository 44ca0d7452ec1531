"""A checkpoint of packs in a directory or in an object store, and its files."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing import ShardedObject

import dist_ckpt_strategies
from tests.cli.commands import issues_of
from tests.support.entries import PACKS
from tests.support.folders import Folder
from tests.support.sharding import Cut, differences, no_data, on_grid, state_of

ONE_SERVER = pytest.mark.parametrize("store", ["moto"], indirect=True)


def cuts() -> list[Cut]:
    """Two arrays of 240 kB."""
    return [on_grid("w", (300, 200), (1, 1)), on_grid("v", (300, 200), (1, 1))]


def write(address: str, iteration: int = 3, backend: tuple[str, int] = PACKS) -> str:
    """Save a checkpoint with two arrays and two objects; its address."""
    values: dict[str, Any] = {"o": {"t": torch.ones(3)}, "plain": {"seen": 7}}
    objects = {key: ShardedObject(key, value, (1,), (0,)) for key, value in values.items()}
    state = state_of(0, cuts()) | objects | {"iteration": iteration}
    dist_ckpt_strategies.save(state, address, backend)
    return address


def differing(
    address: str, wanted: list[Cut], strategy: Any = None, rank: int = 0, **options: Any
) -> list[str]:
    """Names of what a load gives otherwise than it was saved."""
    state = state_of(rank, wanted, no_data)
    loaded: Any = dist_ckpt_strategies.load(state, address, strategy, **options)
    return differences(rank, wanted, loaded)


@dataclass(frozen=True, slots=True)
class Files:
    """A checkpoint, and its files by their names."""

    top: Folder

    @property
    def pack(self) -> str:
        """The one file that has its arrays and objects."""
        (name,) = [name for name in self.top.names() if name.startswith("packs/")]
        return name

    @property
    def address(self) -> str:
        """Of the checkpoint."""
        return self.top.address

    def flip(self, name: str, *byte_offsets: int) -> None:
        """Change a bit of some bytes of a file, by default of one in the middle."""
        content = bytearray(self.top.read(name))
        for offset in byte_offsets or [len(content) // 3]:
            content[offset] ^= 0x10
        self.top.put(name, bytes(content))


def problems(address: str) -> dict[str, set[str]]:
    """What ``verify`` finds, by file."""
    found: dict[str, set[str]] = {}
    for problem, _, path in issues_of(address):
        found.setdefault(path, set()).add(problem)
    return found
