"""``save`` and ``save_async`` with Megatron-Core's signatures and further promises.

Every rank raises where one fails. A finished checkpoint is not overwritten by accident. The marker
appears whole, after everything else is durable. torch_dist never takes the place of a strategy.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

from xxhash import xxh3_64_hexdigest

from dist_ckpt_strategies.comm.base import (
    Communicator,
    Message,
    run_and_gather,
    run_collectively,
    run_on_first_rank,
)
from dist_ckpt_strategies.config import OnUnchanged, Options
from dist_ckpt_strategies.errors import StrategyError
from dist_ckpt_strategies.formats.commit import commit_staged, require_unfinished, staging_of
from dist_ckpt_strategies.formats.locations import PACKS, CheckpointMarker, located, require_path
from dist_ckpt_strategies.formats.objects import Allowed, allowing, dump_loadable, dump_object
from dist_ckpt_strategies.megatron.shards import (
    StateDict,
    require_readable,
    sharded_values,
    split_for_save,
    split_objects,
)
from dist_ckpt_strategies.megatron.types import (
    StrategyAction,
    handles_objects,
    raises_megatron_errors,
    require_psutil,
)
from dist_ckpt_strategies.sharded.agreement import require_one_strategy
from dist_ckpt_strategies.sharded.async_request import LocalSaveRequest
from dist_ckpt_strategies.sharded.checks import check_save, warn_of_differences
from dist_ckpt_strategies.sharded.save import Contents, start_save
from dist_ckpt_strategies.storage.bucket import Place
from dist_ckpt_strategies.storage.files import COMMON_NAME, Directory, file_errors, make_directories
from dist_ckpt_strategies.storage.host import no_garbage_collection
from dist_ckpt_strategies.storage.io_pool import ENDING, OPENING, Deadline, run_within
from dist_ckpt_strategies.strategies.common import COMMON_STATE, TORCH, TorchCommonSaveStrategy
from dist_ckpt_strategies.strategies.local_replicated import LocalReplicatedSaveShardedStrategy
from dist_ckpt_strategies.strategies.own_save import OwnSaveShardedStrategy
from dist_ckpt_strategies.strategies.registry import StrategyChoice, open_call, resolve

Preprocess = Callable[[StateDict], StateDict]

SaveHandle = LocalSaveRequest
"""A save in the background."""


@dataclass(frozen=True, slots=True)
class _Save:
    """The fields of ``open_call``'s result, and the arguments of ``save``."""

    comm: Communicator
    options: Options
    strategy: Any
    base: Any
    invalid: Exception | None
    state: StateDict
    checkpoint_dir: str | Path
    common_strategy: StrategyChoice
    validates: bool
    is_async: bool
    preprocess: Preprocess | None
    content_metadata: dict[str, Any] | None
    async_strategy: str | None
    verify: bool
    overwrite: bool
    allow: Allowed
    changes: Mapping[str, Any]


