"""``load`` with Megatron-Core's signature; every rank raises where one fails."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from dist_ckpt_strategies.comm.base import Communicator, Message, run_and_gather, run_collectively
from dist_ckpt_strategies.comm.process_group import ProcessGroup, group_ranks
from dist_ckpt_strategies.config import Options, Verify
from dist_ckpt_strategies.core.array import COMMON_OBJECT
from dist_ckpt_strategies.errors import (
    CheckpointChangedError,
    CheckpointError,
    CheckpointNotFoundError,
    IncompleteCheckpointError,
    PeerLostError,
    PeerTimeoutError,
    StrategyError,
)
from dist_ckpt_strategies.formats.checkpoints import common_digest
from dist_ckpt_strategies.formats.locations import (
    PACKS,
    CheckpointMarker,
    Location,
    located,
    read_marker,
    require_path,
)
from dist_ckpt_strategies.formats.objects import Allowed, allowing
from dist_ckpt_strategies.formats.pack_checkpoint import OpenedSave, PackCheckpoint
from dist_ckpt_strategies.megatron.shards import (
    StateDict,
    merged,
    parsed_strict,
    sharded_values,
    split_for_load,
    split_objects,
)
from dist_ckpt_strategies.megatron.types import (
    ShardedTensor,
    StrategyAction,
    StrictHandling,
    handles_objects,
    raises_megatron_errors,
    require_reads,
)
from dist_ckpt_strategies.sharded.agreement import (
    has_changed,
    require_one_strategy,
    require_same_checkpoint,
)
from dist_ckpt_strategies.sharded.checks import check_load
from dist_ckpt_strategies.sharded.load import (
    LoadPlan,
    conversions,
    load_sharded,
    plan_load,
    require_fillable,
)
from dist_ckpt_strategies.storage.files import MARKER_NAME
from dist_ckpt_strategies.storage.host import no_garbage_collection
from dist_ckpt_strategies.storage.io_pool import ENDING, OPENING, Deadline, run_within
from dist_ckpt_strategies.strategies.common import TorchCommonLoadStrategy, common_content
from dist_ckpt_strategies.strategies.local_replicated import (
    LocalReplicatedLoadShardedStrategy,
    restore_common,
)
from dist_ckpt_strategies.strategies.own_load import OwnLoadShardedStrategy
from dist_ckpt_strategies.strategies.registry import (
    StrategyChoice,
    inner_strategy,
    open_call,
    resolve,
)
from dist_ckpt_strategies.strategies.two_stage import TwoStageDataParallelLoadShardedStrategy

Loaded = StateDict | tuple[StateDict, set[str], set[str]]
"""The result of ``load``."""

_ATTEMPTS = 3

_LOCAL, _OTHER = "local_replicated", "calls of its own"
"""How a rank loads that has no plan: what its answer begins with. What tells the checkpoint from
others follows: the digest of the common state, or nothing, if a strategy of this package compares.
"""

_OWN: tuple[Any, ...] = (OwnLoadShardedStrategy.load, TwoStageDataParallelLoadShardedStrategy.load)
"""Their ``load`` takes what the common state was read of."""


@dataclass(frozen=True, slots=True)
class _Call:
    """The fields of ``open_call``'s result, and the arguments of ``load``.

    ``strategy`` counts only where the caller ``has_chosen`` it; else the checkpoint names one.
    """

    comm: Communicator
    options: Options
    strategy: Any
    base: Any
    invalid: Exception | None
    state: StateDict
    checkpoint_dir: str | Path
    has_chosen: bool
    common_strategy: StrategyChoice
    validates: bool
    strict: str | StrictHandling
    verify: str | None
    strict_dtype: bool
    timeout_s: float | None
    process_group: ProcessGroup | None
    moved_base: str | Path | None


class _Load(NamedTuple):
    """The load that one rank is about to make, and its strategies.

    ``finish`` makes the result of what is loaded. There is a plan where a strategy of this package
    loads with the ranks and the limit of this call.
    """

    root: Location
    save: OpenedSave
    sharded: Any
    common: Any
    wanted: StateDict
    strict: StrictHandling
    finish: Callable[..., StateDict]
    plan: LoadPlan | None


@raises_megatron_errors
def load(  # noqa: PLR0913, PLR0917 - Megatron's signature
    sharded_state_dict: StateDict,
    checkpoint_dir: str | Path,
    sharded_strategy: StrategyChoice = None,
    common_strategy: StrategyChoice = None,
    validate_access_integrity: bool = True,  # noqa: FBT001, FBT002
    strict: str | StrictHandling = StrictHandling.ASSUME_OK_UNEXPECTED,
    verify_integrity: bool = False,  # noqa: FBT001, FBT002
    process_group: ProcessGroup | None = None,
    *,
    allow: Allowed = (),
    timeout_s: float | None = None,
    verify: str | None = None,
    strict_dtype: bool = False,
    base: str | Path | None = None,
) -> Loaded:
    """Load a checkpoint into the layout that a sharded state dict describes.

    Collective over the world. After an error the tensors are undefined until they are loaded again.
    After a StorageTimeoutError they may also still change, by a read that was given up.

    Args:
        sharded_state_dict: what to load; the data of ShardedTensors is filled in place.
        checkpoint_dir: directory of a finished checkpoint, or its URL.
        sharded_strategy: strategy or (backend, version); by default what the checkpoint names.
        common_strategy: the same for the common state.
        validate_access_integrity: also check that main replicas make up the arrays on grids.
        strict: what to do about keys that only one side has, as in Megatron-Core.
        verify_integrity: the same as ``verify="read"``, whatever the environment says.
        process_group: the ranks that load together; with a strategy of your own, its ``group``.
        allow: further classes that objects of this checkpoint may be unpickled to.
        timeout_s: longest wait for a peer; by default the strategy's own.
        verify: what is compared with the digests of packs: ``"read"``, what is read, or ``"off"``;
            by default what the strategy or the environment says, ``"read"``.
        strict_dtype: raise where an array is stored in another dtype than the one requested, before
            any tensor is filled. By default such arrays are converted as ``Tensor.copy_`` does,
            with one warning.
        base: where the checkpoint is now that this one was saved with as its base.

    Returns:
        The state dict, and for the RETURN_* values of ``strict`` missing and unexpected keys.

    Raises:
        CheckpointNotFoundError, IncompleteCheckpointError: there is no finished checkpoint.
        PlanError: an array is stored with another shape; or in another dtype, and ``strict_dtype``
            is set.
        StorageError: something is missing or damaged.
        StorageTimeoutError: storage did not answer on some rank.
        UnsafeObjectError: an object needs a class that is not allowed; the message says which.
        StrategyError: there is no such strategy, or one that ``verify`` means nothing to, or that
            loads with other ranks than ``process_group``.
        PeerError: another rank failed; it is of the class of that rank's error too.
    """
    action, detail = StrategyAction.LOAD_SHARDED, f"from {checkpoint_dir}"
    changes = {"timeout_s": timeout_s}
    opened = open_call(action, sharded_strategy, detail, changes, allow, process_group)
    content_args = sharded_state_dict, checkpoint_dir, bool(sharded_strategy), common_strategy
    digests = Verify.READ if verify_integrity else verify
    how = validate_access_integrity, strict, digests, strict_dtype, timeout_s, process_group, base
    call = _Call(*(*opened, *content_args), *how)
    with allowing(() if call.invalid else allow), no_garbage_collection():
        return _load(call)


def _load(call: _Call) -> Loaded:
    """Load; begin anew if another save replaces the checkpoint meanwhile. Collective."""
    for _ in range(_ATTEMPTS):
        saves: list[OpenedSave] = []
        try:
            return _load_once(call, saves)
        except (PeerTimeoutError, PeerLostError):
            raise  # ranks are out of step: there is no collective any more
        except CheckpointError as error:
            failure = error
        before = next((save.identity for save in reversed(saves) if save.has_packs), None)
        if not has_changed(call.comm, call.checkpoint_dir, call.options, before, failure):
            raise failure
    raise CheckpointChangedError(
        f"{call.checkpoint_dir}: other saves replaced this checkpoint while it was read, "
        f"{_ATTEMPTS} times; load it again when they have ended",
        path=str(call.checkpoint_dir),
    ) from failure


def _load_once(call: _Call, saves: list[OpenedSave]) -> Loaded:
    """Load once; the saves that this rank opens are added to ``saves``. Collective."""
    comm = call.comm
    loads: list[_Load] = []

    def describe(*, is_last: bool) -> Message:
        try:
            loads.append(_begun(call, saves))
        except (CheckpointNotFoundError, IncompleteCheckpointError):
            if is_last:
                raise
            return None  # a second look may find it: another node has it
        if (plan := loads[-1].plan) is None:
            return _described(call, loads[-1])
        return plan.message(loads[-1].sharded.validated if call.validates else None)

    answers = run_and_gather(comm, lambda: describe(is_last=False))  # 1
    local = {identity for kind, identity, *_ in filter(None, answers) if kind == _LOCAL}
    if None in answers or len(local) > 1:
        if local:
            _restore_everywhere(call)
        answers = run_and_gather(comm, lambda: describe(is_last=True))
    begun = loads[-1]
    require_one_strategy(comm, "a load", answers)
    if begun.plan is None:
        return _load_otherwise(call, begun, answers)
    sharded = begun.sharded
    return load_sharded(  # 2
        comm,
        begun.plan,
        answers,
        call.checkpoint_dir,
        sharded.options,
        sharded.allowed,
        validated=sharded.validated if call.validates else None,
        finish=begun.finish,
    )


def _begun(call: _Call, saves: list[OpenedSave]) -> _Load:
    """Open the checkpoint, and choose the strategies. Rank-local; errors as of ``load``.

    A strategy with other ranks or another limit than this call is called as it is.
    """
    if call.invalid is not None:
        raise call.invalid
    wanted, nonpersistent, factories = split_for_load(call.state)
    root, options = located(call.checkpoint_dir, call.options), call.options
    deadline = Deadline.after(limit_s := OPENING * options.timeout_s)  # factories have no limit
    save, marker = run_within(deadline, root, partial(_opened, root))
    saves.append(save)
    sharded, loader = _strategies(call, root, marker)
    strict = parsed_strict(call.strict)
    is_direct = (
        isinstance(sharded, OwnLoadShardedStrategy)
        and type(sharded).load is OwnLoadShardedStrategy.load
        and sharded.group == getattr(call.base, "group", None)
        and sharded.options.timeout_s == options.timeout_s
        and not StrictHandling.requires_explicit_ckpt_mismatch_check(strict)
        and not StrictHandling.requires_global_app_metadata(strict)
    )
    is_own = type(loader) is TorchCommonLoadStrategy

    def read() -> tuple[Any, bytes]:
        checkpoint = packs = None
        if is_direct:
            checkpoint = sharded.open_checkpoint(root, sharded.options, save)
        if save.has_packs and is_own:
            packs = checkpoint or PackCheckpoint(root, options, save)
        content = common_content(root, loader.options, loader.allowed, packs) if is_own else b""
        return checkpoint, content

    checkpoint, content = run_within(deadline, root, read)
    if is_own:
        common = loader.common_state(root, content)
    else:  # its time is its own
        common = loader.load_common(root)
        deadline = Deadline.after(limit_s)
    plan = None
    if is_direct:
        plan = plan_load(wanted, checkpoint, sharded.options, sharded.destination_of, deadline)
    finish = partial(merged, merged(common, nonpersistent), factories=factories)
    return _Load(root, save, sharded, loader, wanted, strict, finish, plan)


def _opened(root: Location) -> tuple[OpenedSave, CheckpointMarker]:
    """The save at a place, and what it is of."""
    save = OpenedSave(root)
    return save, PACKS if save.has_packs else read_marker(root)


def _strategies(call: _Call, root: Location, marker: CheckpointMarker) -> tuple[Any, Any]:
    """The strategies for what is sharded, with the caller's options, and for the common state.

    The caller's have to read what is stored; errors about that name ``metadata.json``.
    """
    stored, action = marker.sharded_format, StrategyAction.LOAD_SHARDED
    common_format, common_action = marker.common_format, StrategyAction.LOAD_COMMON
    chosen = call.strategy if call.has_chosen else None
    common = call.common_strategy and resolve(common_action, call.common_strategy, common_format)
    try:
        if chosen is None:
            chosen = resolve(action, None, stored, call.timeout_s, call.process_group)
        else:
            require_reads(inner_strategy(chosen), *stored)
        if not common:
            common = resolve(common_action, None, common_format)
        else:
            require_reads(inner_strategy(common), *common_format)
    except StrategyError as error:
        path = f"{root}/{MARKER_NAME}"
        raise type(error)(f"{path}: {error.message}", path=path) from error
    if call.process_group is not None:
        ranks = group_ranks(getattr(inner_strategy(chosen), "group", None))
        if ranks != tuple(sorted(call.comm.global_ranks)):
            raise StrategyError(
                f"process_group: its {call.comm.size} ranks are not the {len(ranks)} that the "
                "strategy loads with; pass a strategy made with group=process_group"
            )
    has_digests = stored == PACKS.sharded_format and isinstance(chosen, OwnLoadShardedStrategy)
    if call.verify is not None and not has_digests:
        raise StrategyError(
            f"verify={call.verify!r}: digests are kept by format "
            f"{PACKS.sharded_format}, which {type(chosen).__name__} does not read itself, "
            f"found {stored}; set verify on the strategy that does, or in its options"
        )
    base = None if call.moved_base is None else os.fspath(call.moved_base)
    changes = {"verify": call.verify, "strict_dtype": call.strict_dtype or None, "base": base}
    if any(changes.values()) and hasattr(chosen, "with_options"):
        chosen = chosen.with_options(**changes)
    return chosen, common


def _described(call: _Call, begun: _Load) -> Message:
    """The message to the other ranks if this one has no plan. Rank-local.

    Raises:
        PlanError: the data of a ShardedTensor cannot be filled; or another dtype is stored,
            ``strict_dtype`` is set, and the strategy has no such option.
    """
    values = list(sharded_values(begun.wanted))
    require_fillable(values)
    base, root = inner_strategy(begun.sharded), begun.root
    if call.strict_dtype and not hasattr(begun.sharded, "with_options"):
        arrays = begun.sharded.load_tensors_metadata(root).values()
        stored = {array.key: str(array.dtype).removeprefix("torch.") for array in arrays}
        tensors = [value for value in values if isinstance(value, ShardedTensor)]
        conversions(tensors, stored, is_strict=True)
    if isinstance(base, OwnLoadShardedStrategy):
        return [_OTHER, ""]
    path = require_path(root, type(base).__name__)
    deadline = Deadline.after(OPENING * call.options.timeout_s)
    digest = run_within(deadline, path, lambda: common_digest(path))
    is_local = isinstance(begun.sharded, LocalReplicatedLoadShardedStrategy)
    return [_LOCAL if is_local else _OTHER, digest]


def _restore_everywhere(call: _Call) -> None:
    """Have every node hold the common state of local checkpoints. Collective."""
    comm, place = call.comm, call.checkpoint_dir
    root = run_collectively(comm, lambda: require_path(located(place, None), "local_replicated"))
    restore_common(comm, root, str(place), call.options.timeout_s)


def _load_otherwise(call: _Call, begun: _Load, answers: Sequence[Message]) -> Loaded:
    """Load where no rank has a plan; what ``load`` returns. Collective.

    Raises:
        CheckpointChangedError: the common state that they have read differs, or another save has
            replaced the checkpoint.
    """
    comm = call.comm
    require_same_checkpoint(comm, call.checkpoint_dir, [identity for _, identity in answers])
    strict, stored_keys = begun.strict, partial(_stored_keys, begun)
    wanted, *differing = check_load(comm, begun.wanted, strict, stored_keys, call.validates)

    limit_s = ENDING * call.options.timeout_s
    read = lambda: begun.finish(*_called(comm, begun, wanted))  # noqa: E731
    result = run_collectively(comm, lambda: begun.save.read(read, limit_s))
    if StrictHandling.requires_returning_mismatch_keys(strict):
        missing, unexpected = differing
        return result, missing, unexpected
    return result


def _stored_keys(begun: _Load) -> StateDict:
    """The stored keys, but for the object that is the common state, which no caller requests."""
    keys: StateDict = begun.sharded.load_sharded_metadata(begun.root)
    if not handles_objects(begun.sharded):
        keys = merged(keys, begun.common.load_sharded_metadata(begun.root))
    if all(value.key != COMMON_OBJECT.key for value in sharded_values(begun.wanted)):
        keys.pop(COMMON_OBJECT.unique_key, None)
    return keys


def _called(comm: Communicator, begun: _Load, state: StateDict) -> tuple[StateDict, ...]:
    """Load by the strategies: objects apart if the sharded one does not take them.

    Collective. The caller runs it within an error check.
    """
    sharded, root = begun.sharded, begun.root
    if type(sharded).load in _OWN:
        return (sharded.load(state, root, save=begun.save),)
    if handles_objects(sharded):
        return (sharded.load(state, root),)
    objects, tensors = run_collectively(comm, lambda: split_objects(state))
    loaded = run_collectively(comm, lambda: begun.common.load_sharded_objects(objects, root))
    return loaded, sharded.load(tensors, root)
