"""Save and load in a format, by a communicator of any kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dist_ckpt_strategies.comm.base import Communicator
from dist_ckpt_strategies.config import Options
from dist_ckpt_strategies.core.report import SaveReport
from dist_ckpt_strategies.formats.checkpoint_writer import CheckpointWriter
from dist_ckpt_strategies.formats.checkpoints import Format2Checkpoint
from dist_ckpt_strategies.megatron.types import default_allowed
from dist_ckpt_strategies.sharded.async_save import SaveCache
from dist_ckpt_strategies.sharded.load import ShardedLoad, load_sharded
from dist_ckpt_strategies.sharded.save import ShardedSave, begun_save
from dist_ckpt_strategies.storage.io_pool import time_limit


def _save(
    version: int,
    state: dict[str, Any],
    root: Path,
    comm: Communicator,
    options: Options,
    cache: SaveCache,
) -> SaveReport:
    def open_save() -> ShardedSave:
        writer = CheckpointWriter(
            version,
            root,
            options,
            global_rank=comm.global_rank(comm.rank),
            keeps_old=False,
            overwrite=False,
        )
        return ShardedSave(comm, state, writer, cache, default_allowed())

    with time_limit(options.timeout_s):
        begun = begun_save(comm, open_save)
        assert begun is not None
        return begun.run()


def save_format1(
    state: dict[str, Any], root: Path, comm: Communicator, options: Options, cache: SaveCache
) -> SaveReport:
    """Save without a marker."""
    return _save(1, state, root, comm, options, cache)


def save_format2(
    state: dict[str, Any], root: Path, comm: Communicator, options: Options, cache: SaveCache
) -> SaveReport:
    """Save without a marker."""
    return _save(2, state, root, comm, options, cache)


def load_format2(
    state: dict[str, Any], root: Path, comm: Communicator, options: Options
) -> dict[str, Any]:
    """Load what the state asks for, verified as the options say."""

    def open_load() -> ShardedLoad:
        checkpoint = Format2Checkpoint(root, options)
        return ShardedLoad(comm, state, checkpoint, name=root, options=options, allowed=list)

    with time_limit(options.timeout_s):
        return load_sharded(comm, open_load)
