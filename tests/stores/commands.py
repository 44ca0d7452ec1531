"""The commands, and a checkpoint of format 2 for them: in a directory, or in an object store."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedObject
from typer.testing import CliRunner, Result

import dist_ckpt_strategies
from dist_ckpt_strategies.cli.app import app
from tests.support.object_stores import ObjectStore
from tests.support.places import AnyPlace, BucketPlace, DirectoryPlace
from tests.support.sharding import Cut, on_grid, state_of

FORMAT2 = ("zarr", 2)
PACK = "objects/rank-00000.bin"
CHUNK = "arrays/w/c.0.0"
INDEX = "manifest/index.json"


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


@dataclass(frozen=True, slots=True)
class Files:
    """A checkpoint, and its files by their names below the place of its save.

    Attributes:
        address: of the checkpoint.
        top: its directory; in a bucket its prefix, where its marker is.
        inner: where its other files are.
    """

    address: str
    top: AnyPlace
    inner: AnyPlace

    @property
    def is_directory(self) -> bool:
        return isinstance(self.top, DirectoryPlace)

    def unmark(self) -> None:
        """Have the save not finished."""
        self.top.delete("metadata.json")


def files_in_directory(root: Path) -> Files:
    """Those of a new checkpoint in a directory."""
    place = DirectoryPlace(root)
    return Files(write(str(root)), place, place)


def files_in_bucket(store: ObjectStore, bucket: str) -> Files:
    """Those of a new checkpoint in a bucket."""
    top = BucketPlace(store, bucket, "run/iter_0000003")
    address = write(top.address)
    return Files(address, top, BucketPlace(store, bucket, store.place(bucket, top.path)))


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
    for finding in json_of("verify", url)["issues"]:
        found.setdefault(finding["path"], set()).add(finding["problem"])
    return found
