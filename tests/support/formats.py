"""Save and load in a format, by a communicator of any kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dist_ckpt_strategies.comm.base import Communicator
from dist_ckpt_strategies.config import Options
from dist_ckpt_strategies.core.report import SaveReport
from dist_ckpt_strategies.formats.checkpoints import Format1Checkpoint, Format2Checkpoint
from dist_ckpt_strategies.megatron.allowed import default_allowed
from dist_ckpt_strategies.strategies.format1_target import Format1Target
from dist_ckpt_strategies.strategies.format2_target import Format2Target
from dist_ckpt_strategies.strategies.save_planning import SaveMemory
from dist_ckpt_strategies.strategies.sharded_load import destination, load_sharded
from dist_ckpt_strategies.strategies.sharded_save import SaveSetting, save_sharded


def save_format1(
    state: dict[str, Any], root: Path, comm: Communicator, options: Options, memory: SaveMemory
) -> SaveReport:
    """Save without a marker."""

    def open_target() -> Format1Target:
        return Format1Target(root, options, keeps_old=False, overwrite=False)

    return save_sharded(state, SaveSetting(open_target, comm, options, memory, default_allowed()))


def load_format1(
    state: dict[str, Any], root: Path, comm: Communicator, options: Options
) -> dict[str, Any]:
    """Load what the state asks for."""
    found, _ = load_sharded(
        state,
        root,
        lambda: Format1Checkpoint(root, options),
        comm,
        options,
        list,
        destination,
    )
    return found


def save_format2(
    state: dict[str, Any], root: Path, comm: Communicator, options: Options, memory: SaveMemory
) -> SaveReport:
    """Save without a marker."""

    def open_target() -> Format2Target:
        rank = comm.global_rank(comm.rank)
        return Format2Target(root, options, rank, keeps_old=False, overwrite=False)

    return save_sharded(state, SaveSetting(open_target, comm, options, memory, default_allowed()))


def load_format2(
    state: dict[str, Any], root: Path, comm: Communicator, options: Options
) -> dict[str, Any]:
    """Load what the state asks for, verified as the options say."""
    found, _ = load_sharded(
        state,
        root,
        lambda: Format2Checkpoint(root, options),
        comm,
        options,
        list,
        destination,
    )
    return found