@raises_megatron_errors
def save(  # noqa: PLR0913, PLR0917 - Megatron's signature
    sharded_state_dict: StateDict,
    checkpoint_dir: str | Path,
    sharded_strategy: StrategyChoice = None,
    common_strategy: StrategyChoice = None,
    validate_access_integrity: bool = True,  # noqa: FBT001, FBT002
    async_sharded_save: bool = False,  # noqa: FBT001, FBT002
    preprocess_common_before_consistancy_check: Preprocess | None = None,
    content_metadata: dict[str, Any] | None = None,
    async_strategy: str | None = None,
    verify_integrity: bool = False,  # noqa: FBT001, FBT002
    *,
    overwrite: bool = False,
    allow: Allowed = (),
    timeout_s: float | None = None,
    base: str | Path | None = None,
    only: str | Callable[[str], bool] | None = None,
    on_unchanged: str | None = None,
) -> LocalSaveRequest | None:
    """Save a checkpoint, which becomes visible when it is complete and durable.

    Collective over the world. The directory is made where it is missing.

    Args:
        sharded_state_dict: ShardedTensors, ShardedObjects, factories, values equal on all ranks.
        checkpoint_dir: a directory that all ranks see; for ("safetensors", 1) also
            ``s3://bucket/path`` or ``gs://bucket/path``. ``file:///path`` is a directory.
        sharded_strategy: strategy or (backend, version); ("safetensors", 1) by default.
        common_strategy: strategy or (backend, version); ("torch", 1) by default.
        validate_access_integrity: compare the ranks' common states, and where a strategy of
            another package saves, prove that main replicas make up the arrays.
        async_sharded_save: return a request for Megatron-Core's queue; see ``save_async``.
        preprocess_common_before_consistancy_check: applied to what ranks compare of it.
        content_metadata: stored in the common state, for Megatron-Core's ``load_content_metadata``.
        async_strategy: ``"nvrx"`` or ``"mcore"``; any queue of theirs takes the request.
        verify_integrity: have digests of all that is saved. ("safetensors", 1) always has them, no
            other format does.
        overwrite: replace a finished checkpoint, which stays loadable until the new one is durable:
            this needs space for both. A save of ("safetensors", 1) that is killed leaves the one or
            the other, of another format in its last step maybe none. Also remove arrays and
            objects of ("zarr", 1) of no finished checkpoint that this save does not replace.
        allow: further classes that objects and the common state may be of, for ``load`` too.
        timeout_s: longest wait for a peer; by default the strategy's own.
        base: the checkpoint that has the rest of the model, of which ``load`` takes what this one
            lacks; see Options.
        only: which keys are saved, a glob or a function; see Options.
        on_unchanged: ``"warn"``, ``"raise"`` or ``"ignore"``, if ("safetensors", 1) stores weights
            or moments of an optimizer again that the strategy's last save has stored, of another
            step; by default as the strategy's options say, ``"warn"``.

    Raises:
        CheckpointExistsError: the directory holds a finished checkpoint, or other arrays.
        PlanError: the main replicas do not make up the arrays; or ``on_unchanged`` says so.
        UnsafeObjectError: an object needs a class that ``load`` would refuse.
        StorageError: writing failed on this rank.
        PeerError: another rank failed; also of that rank's class. It names rank, key and file.
        StrategyError: there is no such strategy, or it cannot do what is asked for.
    """
    action, detail = StrategyAction.SAVE_SHARDED, f"to {checkpoint_dir}"
    trained = {"base": base and os.fspath(base), "only": only}
    changes = {"timeout_s": timeout_s, "on_unchanged": on_unchanged, **trained}
    opened = open_call(action, sharded_strategy, detail, changes, allow)
    content_args = sharded_state_dict, checkpoint_dir, common_strategy, validate_access_integrity
    common = preprocess_common_before_consistancy_check, content_metadata
    how = async_sharded_save, *common, async_strategy, verify_integrity, overwrite, allow
    call = _Save(*(*opened, *content_args), *how, changes)
    with allowing(() if call.invalid else allow), no_garbage_collection():
        if isinstance(call.base, OwnSaveShardedStrategy):
            return _save_own(call)
        _save_by_other(call)
    return None


def save_async(  # noqa: PLR0913 - those of save
    sharded_state_dict: StateDict,
    checkpoint_dir: str | Path,
    sharded_strategy: StrategyChoice = None,
    common_strategy: StrategyChoice = None,
    *,
    validate_access_integrity: bool = True,
    preprocess_common_before_consistancy_check: Preprocess | None = None,
    content_metadata: dict[str, Any] | None = None,
    async_strategy: str | None = None,
    verify_integrity: bool = False,
    overwrite: bool = False,
    allow: Allowed = (),
    timeout_s: float | None = None,
    base: str | Path | None = None,
    only: str | Callable[[str], bool] | None = None,
    on_unchanged: str | None = None,
) -> SaveHandle:
    """Save a checkpoint in the background; blocks for the copy to host memory only.

    Collective over the world. Tensors on the CPU are copied too: all may be overwritten as soon as
    it returns. The common state is taken as it is now. A save that still runs is waited for first.

    Arguments are those of ``save``; the strategy has to be one of this package's formats.

    Returns:
        A handle. The checkpoint becomes visible when every rank has called its ``wait``, or when
        the queue that was given the handle has finalised it.

    Raises:
        StrategyError: the strategy saves synchronously only.
        CheckpointError: as in ``save``, of what is known before anything is written.
    """
    request = save(
        sharded_state_dict,
        checkpoint_dir,
        sharded_strategy,
        common_strategy,
        validate_access_integrity,
        True,  # noqa: FBT003 - Megatron's signature
        preprocess_common_before_consistancy_check,
        content_metadata,
        async_strategy,
        verify_integrity,
        overwrite=overwrite,
        allow=allow,
        timeout_s=timeout_s,
        base=base,
        only=only,
        on_unchanged=on_unchanged,
    )
    assert request is not None  # noqa: S101 - an asynchronous save returns one
    return request


