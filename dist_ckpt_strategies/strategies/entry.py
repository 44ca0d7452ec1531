"""Save and load with the signatures of Megatron-Core's, and promises that those do not make.

Every rank raises where one fails. A finished checkpoint is not overwritten by accident. The marker
appears whole, after everything else is durable. torch_dist never takes the place of a strategy.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dist_ckpt_strategies.comm.agree import agree, agree_and_gather, agree_on_first
from dist_ckpt_strategies.comm.base import Communicator
from dist_ckpt_strategies.comm.torch_group import open_communicator
from dist_ckpt_strategies.config import Options, options_from_environment
from dist_ckpt_strategies.errors import StrategyError
from dist_ckpt_strategies.local.requests import LocalSaveRequest
from dist_ckpt_strategies.local.running import RUNNING_SAVES
from dist_ckpt_strategies.megatron.bases import StrictHandling
from dist_ckpt_strategies.megatron.errors import raises_megatron_errors
from dist_ckpt_strategies.megatron.flow import (
    LoadParts,
    SaveParts,
    merge_factories,
    merged,
    parsed_strict,
    require_objects_handled,
    returns_keys,
    split_objects,
    take_apart_for_load,
    take_apart_for_save,
)
from dist_ckpt_strategies.megatron.shards import StateDict, sharded_values
from dist_ckpt_strategies.megatron.wrappers import parallel_base, spread_main_replicas
from dist_ckpt_strategies.run.checks import Preprocess, check_load, check_save
from dist_ckpt_strategies.spec.marker import CheckpointMarker
from dist_ckpt_strategies.storage.locations import (
    Location,
    is_finished,
    located,
    make_directory,
    publish,
    read_marker,
    require_path,
    require_unfinished,
    retract,
)
from dist_ckpt_strategies.storage.objects.embedded_common import COMMON_OBJECT
from dist_ckpt_strategies.storage.objects.pickled import Allowed, allowing, dump_object
from dist_ckpt_strategies.strategies.choices import (
    StrategyChoice,
    load_strategies,
    location_of,
    require_taken,
    save_strategies,
    verifying,
)
from dist_ckpt_strategies.strategies.local_directory import BACKEND as LOCAL_BACKEND
from dist_ckpt_strategies.strategies.local_directory import restore_common
from dist_ckpt_strategies.strategies.sharded_strategies import BaseSaveShardedStrategy


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
    *,
    overwrite: bool = False,
    timeout_s: float | None = None,
) -> LocalSaveRequest | None:
    """Save a checkpoint: visible when it is whole and durable, and not before.

    Collective over the world. The directory is made where it is missing.

    Args:
        sharded_state_dict: nested dict of ShardedTensors, ShardedObjects, factories and values
            that every rank holds alike.
        checkpoint_dir: a directory that all ranks see; for ("zarr", 2) also ``s3://bucket/path``
            or ``gs://bucket/path``. ``file:///path`` is a directory.
        sharded_strategy: strategy or (backend, version); ("zarr", 2) by default.
        common_strategy: strategy or (backend, version); ("torch", 1) by default.
        validate_access_integrity: also run Megatron-Core's own checks of the sharding.
        async_sharded_save: write behind training, and return a request for Megatron-Core's queue;
            see ``save_async``.
        preprocess_common_before_consistancy_check: applied to the common state before ranks
            compare it.
        content_metadata: stored in the common state, for ``load_content_metadata``.
        overwrite: replace a finished checkpoint in the directory, once the new state dict is
            known to be one that can be saved; its marker goes first. Without a marker, also remove
            arrays and objects that this save does not replace.
        timeout_s: longest wait for a peer in the steps around the strategies, and within those of
            ("zarr", 1) and ("zarr", 2) that are not given as instances.

    Raises:
        CheckpointExistsError: the directory holds a finished checkpoint, or other arrays.
        PlanError: the main replicas do not make up the arrays.
        StorageError: writing failed on this rank.
        PeerError: another rank failed; it is of the class of that rank's error too, and names
            rank, key and file.
        StrategyError: there is no such strategy, or it is one that cannot save behind
            training where that is asked for.
    """
    began = _begun_save(
        sharded_state_dict,
        checkpoint_dir,
        (sharded_strategy, common_strategy),
        content_metadata,
        _Manner(
            validate_access_integrity,
            preprocess_common_before_consistancy_check,
            overwrite,
            timeout_s,
        ),
    )
    if async_sharded_save:
        return _begin_async(began)
    _save_parts(began)
    agree_on_first(began.comm, began.publish)
    return None


@raises_megatron_errors
def save_async(  # noqa: PLR0913 - those of save
    sharded_state_dict: StateDict,
    checkpoint_dir: str | Path,
    sharded_strategy: StrategyChoice = None,
    common_strategy: StrategyChoice = None,
    *,
    validate_access_integrity: bool = True,
    preprocess_common_before_consistancy_check: Preprocess | None = None,
    content_metadata: dict[str, Any] | None = None,
    overwrite: bool = False,
    timeout_s: float | None = None,
) -> SaveHandle:
    """Save a checkpoint behind training; only the copy to host memory is waited for.

    Collective over the world. Tensors on the CPU are copied too: all may be overwritten as soon as
    it returns. The common state is taken as it is now. A save that still runs is waited for first.

    Args:
        sharded_state_dict: as in ``save``.
        checkpoint_dir: as in ``save``.
        sharded_strategy: strategy or (backend, version) of ("zarr", 1) or ("zarr", 2), the
            default.
        common_strategy: as in ``save``.
        validate_access_integrity: as in ``save``.
        preprocess_common_before_consistancy_check: as in ``save``.
        content_metadata: as in ``save``.
        overwrite: as in ``save``.
        timeout_s: as in ``save``.

    Returns:
        A handle. The checkpoint becomes visible when every rank has called its ``wait``, or when
        the queue that was given its ``request`` has finalised that.

    Raises:
        StrategyError: the strategy saves synchronously only.
        CheckpointError: as in ``save``, of what is known before anything is written.
    """
    began = _begun_save(
        sharded_state_dict,
        checkpoint_dir,
        (sharded_strategy, common_strategy),
        content_metadata,
        _Manner(
            validate_access_integrity,
            preprocess_common_before_consistancy_check,
            overwrite,
            timeout_s,
        ),
    )
    return SaveHandle(_begin_async(began))


@dataclass(frozen=True, slots=True)
class SaveHandle:
    """A save that goes on behind training.

    Attributes:
        request: for a queue; Megatron-Core's takes it, persistent or not.
    """

    request: LocalSaveRequest

    def done(self) -> bool:
        """Whether this rank has written its share, well or not. Rank-local."""
        return self.request.done()

    @raises_megatron_errors
    def wait(self, timeout_s: float | None = None) -> None:
        """Make the checkpoint visible, once every rank has written its share.

        Collective over the world. If the save has failed on any rank, every rank raises, each time,
        and nothing is visible.

        Args:
            timeout_s: longest wait for this rank's share, in seconds; by default the save's.

        Raises:
            StorageError: this rank could not write its share.
            PeerError: another one could not; or it takes too long.
        """
        self.request.wait(timeout_s)


@raises_megatron_errors
def load(  # noqa: PLR0913 - Megatron's signature
    sharded_state_dict: StateDict,
    checkpoint_dir: str | Path,
    sharded_strategy: StrategyChoice = None,
    common_strategy: StrategyChoice = None,
    validate_access_integrity: bool = True,  # noqa: FBT001, FBT002
    strict: str | StrictHandling = StrictHandling.ASSUME_OK_UNEXPECTED,
    *,
    allow: Allowed = (),
    timeout_s: float | None = None,
    verify: str | None = None,
) -> StateDict | tuple[StateDict, set[str], set[str]]:
    """Load a checkpoint into the layout that a sharded state dict describes.

    Collective over the world.

    Args:
        sharded_state_dict: what to load; ShardedTensors with data of the stored dtype are filled
            in place.
        checkpoint_dir: directory of a finished checkpoint, or its URL.
        sharded_strategy: strategy or (backend, version); by default what the checkpoint names.
        common_strategy: the same for the common state.
        validate_access_integrity: also run Megatron-Core's own checks of the sharding.
        strict: what to do about keys that only one side has, as in Megatron-Core.
        allow: further classes that objects of this checkpoint may be unpickled to.
        timeout_s: longest wait for a peer in the steps around the strategies, and within those of
            ("zarr", 1) and ("zarr", 2) that are not given as instances.
        verify: what is compared with the digests of ("zarr", 2): ``"read"``, ``"full"`` or
            ``"off"``; by default what the strategy or the environment says, ``"read"``.

    Returns:
        The state dict, and for the RETURN_* values of ``strict`` missing and unexpected keys.

    Raises:
        CheckpointNotFoundError, IncompleteCheckpointError: there is no finished checkpoint.
        ShapeMismatchError: an array is stored with another shape.
        StorageError: something is missing or damaged.
        UnsafeObjectError: an object needs a class that is not allowed; the message says which.
        StrategyError: there is no such strategy, or one that ``verify`` means nothing to.
        PeerError: another rank failed; it is of the class of that rank's error too.
    """
    comm = _world(f"load from {checkpoint_dir}", timeout_s)
    _restore_node(comm, checkpoint_dir)
    with ExitStack() as stack:

        def begin() -> tuple[Location, Any, Any, StateDict, LoadParts, StrictHandling]:
            _options(timeout_s)
            root = location_of(checkpoint_dir, sharded_strategy)
            stack.enter_context(allowing(allow))
            loaders = load_strategies(root, sharded_strategy, common_strategy, timeout_s)
            require_taken(root, loaders[0])
            loader = verifying(loaders[0], verify)
            found: StateDict = loaders[1].load_common(root)
            parts = take_apart_for_load(sharded_state_dict)
            state = merged(found, parts.nonpersistent)
            return root, loader, loaders[1], state, parts, parsed_strict(strict)

        root, sharded, common_loader, state, parts, strictness = agree(comm, begin)
        outcome = check_load(
            comm,
            parts.sharded,
            strictness,
            lambda: _stored_keys(root, sharded, common_loader, parts.sharded),
            validate_access_integrity,
        )
        loaded = _load_sharded(comm, outcome.sharded, root, sharded, common_loader)
    agree(comm, lambda: merge_factories(merged(state, *loaded), parts.factories))
    if returns_keys(strictness):
        return state, outcome.missing, outcome.unexpected
    return state


def _world(purpose: str, timeout_s: float | None) -> Communicator:
    """All ranks. Options that this rank cannot make are for the first agreed step to raise."""
    try:
        limit_s = _options(timeout_s).timeout_s
    except StrategyError:
        limit_s = Options().timeout_s
    return open_communicator(None, timeout_s=limit_s, purpose=purpose)


def _options(timeout_s: float | None) -> Options:
    return options_from_environment().with_changes(timeout_s=timeout_s)


def _replaces(sharded: Any) -> bool:
    """Whether the strategy itself sees to an earlier checkpoint, as late as it can."""
    base = parallel_base(sharded) or sharded
    return isinstance(base, BaseSaveShardedStrategy)


def _replace(
    sharded: Any, state: StateDict, root: Location, save_common: Callable[[], None]
) -> None:
    base = parallel_base(sharded)
    if base is not None:
        spread_main_replicas(sharded, state)
    (base or sharded).replace(state, root, save_common)


@dataclass(frozen=True, slots=True)
class _Save:
    """A save whose parts are known, and nothing of it is written.

    Attributes:
        comm: all ranks.
        root: where the checkpoint goes.
        sharded: saves the sharded part.
        common_saver: saves the common state.
        parts: what is saved.
    """

    comm: Communicator
    root: Location
    sharded: Any
    common_saver: Any
    parts: SaveParts

    def save_common(self) -> None:
        """Write the common state. Rank-local, on every rank."""
        self.common_saver.save_common(self.parts.common, self.root)

    def publish(self) -> None:
        """Make the checkpoint visible. On the first rank."""
        names = (self.sharded, self.common_saver)
        marker = CheckpointMarker(*(x for s in names for x in (s.backend, s.version)))
        publish(self.root, marker)


@dataclass(frozen=True, slots=True)
class _Manner:
    """How a save is prepared; see ``save``."""

    validates: bool
    preprocess: Preprocess | None
    overwrite: bool
    timeout_s: float | None


def _begun_save(
    state_dict: StateDict,
    checkpoint_dir: str | Path,
    strategies: tuple[StrategyChoice, StrategyChoice],
    content_metadata: dict[str, Any] | None,
    manner: _Manner,
) -> _Save:
    """What is saved, where to and by whom; checked, and the directory ready for it. Collective."""
    comm = _world(f"save to {checkpoint_dir}", manner.timeout_s)

    def check() -> _Save:
        options = _options(manner.timeout_s)
        chosen = save_strategies(*strategies, manner.timeout_s)
        root = location_of(checkpoint_dir, chosen[0])
        require_taken(root, chosen[0])
        parts = take_apart_for_save(state_dict, content_metadata)
        RUNNING_SAVES.wait(root, options.timeout_s)
        if comm.rank == 0:
            dump_object(parts.common, name="common state")
            if not manner.overwrite:
                require_unfinished(root)
        return _Save(comm, root, *chosen, parts)

    def prepare() -> None:
        make_directory(began.root)
        if manner.overwrite and not (_replaces(began.sharded) and is_finished(began.root)):
            retract(began.root)

    began = agree(comm, check)
    if manner.validates:
        check_save(comm, began.parts, manner.preprocess)
    agree_on_first(comm, prepare)
    return began


def _begin_async(began: _Save) -> LocalSaveRequest:
    """Copy what is saved, and write it behind training. Collective."""

    def keep() -> tuple[BaseSaveShardedStrategy, _Save]:
        base = parallel_base(began.sharded) or began.sharded
        if not isinstance(base, BaseSaveShardedStrategy):
            raise StrategyError(
                f"{began.sharded}: saves synchronously only; save behind training with "
                "('zarr', 1) or ('zarr', 2)"
            )
        return base, replace(began, parts=SaveParts({}, deepcopy(began.parts.common)))

    def begin() -> LocalSaveRequest:
        if base is not began.sharded:
            spread_main_replicas(began.sharded, began.parts.sharded)
        request: LocalSaveRequest = base.begin(
            began.parts.sharded, began.root, kept.save_common, kept.publish
        )
        return request

    base, kept = agree(began.comm, keep)
    return agree(began.comm, begin)


def _save_parts(began: _Save) -> None:
    """The sharded part first: its strategy proves that it can be saved before it replaces anything.

    A strategy that keeps copies of the common state needs that before.
    """
    comm, sharded, save_common = began.comm, began.sharded, began.save_common
    if _replaces(sharded):
        agree(comm, lambda: _replace(sharded, began.parts.sharded, began.root, save_common))
        return
    base = parallel_base(sharded) or sharded
    is_common_first = getattr(base, "needs_common_first", False)
    if is_common_first:
        agree(comm, save_common)
    _save_sharded(comm, began.parts.sharded, began.root, sharded, began.common_saver)
    if not is_common_first:
        agree(comm, save_common)


def _restore_node(comm: Communicator, checkpoint_dir: str | Path) -> None:
    """Put the files of a local checkpoint's common state where they are lost. Collective."""

    def backend() -> str | None:
        root = located(checkpoint_dir, None)
        is_local = isinstance(root, Path) and is_finished(root)
        return read_marker(root).sharded_backend if is_local else None

    backends = agree_and_gather(comm, backend)
    if None in backends and LOCAL_BACKEND in backends:
        root = agree(comm, lambda: require_path(located(checkpoint_dir, None), LOCAL_BACKEND))
        restore_common(comm, root, str(checkpoint_dir))


