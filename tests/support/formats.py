"""Save and load in a format, by a communicator of any kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dist_ckpt_strategies.comm.base import Communicator
from dist_ckpt_strategies.config import Options
from dist_ckpt_strategies.run.report import SaveReport
from dist_ckpt_strategies.storage.checkpoints import Format1Checkpoint, Format2Checkpoint
from dist_ckpt_strategies.strategies.format1_target import Format1Target
from dist_ckpt_strategies.strategies.format2_target import Format2Target
from dist_ckpt_strategies.strategies.save_planning import SaveMemory
from dist_ckpt_strategies.strategies.sharded_load import load_sharded
from dist_ckpt_strategies.strategies.sharded_save import save_sharded


def save_format1(
    state: dict[str, Any], root: Path, comm: Communicator, options: Options, memory: SaveMemory
) -> SaveReport:
    """Save without a marker."""
    return save_sharded(
        state, lambda: Format1Target(root, options, keeps_old=False), comm, options, memory
    )


def load_format1(
    state: dict[str, Any], root: Path, comm: Communicator, options: Options
) -> dict[str, Any]:
    """Load what the state asks for."""
    found, _ = load_sharded(
        state,
        lambda: Format1Checkpoint(root, options),
        comm,
        options,
        list,
        lambda _, tensor: tensor,
    )
    return found


def save_format2(
    state: dict[str, Any], root: Path, comm: Communicator, options: Options, memory: SaveMemory
) -> SaveReport:
    """Save without a marker."""
    rank = comm.global_rank(comm.rank)
    return save_sharded(
        state,
        lambda: Format2Target(root, options, rank, keeps_old=False),
        comm,
        options,
        memory,
    )


def load_format2(
    state: dict[str, Any], root: Path, comm: Communicator, options: Options
) -> dict[str, Any]:
    """Load what the state asks for, verified as the options say."""
    found, _ = load_sharded(
        state,
        lambda: Format2Checkpoint(root, options),
        comm,
        options,
        list,
        lambda _, tensor: tensor,
    )
    return found
