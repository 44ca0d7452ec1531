"""Save and load in a format, by a communicator of any kind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from dist_ckpt_strategies.comm.base import Communicator
from dist_ckpt_strategies.config import Options
from dist_ckpt_strategies.core.report import SaveReport
from dist_ckpt_strategies.formats.checkpoint_writer import CheckpointWriter
from dist_ckpt_strategies.formats.checkpoints import Format1Checkpoint, Format2Checkpoint
from dist_ckpt_strategies.megatron.types import default_allowed
from dist_ckpt_strategies.sharded.load import LoadInputs, destination, load_sharded
from dist_ckpt_strategies.sharded.save import SaveInputs, begun_save
from dist_ckpt_strategies.sharded.save_cache import SaveCache
from dist_ckpt_strategies.storage.time_limit import time_limit


def _saved(
    comm: Communicator, options: Options, open_inputs: Callable[[], SaveInputs]
) -> SaveReport:
    with time_limit(options.timeout_s):
        begun = begun_save(comm, open_inputs)
        assert begun is not None
        return begun.run()


def _writer(version: int, root: Path, comm: Communicator, options: Options) -> CheckpointWriter:
    rank = comm.global_rank(comm.rank)
    return CheckpointWriter(
        version, root, options, global_rank=rank, keeps_old=False, overwrite=False
    )


def save_format1(
    state: dict[str, Any], root: Path, comm: Communicator, options: Options, cache: SaveCache
) -> SaveReport:
    """Save without a marker."""

    def open_inputs() -> SaveInputs:
        writer = _writer(1, root, comm, options)
        return SaveInputs(state, writer, options, cache, default_allowed())

    return _saved(comm, options, open_inputs)


def load_format1(
    state: dict[str, Any], root: Path, comm: Communicator, options: Options
) -> dict[str, Any]:
    """Load what the state asks for."""

    def open_inputs() -> LoadInputs:
        checkpoint = Format1Checkpoint(root, options)
        return LoadInputs(state, checkpoint, root, options, list, destination)

    with time_limit(options.timeout_s):
        return load_sharded(comm, open_inputs)


def save_format2(
    state: dict[str, Any], root: Path, comm: Communicator, options: Options, cache: SaveCache
) -> SaveReport:
    """Save without a marker."""

    def open_inputs() -> SaveInputs:
        writer = _writer(2, root, comm, options)
        return SaveInputs(state, writer, options, cache, default_allowed())

    return _saved(comm, options, open_inputs)


def load_format2(
    state: dict[str, Any], root: Path, comm: Communicator, options: Options
) -> dict[str, Any]:
    """Load what the state asks for, verified as the options say."""

    def open_inputs() -> LoadInputs:
        checkpoint = Format2Checkpoint(root, options)
        return LoadInputs(state, checkpoint, root, options, list, destination)

    with time_limit(options.timeout_s):
        return load_sharded(comm, open_inputs)
