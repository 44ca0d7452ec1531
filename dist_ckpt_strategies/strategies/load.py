"""``load`` with Megatron-Core's signature; every rank raises where one fails."""

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from dist_ckpt_strategies.comm.base import Communicator, Message, run_and_gather
from dist_ckpt_strategies.comm.process_group import ProcessGroup, group_ranks
from dist_ckpt_strategies.config import Options, Verify
from dist_ckpt_strategies.errors import (
    CheckpointChangedError,
    CheckpointError,
    CheckpointNotFoundError,
    IncompleteCheckpointError,
    PeerLostError,
    PeerTimeoutError,
    StrategyError,
)
from dist_ckpt_strategies.formats.locations import (
    CheckpointMarker,
    Location,
    OpenedSave,
    located,
    read_marker,
)
from dist_ckpt_strategies.formats.objects import Allowed, allowing
from dist_ckpt_strategies.megatron.shards import (
    StateDict,
    merged,
    parsed_strict,
    split_for_load,
)
from dist_ckpt_strategies.megatron.types import (
    StrategyAction,
    StrictHandling,
    raises_megatron_errors,
    require_reads,
)
from dist_ckpt_strategies.sharded.load import finish_load
from dist_ckpt_strategies.storage.files import MARKER_NAME
from dist_ckpt_strategies.storage.io_pool import OPENING, Deadline, run_within
from dist_ckpt_strategies.strategies.call import inner_strategy, opened_call
from dist_ckpt_strategies.strategies.common import (
    TorchCommonLoadStrategy,
    common_content,
    open_packs,
)
from dist_ckpt_strategies.strategies.load_otherwise import (
    Load,
    Request,
    described,
    load_otherwise,
    needs_common,
    restore_everywhere,
    with_options,
)
from dist_ckpt_strategies.strategies.registry import StrategyChoice, resolve
from dist_ckpt_strategies.strategies.zarr import ZarrLoadShardedStrategy


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
) -> StateDict | tuple[StateDict, set[str], set[str]]:
    """Load a checkpoint into the layout that a sharded state dict describes.

    Collective over the world. After an error the tensors are undefined until they are loaded again.
    After a StorageTimeoutError they may also still change, by a read that was given up.

    Args:
        sharded_state_dict: what to load; the data of ShardedTensors is filled in place.
        checkpoint_dir: directory of a finished checkpoint, or its URL.
        sharded_strategy: strategy or (backend, version); by default what the checkpoint names.
        common_strategy: the same for the common state.
        validate_access_integrity: also run Megatron-Core's own checks of the sharding.
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

    Returns:
        The state dict, and for the RETURN_* values of ``strict`` missing and unexpected keys.

    Raises:
        CheckpointNotFoundError, IncompleteCheckpointError: there is no finished checkpoint.
        ShapeMismatchError: an array is stored with another shape.
        DTypeMismatchError: an array is stored in another dtype, and ``strict_dtype`` is set.
        StorageError: something is missing or damaged.
        StorageTimeoutError: storage did not answer on some rank.
        UnsafeObjectError: an object needs a class that is not allowed; the message says which.
        StrategyError: there is no such strategy, or one that ``verify`` means nothing to, or that
            loads with other ranks than ``process_group``.
        PeerError: another rank failed; it is of the class of that rank's error too.
    """
    action, detail = StrategyAction.LOAD_SHARDED, f"from {checkpoint_dir}"
    opened = opened_call(action, sharded_strategy, detail, timeout_s, allow, process_group)
    comm, options, chosen, base, invalid = opened
    request = Request(
        sharded_state_dict,
        checkpoint_dir,
        options,
        sharded_strategy and chosen,
        common_strategy,
        getattr(base, "group", None),
        validate_access_integrity,
        strict,
        Verify.READ if verify_integrity else verify,
        strict_dtype,
        timeout_s,
        process_group,
        invalid,
    )
    for _ in range(_ATTEMPTS):
        saves: list[OpenedSave] = []
        try:
            with allowing(() if invalid else allow):
                return _load(comm, request, saves)
        except (PeerTimeoutError, PeerLostError):
            raise  # ranks are out of step: there is no collective any more
        except CheckpointError as error:
            failure = error
        if not _has_changed(comm, request, saves, failure):
            raise failure
    raise CheckpointChangedError(
        f"{checkpoint_dir}: other saves replaced this checkpoint while it was read, {_ATTEMPTS} "
        "times; load it again when they have ended",
        path=str(checkpoint_dir),
    ) from failure