def _save_sharded(
    comm: Communicator, state: StateDict, root: Location, sharded: Any, common_saver: Any
) -> None:
    if not sharded.can_handle_sharded_objects:
        objects, state = agree(comm, lambda: split_objects(state))
        agree(comm, lambda: _save_objects(objects, root, sharded, common_saver))
    agree(comm, lambda: sharded.save(state, root))


def _save_objects(objects: StateDict, root: Location, sharded: Any, common_saver: Any) -> None:
    require_objects_handled(sharded, common_saver)
    common_saver.save_sharded_objects(objects, root)


def _stored_keys(root: Location, sharded: Any, common_loader: Any, wanted: StateDict) -> StateDict:
    """What is stored, but for the object that is the common state: nobody asks for it."""
    found: StateDict = sharded.load_sharded_metadata(root)
    if not sharded.can_handle_sharded_objects:
        found = merged(found, common_loader.load_sharded_metadata(root))
    if all(value.key != COMMON_OBJECT.key for value in sharded_values(wanted)):
        found.pop(COMMON_OBJECT.unique_key, None)
    return found


def _load_sharded(
    comm: Communicator, state: StateDict, root: Location, sharded: Any, common_loader: Any
) -> tuple[StateDict, ...]:
    """What the strategies load: objects apart, where the sharded one does not take them."""
    if sharded.can_handle_sharded_objects:
        return (agree(comm, lambda: sharded.load(state, root)),)
    objects, tensors = agree(comm, lambda: split_objects(state))
    loaded = agree(comm, lambda: common_loader.load_sharded_objects(objects, root))
    return loaded, agree(comm, lambda: sharded.load(tensors, root))