def _save_own(call: _Save) -> LocalSaveRequest | None:
    """Save by a strategy of this package; begin to, and return the request. Collective."""
    comm, strategy = call.comm, call.base.with_options(**call.changes)
    split: list[tuple[StateDict, StateDict]] = []
    compared: list[StateDict | None] = []

    if call.strategy is not call.base:  # a wrapper, which chooses the main replicas
        divide = partial(split_for_save, call.state, call.content_metadata)
        split.append(run_collectively(comm, divide))
        run_collectively(comm, lambda: call.strategy.apply_saving_parallelization(split[0][0]))

    def prepare() -> tuple[Place, Contents, Message]:
        if call.is_async:
            strategy.kept.get_ready(strategy.options)
        saver = _suitable_saver(call)
        store = strategy.place(call.checkpoint_dir)
        state, common = split[0] if split else split_for_save(call.state, call.content_metadata)
        seen, content = _common_to_save(call, saver, common)
        compared.append(seen)
        digest = ""
        if seen is not None:
            pickled = content if seen is common else None
            digest = xxh3_64_hexdigest(pickled or dump_object(seen, name=COMMON_STATE))
        contents = strategy.contents(state, content, call.allow, copies_common=True)
        return store, contents, digest

    kept, options = strategy.kept, strategy.options
    started = start_save(comm, strategy.save_format, prepare, kept.cache, options)  # 1
    if len(set(started.notes)) > 1:
        warn_of_differences(comm, compared[0], started.notes)
    marker = CheckpointMarker(call.base.backend, call.base.version).to_json()
    ways = {"is_async": call.is_async, "overwrite": call.overwrite}
    return cast("LocalSaveRequest | None", strategy.finish(started, marker, **ways))  # 2, 3


def _suitable_saver(call: _Save) -> Any:
    """The strategy for the common state.

    Raises where the strategies cannot do what is asked for; only ("safetensors", 1) can it all.
    """
    if call.async_strategy not in {None, "nvrx", "mcore"}:
        given = call.async_strategy
        raise StrategyError(f"async_strategy: expected one of 'nvrx', 'mcore', found {given!r}")
    stored = call.base.backend, call.base.version
    is_own = isinstance(call.base, OwnSaveShardedStrategy)
    require_psutil(*stored)
    if call.verify and not (is_own and stored == PACKS.sharded_format):
        raise StrategyError(
            "verify_integrity: only format ('safetensors', 1) has digests; save that, or do without"
            f" verify_integrity, in Megatron-LM --verify-integrity, with {stored}"
        )
    if (call.changes["base"] or call.changes["only"]) and not is_own:
        raise StrategyError(
            f"base, only: format ('safetensors', 1) alone holds a part of a model, found {stored}"
        )
    if call.changes["on_unchanged"] == OnUnchanged.RAISE and stored != PACKS.sharded_format:
        raise StrategyError(
            f"on_unchanged: only saves of ('safetensors', 1) are compared, found {stored}"
        )
    if call.is_async and not is_own:
        raise StrategyError(
            f"{call.strategy}: this package saves its own formats in the background, "
            "('safetensors', 1) and ('zarr', 1); call dist_checkpointing.save for the strategy's "
            "own way"
        )
    saver = resolve(StrategyAction.SAVE_COMMON, call.common_strategy, TORCH)
    if is_own and not isinstance(saver, TorchCommonSaveStrategy):
        raise StrategyError(
            f"common_strategy: format {stored} holds the common state itself, found {saver}; "
            "leave it out"
        )
    return saver


