"""A save by a strategy of another package; what it has in common with those of this one's."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

from xxhash import xxh3_64_hexdigest

from dist_ckpt_strategies.comm.base import (
    Communicator,
    run_and_gather,
    run_collectively,
    run_on_first_rank,
)
from dist_ckpt_strategies.config import Options
from dist_ckpt_strategies.errors import StrategyError
from dist_ckpt_strategies.formats.commit import (
    Staged,
    commit_staged,
    require_own_place,
    require_unfinished,
    staging_of,
)
from dist_ckpt_strategies.formats.locations import CheckpointMarker, located, require_path
from dist_ckpt_strategies.formats.objects import Allowed, dump_loadable, dump_object
from dist_ckpt_strategies.megatron.shards import (
    StateDict,
    require_readable,
    sharded_values,
    split_for_save,
    split_objects,
)
from dist_ckpt_strategies.megatron.types import StrategyAction, handles_objects, require_psutil
from dist_ckpt_strategies.sharded.checks import check_save
from dist_ckpt_strategies.sharded.pack_save import require_alike
from dist_ckpt_strategies.storage.files import (
    COMMON_NAME,
    Directory,
    file_errors,
    make_directories,
)
from dist_ckpt_strategies.storage.io_pool import ENDING, OPENING, Deadline, run_within
from dist_ckpt_strategies.strategies.common import BACKEND as TORCH_BACKEND
from dist_ckpt_strategies.strategies.common import COMMON_STATE, TorchCommonSaveStrategy
from dist_ckpt_strategies.strategies.local_replicated import LocalReplicatedSaveShardedStrategy
from dist_ckpt_strategies.strategies.own_save import OwnSaveShardedStrategy
from dist_ckpt_strategies.strategies.registry import StrategyChoice, resolve
from dist_ckpt_strategies.strategies.safetensors import PackSaveShardedStrategy


@dataclass(frozen=True, slots=True)
class SaveCall:
    """A save: what ``opened_call`` returns, and the arguments of ``save``."""

    comm: Communicator
    options: Options
    sharded: Any
    base: Any
    invalid: Exception | None
    state: StateDict
    checkpoint_dir: str | Path
    common_strategy: StrategyChoice
    validates: bool
    is_async: bool
    preprocess: Callable[[StateDict], StateDict] | None
    content_metadata: dict[str, Any] | None
    async_strategy: str | None
    verify: bool
    overwrite: bool
    allow: Allowed


@dataclass(frozen=True, slots=True)
class CommonState:
    """What every rank holds alike.

    Attributes:
        state: as it was given.
        compared: what ranks compare with each other; None where they do not.
        digest: of that; empty where there is none.
        content: what the first rank writes; None on others, and where a strategy of another
            package writes the state.
    """

    state: StateDict
    compared: StateDict | None
    digest: str
    content: bytes | None


def require_suitable(call: SaveCall) -> None:
    """Raise where the strategy cannot do what is asked for; only ("safetensors", 1) can it all."""
    if call.async_strategy not in {None, "nvrx", "mcore"}:
        found = call.async_strategy
        raise StrategyError(f"async_strategy: expected one of 'nvrx', 'mcore', found {found!r}")
    stored = call.base.backend, call.base.version
    require_psutil(*stored)
    if call.verify and not isinstance(call.base, PackSaveShardedStrategy):
        raise StrategyError(
            "verify_integrity: only format ('safetensors', 1) has digests; save that, or do without"
            f" verify_integrity, in Megatron-LM --verify-integrity, with {stored}"
        )
    if call.is_async and not isinstance(call.base, OwnSaveShardedStrategy):
        raise StrategyError(
            f"{call.sharded}: this package saves its own formats in the background, "
            "('safetensors', 1) and ('zarr', 1); call dist_checkpointing.save for the strategy's "
            "own way"
        )


def common_saver(call: SaveCall) -> Any:
    """The strategy that saves the common state."""
    return resolve(StrategyAction.SAVE_COMMON, call.common_strategy, ("torch", 1))


def marker_of(strategy: Any, common: tuple[str, int]) -> bytes:
    """The content of ``metadata.json``."""
    return CheckpointMarker(strategy.backend, strategy.version, *common).to_json()


def common_state(call: SaveCall, saver: Any, state: StateDict) -> CommonState:
    """The common state, ready to be written. Rank-local.

    Raises:
        UnsafeObjectError: a load would refuse it.
    """
    compared = None
    if call.validates:
        compared = call.preprocess(state) if call.preprocess else state
    is_ours, is_first = isinstance(saver, TorchCommonSaveStrategy), call.comm.rank == 0
    content: bytes | None = None
    if is_first and saver.backend == TORCH_BACKEND:
        allow = saver.allowed if is_ours else call.allow
        content = dump_loadable(state, name=COMMON_STATE, allow=allow)
    elif is_first:
        dump_object(state, name=COMMON_STATE)
    digest = ""  # where two differ, the states may still be equal
    if compared is not None:
        known = content if compared is state else None
        digest = xxh3_64_hexdigest(known or dump_object(compared, name=COMMON_STATE))
    return CommonState(state, compared, digest, content if is_ours else None)


@dataclass(frozen=True, slots=True)
class _Opened:
    """What a rank has made ready before the first collective."""

    root: Path
    saver: Any
    state: StateDict
    common: CommonState


def save_by_other(call: SaveCall) -> None:
    """Save by a strategy of another package, or to the nodes. Collective.

    The strategy takes a staging directory for the checkpoint. Its time is its own; this package
    waits no longer than its limit for its own files.
    """
    comm, strategy = call.comm, call.sharded
    opened: list[_Opened] = []

    def open_save() -> list[str]:
        opened.append(_opened(call))
        return ["another strategy", uuid4().hex]

    answers = run_and_gather(comm, open_save)
    require_alike(comm, answers)
    save_id = answers[0][1]
    root, saver, state, common = opened[0].root, opened[0].saver, opened[0].state, opened[0].common
    if common.compared is not None:
        check_save(comm, state, common.compared)
    staging = staging_of(root, save_id)
    run_collectively(comm, lambda: _made(call, staging.root))
    marker = marker_of(call.base, (saver.backend, saver.version))

    def commit() -> None:
        deadline = Deadline.after(ENDING * call.options.timeout_s)
        staged, overwrite = Staged(root, save_id), call.overwrite
        run_within(
            deadline,
            root,
            lambda: commit_staged(staged, marker, overwrite=overwrite, fence=require_own_place),
        )

    if isinstance(call.base, LocalReplicatedSaveShardedStrategy):
        run_collectively(comm, lambda: _write_common(call, saver, common, staging))
        run_collectively(
            comm, lambda: call.base.save(state, root, common_dir=staging.root, commit=commit)
        )
        return
    if not handles_objects(strategy):
        objects, state = run_collectively(comm, lambda: split_objects(state))
        run_collectively(comm, lambda: _write_objects(strategy, saver, objects, staging.root))
    run_collectively(comm, lambda: strategy.save(state, staging.root))
    run_collectively(comm, lambda: _write_common(call, saver, common, staging))
    run_on_first_rank(comm, commit)


def _opened(call: SaveCall) -> _Opened:
    if call.invalid is not None:
        raise call.invalid
    require_suitable(call)
    root = require_path(located(call.checkpoint_dir, call.options), type(call.sharded).__name__)
    saver = common_saver(call)
    state, common = split_for_save(call.state, call.content_metadata)
    found = common_state(call, saver, common)
    if call.comm.rank == 0 and not call.overwrite:
        deadline = Deadline.after(OPENING * call.options.timeout_s)
        run_within(deadline, root, partial(require_unfinished, root))
    require_readable(sharded_values(state))
    return _Opened(root, saver, state, found)


def _made(call: SaveCall, staging: Path) -> None:
    """Make the staging directory, which on a network file system each node has to see."""

    def make() -> None:
        with file_errors(None, staging):
            make_directories(staging)

    run_within(Deadline.after(OPENING * call.options.timeout_s), staging, make)


def _write_common(call: SaveCall, saver: Any, common: CommonState, staging: Directory) -> None:
    if not isinstance(saver, TorchCommonSaveStrategy):
        saver.save_common(common.state, staging.root)
    elif common.content is not None:
        content = common.content
        deadline = Deadline.after(ENDING * call.options.timeout_s)
        run_within(deadline, staging, lambda: staging.write(COMMON_NAME, content))


def _write_objects(strategy: Any, saver: Any, objects: StateDict, staging: Path) -> None:
    if not handles_objects(saver):
        raise StrategyError(
            f"the state dict has ShardedObjects, which neither {strategy} nor {saver} can handle; "
            "choose a strategy that does"
        )
    saver.save_sharded_objects(objects, staging)