_ATTEMPTS = 3
_PAUSE_S = 0.5
_VIEW_S = 90.0
"""How long an NFS client may keep an old view of a directory, and some more."""


def _load(
    comm: Communicator, request: Request, saves: list[OpenedSave]
) -> StateDict | tuple[StateDict, set[str], set[str]]:
    """What ``load`` returns; what this rank opens is added to ``saves``. Collective."""
    loads: list[Load] = []
    split: list[tuple[StateDict, ...]] = []

    def describe(*, is_last: bool) -> Message:
        if request.invalid is not None:
            raise request.invalid
        if not split:  # factories take their own time
            split.append(split_for_load(request.state))
        begun = _begun_if_there(comm, request, split[0], saves, is_last=is_last)
        if begun is None:
            return None
        loads.append(begun)
        return described(begun, request) if begun.plan is None else begun.plan.said(begun.validated)

    answers = run_and_gather(comm, lambda: describe(is_last=False))  # 1
    if needs_common(answers):
        restore_everywhere(comm, request)
    if needs_common(answers) or None in answers:
        answers = run_and_gather(comm, lambda: describe(is_last=True))
    begun = loads[-1]
    if begun.plan is None or any(isinstance(answer, str) for answer in answers):
        return load_otherwise(comm, request, begun, answers)
    return finish_load(  # 2
        comm,
        begun.plan,
        answers,
        request.checkpoint_dir,
        begun.sharded.options,
        begun.sharded.allowed,
        validated=begun.validated,
        finish=begun.finish,
    )


def _begun_if_there(
    comm: Communicator,
    request: Request,
    split: tuple[StateDict, ...],
    saves: list[OpenedSave],
    *,
    is_last: bool,
) -> Load | None:
    """See ``_begun``; None where the checkpoint is not found on this rank, unless ``is_last``.

    A second look may find it: another node has it.
    """
    place = located(request.checkpoint_dir, request.options)
    try:
        return _begun(comm, request, split, place, saves)
    except (CheckpointNotFoundError, IncompleteCheckpointError):
        if is_last or not isinstance(place, Path):
            raise
        return None


def _begun(
    comm: Communicator,
    request: Request,
    split: tuple[StateDict, ...],
    place: Location,
    saves: list[OpenedSave],
) -> Load:
    """What this rank is about to load, and by which strategies. Rank-local; errors as of ``load``.

    A strategy with other ranks or another limit than this call is called as it is.
    """
    limit_s = OPENING * request.options.timeout_s
    deadline = Deadline.after(limit_s)
    root, save, marker = run_within(deadline, place, lambda: _opened(place))
    saves.append(save)
    sharded, loader = _strategies(comm, request, root, marker)
    strict = parsed_strict(request.strict)
    is_direct = _is_direct(sharded, request, strict)
    is_own = type(loader) is TorchCommonLoadStrategy

    def read() -> tuple[Any, bytes]:
        checkpoint = packs = None
        if is_direct:
            checkpoint = sharded.open_checkpoint(root, sharded.options, save)
        if save.has_packs and is_own:
            packs = checkpoint or open_packs(root, request.options, save)
        content = common_content(root, loader.options, loader.allowed, packs) if is_own else b""
        return checkpoint, content

    checkpoint, content = run_within(deadline, root, read)
    if is_own:
        common = loader.common_state(root, content)
    else:  # its time is its own
        common = loader.load_common(root)
        deadline = Deadline.after(limit_s)
    wanted, nonpersistent, factories = split
    plan = sharded.plan(wanted, checkpoint, deadline) if is_direct else None
    finish = partial(merged, merged(common, nonpersistent), factories=factories)
    validated = sharded.validated if is_direct and request.validates else None
    return Load(root, save, sharded, loader, wanted, strict, finish, plan, validated)


