"""The commands over an object store, and a checkpoint in it for them."""

from __future__ import annotations

import json
from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedObject
from typer.testing import CliRunner, Result

import dist_ckpt_strategies
from dist_ckpt_strategies.cli.app import app
from tests.support.sharding import Cut, on_grid, state_of

FORMAT2 = ("zarr", 2)
PACK = "objects/rank-00000.bin"
CHUNK = "arrays/w/c.0.0"


def cuts() -> list[Cut]:
    """Two arrays of several inner chunks."""
    return [on_grid("w", (300, 200), (1, 1)), on_grid("v", (300, 200), (1, 1))]


def write(url: str, iteration: int = 3) -> str:
    """Save a checkpoint with two arrays and an object; its URL."""
    objects = {"o": ShardedObject("o", {"t": torch.ones(3)}, (1,), (0,))}
    state = state_of(0, cuts()) | objects | {"iteration": iteration}
    dist_ckpt_strategies.save(state, url, FORMAT2)
    return url


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
