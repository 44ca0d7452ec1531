"""The commands, and a checkpoint of format 2 for them: in a directory, or in an object store."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedObject
from typer.testing import CliRunner, Result

import dist_ckpt_strategies
from dist_ckpt_strategies.cli.app import app
from tests.support.object_stores import ObjectStore
from tests.support.sharding import Cut, on_grid, state_of

FORMAT2 = ("zarr", 2)
PACK = "objects/rank-00000.bin"
CHUNK = "arrays/w/c.0.0"
INDEX = "manifest/index.json"
PART = "manifest/part-00000.json"


def cuts() -> list[Cut]:
    """Two arrays of several inner chunks."""
    return [on_grid("w", (300, 200), (1, 1)), on_grid("v", (300, 200), (1, 1))]


def write(url: str, iteration: int = 3) -> str:
    """Save a checkpoint with two arrays and two objects; its URL."""
    values: dict[str, Any] = {"o": {"t": torch.ones(3)}, "plain": {"seen": 7}}
    objects = {key: ShardedObject(key, value, (1,), (0,)) for key, value in values.items()}
    state = state_of(0, cuts()) | objects | {"iteration": iteration}
    dist_ckpt_strategies.save(state, url, FORMAT2)
    return url


class DirectoryFiles:
    """The files of a checkpoint in a directory, by their names below it."""

    def __init__(self, root: Path) -> None:
        self.address, self._root = write(str(root)), root

    def names(self) -> list[str]:
        """Of all of them."""
        paths = (path for path in self._root.rglob("*") if path.is_file())
        return [str(path.relative_to(self._root)) for path in paths]

    def read(self, name: str) -> bytes:
        return (self._root / name).read_bytes()

    def put(self, name: str, content: bytes) -> None:
        (self._root / name).write_bytes(content)

    def delete(self, name: str) -> None:
        (self._root / name).unlink()

    def put_beside(self, name: str) -> None:
        """Put a file that is no part of the checkpoint next to its own."""
        self.put(name, b"mine")

    def unmark(self) -> None:
        """Have the save not finished."""
        self.delete("metadata.json")


class BucketFiles:
    """The objects of a checkpoint in a bucket, by their names below the prefix of its save."""

    def __init__(self, store: ObjectStore, bucket: str) -> None:
        self._store, self._bucket, self._path = store, bucket, "run/iter_0000003"
        self.address = write(f"s3://{bucket}/{self._path}")
        self._prefix = f"{store.place(bucket, self._path)}/"

    def names(self) -> list[str]:
        """Of all of them."""
        names = self._store.names(self._bucket)
        return [name.removeprefix(self._prefix) for name in names if name.startswith(self._prefix)]

    def read(self, name: str) -> bytes:
        return self._store.read(self._bucket, self._prefix + name)

    def put(self, name: str, content: bytes) -> None:
        self._store.put(self._bucket, self._prefix + name, content)

    def delete(self, name: str) -> None:
        self._store.delete(self._bucket, self._prefix + name)

    def put_beside(self, name: str) -> None:
        """Put an object that is no part of the checkpoint next to its own."""
        self._store.put(self._bucket, f"{self._path}/{name}", b"mine")

    def unmark(self) -> None:
        """Have the save not finished."""
        self._store.delete(self._bucket, f"{self._path}/metadata.json")


Files = DirectoryFiles | BucketFiles


def run(*args: Any, answer: str = "") -> Result:
    """One command."""
    return CliRunner().invoke(app, list(map(str, args)), input=answer)


def json_of(*args: Any) -> dict[str, Any]:
    """What a command says with ``--json``."""
    result = run(*args, "--json")
    assert result.stdout, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def problems(url: str) -> dict[str, set[str]]:
    """What verify finds, by object."""
    found: dict[str, set[str]] = {}
    for finding in json_of("verify", url)["findings"]:
        found.setdefault(finding["path"], set()).add(finding["problem"])
    return found
