"""A checkpoint of format 2 in a directory or in an object store, and its files."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing import ShardedObject

import dist_ckpt_strategies
from tests.cli.commands import issues_of
from tests.support.folders import Folder
from tests.support.sharding import Cut, differences, no_data, on_grid, state_of

ONE_SERVER = pytest.mark.parametrize("store", ["moto"], indirect=True)

FORMAT2 = ("zarr", 2)
PACK = "objects/rank-00000.bin"
CHUNK = "arrays/w/c.0.0"
INDEX = "manifest/index.json"


def cuts() -> list[Cut]:
    """Two arrays of several inner chunks."""
    return [on_grid("w", (300, 200), (1, 1)), on_grid("v", (300, 200), (1, 1))]


def write(address: str, iteration: int = 3, backend: tuple[str, int] = FORMAT2) -> str:
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


def inner_of(checkpoint: Folder) -> Folder:
    """Where all its files but the marker are: in a bucket below the prefix of its one save."""
    saves = {name.partition("/")[0] for name in checkpoint.names() if name.startswith("save-")}
    return checkpoint.below(*saves) if saves else checkpoint


@dataclass(frozen=True, slots=True)
class Files:
    """A checkpoint, and its files by their names below the place of its save."""

    top: Folder  # its directory; in a bucket its prefix, where its marker is
    inner: Folder  # where its other files are

    @property
    def address(self) -> str:
        """Of the checkpoint."""
        return self.top.address

    def flip(self, name: str, *byte_offsets: int) -> None:
        """Change a bit of some bytes of a file, by default of one in the middle."""
        content = bytearray(self.inner.read(name))
        for offset in byte_offsets or [len(content) // 3]:
            content[offset] ^= 0x10
        self.inner.put(name, bytes(content))


def problems(address: str) -> dict[str, set[str]]:
    """What ``verify`` finds, by file."""
    found: dict[str, set[str]] = {}
    for problem, _, path in issues_of(address):
        found.setdefault(path, set()).add(problem)
    return found