def _strategies(
    comm: Communicator, request: Request, root: Location, marker: CheckpointMarker
) -> tuple[Any, Any]:
    """The strategies for what is sharded, with the caller's options, and for the common state."""
    stored, action = marker.sharded_format, StrategyAction.LOAD_SHARDED
    more = request.timeout_s, request.process_group
    sharded = _fitting(root, action, request.chosen, stored, *more)
    if request.process_group is not None:
        _require_group(sharded, comm)
    if request.verify is not None or request.strict_dtype:
        sharded = with_options(sharded, request, stored)
    action = StrategyAction.LOAD_COMMON
    return sharded, _fitting(root, action, request.common_strategy, marker.common_format)


def _is_direct(sharded: Any, request: Request, strict: StrictHandling) -> bool:
    """Whether a strategy of this package loads with the ranks and the limit of this call."""
    return (
        isinstance(sharded, ZarrLoadShardedStrategy)
        and type(sharded).load is ZarrLoadShardedStrategy.load
        and (sharded.group, sharded.options.timeout_s) == (request.group, request.options.timeout_s)
        and not StrictHandling.requires_explicit_ckpt_mismatch_check(strict)
        and not StrictHandling.requires_global_app_metadata(strict)
    )


def _opened(place: Location) -> tuple[Location, OpenedSave, CheckpointMarker]:
    """The save at a place, and of which formats it is. Rank-local; blocks on storage."""
    return place, OpenedSave(place), read_marker(place)


def _fitting(
    root: Location,
    action: StrategyAction,
    choice: StrategyChoice,
    stored: tuple[str, int],
    *more: Any,
) -> Any:
    """The strategy that loads: the caller's, which has to read what is stored, or the marker's.

    Errors about the stored formats name ``metadata.json``. ``more`` is what ``resolve`` takes too.
    """
    found = choice and resolve(action, choice, stored, *more)
    try:
        if not found:
            return resolve(action, None, stored, *more)
        require_reads(inner_strategy(found), *stored)
    except StrategyError as error:
        path = f"{root}/{MARKER_NAME}"
        raise type(error)(f"{path}: {error.message}", path=path) from error
    return found


def _require_group(strategy: Any, comm: Communicator) -> None:
    own = group_ranks(getattr(inner_strategy(strategy), "group", None))
    if own != tuple(sorted(comm.global_ranks)):
        raise StrategyError(
            f"process_group: its {comm.size} ranks are not the {len(own)} that the strategy loads "
            "with; pass a strategy made with group=process_group"
        )


def _has_changed(
    comm: Communicator, request: Request, saves: Sequence[OpenedSave], failure: CheckpointError
) -> bool:
    """Whether another save has replaced packs since, which explains a failure. Collective.

    Ranks may have failed for different reasons. Returns as soon as all of them see the same save,
    which a network file system may take a while for.
    """
    timeout_s = request.options.timeout_s
    is_explained = isinstance(failure, CheckpointChangedError | IncompleteCheckpointError)
    if not any(run_and_gather(comm, lambda: is_explained)):
        return False
    before = next((save.identity for save in reversed(saves) if save.has_packs), None)
    over = Deadline.after(min(_VIEW_S, timeout_s / 2))

    def look() -> Message:
        deadline, place = Deadline.after(OPENING * timeout_s), request.checkpoint_dir
        seen = run_within(deadline, place, lambda: _seen(place, request.options))
        return [seen, before, over.left_s == 0]

    while True:
        now, was, are_over = zip(*run_and_gather(comm, look), strict=True)
        if None in now or None in was or any(are_over):
            return False
        if len(set(now)) == 1:
            return set(now) != set(was)
        time.sleep(_PAUSE_S)


def _seen(address: str | Path, options: Options) -> str | None:
    """The identity of the packs at a place; None where there are none."""
    root = located(address, options)
    if isinstance(root, Path) and root.is_dir():
        list(root.iterdir())  # an NFS client then asks its server
    save = OpenedSave(root)
    return save.identity if save.has_packs else None