def _common_to_save(
    call: _Save, saver: Any, common: StateDict
) -> tuple[StateDict | None, bytes | None]:
    """The common state that ranks compare; and it, pickled, on the first rank. Rank-local.

    Raises:
        UnsafeObjectError: a load would refuse it.
        CheckpointExistsError: the save must not overwrite what is there.
    """
    seen, content = None, None
    if call.validates:
        seen = call.preprocess(common) if call.preprocess else common
    if call.comm.rank == 0:
        if saver.backend == TORCH[0]:
            allow = getattr(saver, "allowed", call.allow)
            content = dump_loadable(common, name=COMMON_STATE, allow=allow)
        if not call.overwrite:
            root = located(call.checkpoint_dir, call.options)
            deadline = Deadline.after(OPENING * call.options.timeout_s)
            run_within(deadline, root, lambda: require_unfinished(root))
    return seen, content


def _save_by_other(call: _Save) -> None:
    """Save by a strategy of another package, or to the nodes. Collective.

    The strategy takes a staging directory for the checkpoint. Its time is its own; this package
    waits no longer than its limit for its own files.
    """
    comm, timeout_s, base = call.comm, call.options.timeout_s, call.base
    opened: list[tuple[Path, Any, StateDict, StateDict, StateDict | None, bytes | None]] = []

    def open_save() -> list[str]:
        opened.append(_opened(call))
        return ["another strategy", uuid4().hex]

    answers = run_and_gather(comm, open_save)
    require_one_strategy(comm, "a save", answers)
    root, saver, state, common, compared, content = opened[0]
    staging = staging_of(root, answers[0][1])
    if compared is not None:
        check_save(comm, state, compared)

    def make_staging() -> None:
        with file_errors(None, staging.root):
            make_directories(staging.root)

    def save_common() -> None:
        _save_common(saver, common, content, staging, Deadline.after(ENDING * timeout_s))

    def commit() -> None:
        marker = CheckpointMarker(base.backend, base.version, saver.backend, saver.version)
        move = partial(commit_staged, staging.root, marker.to_json(), overwrite=call.overwrite)
        run_within(Deadline.after(ENDING * timeout_s), root, move)

    # Each node of a network file system has to see it.
    opening = Deadline.after(OPENING * timeout_s)
    run_collectively(comm, partial(run_within, opening, staging, make_staging))
    if isinstance(base, LocalReplicatedSaveShardedStrategy):
        run_collectively(comm, save_common)
        to_nodes = partial(base.save, state, root, common_dir=staging.root, commit=commit)
        run_collectively(comm, to_nodes)
        return
    _save_sharded(call, saver, state, staging.root)
    run_collectively(comm, save_common)
    run_on_first_rank(comm, commit)


def _opened(
    call: _Save,
) -> tuple[Path, Any, StateDict, StateDict, StateDict | None, bytes | None]:
    """Get a rank ready for the first collective of a save by another strategy.

    Directory, strategy for the common state, sharded state, common state, and what
    ``_common_to_save`` returns.
    """
    if call.invalid is not None:
        raise call.invalid
    saver, name = _suitable_saver(call), type(call.strategy).__name__
    root = require_path(located(call.checkpoint_dir, call.options), name)
    state, common = split_for_save(call.state, call.content_metadata)
    ready = root, saver, state, common, *_common_to_save(call, saver, common)
    require_readable(sharded_values(state))
    return ready


def _save_common(
    saver: Any, common: StateDict, content: bytes | None, staging: Directory, deadline: Deadline
) -> None:
    if not isinstance(saver, TorchCommonSaveStrategy):
        saver.save_common(common, staging.root)
    elif content is not None:
        run_within(deadline, staging, partial(staging.write, COMMON_NAME, content))


def _save_sharded(call: _Save, saver: Any, state: StateDict, staging: Path) -> None:
    """Save what is sharded: objects apart, where the strategy does not take them. Collective."""
    comm, strategy = call.comm, call.strategy

    def save_objects(objects: StateDict) -> None:
        if not handles_objects(saver):
            raise StrategyError(
                f"the state dict has ShardedObjects, which neither {strategy} nor {saver} can "
                "handle; choose a strategy that does"
            )
        saver.save_sharded_objects(objects, staging)

    if not handles_objects(strategy):
        objects, state = run_collectively(comm, partial(split_objects, state))
        run_collectively(comm, lambda: save_objects(objects))
    run_collectively(comm, lambda: strategy.save(state, staging))
