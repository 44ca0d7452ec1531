"""Small checkpoints of format 2, written by one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor

from dist_ckpt_strategies.comm.base import Communicator
from dist_ckpt_strategies.config import Options
from dist_ckpt_strategies.formats.objects import dump_object
from dist_ckpt_strategies.sharded.async_save import SaveCache
from tests.support.checkpoints import write_marker
from tests.support.formats import save_format2

LARGE, SMALL, RNG, PLAIN = "decoder.weight", "bias", "rng", "rerun"
"""LARGE is 512 x 512 float32 in one file of eight inner chunks; RNG lies in a file of objects."""


def state() -> dict[str, Any]:
    """Two arrays and two objects."""
    large = torch.arange(512 * 512, dtype=torch.float32).reshape(512, 512)
    tensors = {LARGE: large, SMALL: torch.arange(7, dtype=torch.bfloat16)}
    objects = {RNG: {"state": torch.arange(50)}, PLAIN: {"seen": 7}}
    return {key: ShardedTensor.from_rank_offsets(key, value) for key, value in tensors.items()} | {
        key: ShardedObject(key, value, (1,), (0,)) for key, value in objects.items()
    }


def write_format2(root: Path, *, is_finished: bool = True) -> Path:
    """Write a checkpoint, or what a save leaves that is killed just before its end."""
    root.mkdir(parents=True)
    (root / "common.pt").write_bytes(dump_object({"iteration": 7}, name="common state"))
    save_format2(state(), root, Communicator(), Options(timeout_s=60.0), SaveCache())
    if is_finished:
        write_marker(root, "zarr", 2)
    return root
