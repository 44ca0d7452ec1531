"""Save with the signature of Megatron-Core's, and promises that it does not make.

Every rank raises where one fails. A finished checkpoint is not overwritten by accident. The marker
appears whole, after everything else is durable. torch_dist never takes the place of a strategy.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dist_ckpt_strategies.comm.agree import agree, agree_and_gather, agree_on_first
from dist_ckpt_strategies.comm.base import Communicator
from dist_ckpt_strategies.config import Options
from dist_ckpt_strategies.errors import StrategyError
from dist_ckpt_strategies.formats.commit import DirectoryPlace
from dist_ckpt_strategies.formats.locations import (
    Location,
    complete_commit,
    make_directory,
    require_path,
    require_unfinished,
)
from dist_ckpt_strategies.formats.marker import CheckpointMarker
from dist_ckpt_strategies.formats.objects import Allowed, allowing, dump_object
from dist_ckpt_strategies.megatron.errors import raises_megatron_errors
from dist_ckpt_strategies.megatron.flow import (
    SaveParts,
    require_objects_handled,
    split_for_save,
    split_objects,
)
from dist_ckpt_strategies.megatron.shards import StateDict
from dist_ckpt_strategies.megatron.wrappers import parallel_base, spread_main_replicas
from dist_ckpt_strategies.sharded.async_request import RUNNING_SAVES, LocalSaveRequest
from dist_ckpt_strategies.sharded.async_save import begin_in_background
from dist_ckpt_strategies.sharded.checks import check_save, digest_of_common
from dist_ckpt_strategies.sharded.save import CommonState, SaveInputs, begun_save
from dist_ckpt_strategies.storage.files import COMMON_NAME
from dist_ckpt_strategies.storage.store import Directory
from dist_ckpt_strategies.storage.time_limit import time_left
from dist_ckpt_strategies.strategies.common import TorchCommonSaveStrategy
from dist_ckpt_strategies.strategies.entry_options import (
    entry_options,
    location_of,
    open_world,
    require_taken,
    save_strategies,
    with_time_limit,
)
from dist_ckpt_strategies.strategies.local_replicated import LocalReplicatedSaveShardedStrategy
from dist_ckpt_strategies.strategies.registry import StrategyChoice
from dist_ckpt_strategies.strategies.zarr import ZarrSaveShardedStrategy

Preprocess = Callable[[StateDict], StateDict]


@raises_megatron_errors
@with_time_limit
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
    allow: Allowed = (),
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
        async_sharded_save: write in the background, and return a request for Megatron-Core's queue;
            see ``save_async``.
        preprocess_common_before_consistancy_check: applied to the common state before ranks
            compare it.
        content_metadata: stored in the common state, for ``load_content_metadata``.
        overwrite: replace a finished checkpoint, which stays loadable until the new one is durable:
            this needs space for both. Without a marker, also remove arrays and objects that
            this save does not replace.
        allow: further classes that objects and the common state may be of; ``load`` has to be given
            them too.
        timeout_s: longest wait for a peer in the steps around the strategies, and within those of
            ("zarr", 1) and ("zarr", 2) that are not given as instances.

    Raises:
        CheckpointExistsError: the directory holds a finished checkpoint, or other arrays.
        PlanError: the main replicas do not make up the arrays.
        UnsafeObjectError: an object needs a class that ``load`` would refuse.
        StorageError: writing failed on this rank.
        PeerError: another rank failed; it is of the class of that rank's error too, and names
            rank, key and file.
        StrategyError: there is no such strategy, or it cannot save in the background where that is
            asked for.
    """
    manner = _Manner(
        validate_access_integrity,
        preprocess_common_before_consistancy_check,
        content_metadata,
        overwrite,
        allow,
        timeout_s,
        is_async=async_sharded_save,
    )
    return _saved(sharded_state_dict, checkpoint_dir, (sharded_strategy, common_strategy), manner)


@raises_megatron_errors
@with_time_limit
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
    allow: Allowed = (),
    timeout_s: float | None = None,
) -> SaveHandle:
    """Save a checkpoint in the background; only the copy to host memory is waited for.

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
        allow: as in ``save``.
        timeout_s: as in ``save``.

    Returns:
        A handle. The checkpoint becomes visible when every rank has called its ``wait``, or when
        the queue that was given its ``request`` has finalised that.

    Raises:
        StrategyError: the strategy saves synchronously only.
        CheckpointError: as in ``save``, of what is known before anything is written.
    """
    manner = _Manner(
        validate_access_integrity,
        preprocess_common_before_consistancy_check,
        content_metadata,
        overwrite,
        allow,
        timeout_s,
        is_async=True,
    )
    chosen = (sharded_strategy, common_strategy)
    request = _saved(sharded_state_dict, checkpoint_dir, chosen, manner)
    assert request is not None  # noqa: S101 - is_async
    return SaveHandle(request)


@dataclass(frozen=True, slots=True)
class SaveHandle:
    """A save that goes on in the background.

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


@dataclass(frozen=True, slots=True)
class _Manner:
    """How a save is carried out; see ``save``."""

    validates: bool
    preprocess: Preprocess | None
    content_metadata: dict[str, Any] | None
    overwrite: bool
    allow: Allowed
    timeout_s: float | None
    is_async: bool


@dataclass(frozen=True, slots=True)
class _Save:
    """A save of which nothing is written yet.

    Attributes:
        comm: all ranks.
        root: where the checkpoint goes.
        options: those of the steps around the strategies.
        sharded: saves the sharded part.
        common_saver: saves the common state.
        parts: what is saved.
        common: the common state, ready to be written.
        manner: see ``save``.
    """

    comm: Communicator
    root: Location
    options: Options
    sharded: Any
    common_saver: Any
    parts: SaveParts
    common: CommonState
    manner: _Manner

    @property
    def base(self) -> Any:
        """The strategy, or the one inside of Megatron-Core's wrapper."""
        return parallel_base(self.sharded) or self.sharded

    @property
    def marker(self) -> bytes:
        """Content of ``metadata.json``."""
        names = (self.sharded, self.common_saver)
        return CheckpointMarker(*(x for s in names for x in (s.backend, s.version))).to_json()

    @property
    def is_direct(self) -> bool:
        """Whether a strategy of this package saves with the ranks and the limit of this call."""
        ours = self.sharded
        return (
            isinstance(ours, ZarrSaveShardedStrategy)
            and not ours.has_group
            and ours.options.timeout_s == self.options.timeout_s
        )

    def inputs(self, comm: Communicator) -> SaveInputs:
        """What this rank brings to a save by a strategy of this package. Rank-local."""
        overwrite = self.manner.overwrite
        found: SaveInputs = self.base.inputs(
            comm, self.parts.sharded, self.root, overwrite=overwrite
        )
        validates = self.manner.validates and self.is_direct
        return replace(found, validates=validates, common=self.common, marker=self.marker)


def _saved(
    state_dict: StateDict,
    checkpoint_dir: str | Path,
    strategies: tuple[StrategyChoice, StrategyChoice],
    manner: _Manner,
) -> LocalSaveRequest | None:
    """Save, or begin to, and return the request. Collective."""
    comm = open_world("save", f"to {checkpoint_dir}", manner.timeout_s)
    found: list[_Save] = []

    def open_inputs() -> SaveInputs | None:
        save = _prepared(comm, state_dict, checkpoint_dir, strategies, manner)
        found.append(save)
        if not save.is_direct:
            return None
        if manner.is_async:
            save.base.cache.get_ready(save.base.options)
        return save.inputs(comm)

    with allowing(manner.allow):
        begun = begun_save(comm, open_inputs)
        if begun is None:
            return _save_otherwise(found[0])
        if manner.is_async:
            return begin_in_background(begun)
        begun.run()
    return None


def _prepared(
    comm: Communicator,
    state_dict: StateDict,
    checkpoint_dir: str | Path,
    strategies: tuple[StrategyChoice, StrategyChoice],
    manner: _Manner,
) -> _Save:
    """What is saved, where to and by which strategies, checked. Rank-local."""
    options = entry_options(manner.timeout_s)
    sharded, common_saver = save_strategies(*strategies, manner.timeout_s)
    root = location_of(checkpoint_dir, sharded, options)
    require_taken(root, sharded)
    parts = split_for_save(state_dict, manner.content_metadata)
    if manner.is_async and not isinstance(
        parallel_base(sharded) or sharded, ZarrSaveShardedStrategy
    ):
        raise StrategyError(
            f"{sharded}: this package saves in the background with ('zarr', 1) and "
            "('zarr', 2) only; call dist_checkpointing.save for the strategy's own way"
        )
    RUNNING_SAVES.wait(root, time_left(options.timeout_s))
    common = _common_state(parts.common, common_saver, manner, is_first=comm.rank == 0)
    if comm.rank == 0:
        complete_commit(root)
        if not manner.overwrite:
            require_unfinished(root)
    return _Save(comm, root, options, sharded, common_saver, parts, common, manner)


def _common_state(state: StateDict, saver: Any, manner: _Manner, *, is_first: bool) -> CommonState:
    """The common state, ready to be written; one that a load would refuse is an error."""
    compared, digest = None, ""
    if manner.validates:
        compared = manner.preprocess(state) if manner.preprocess else state
        digest = digest_of_common(compared)
    with allowing(manner.allow):
        if isinstance(saver, TorchCommonSaveStrategy):
            content = saver.dump_common(state) if is_first else None
            return CommonState(compared, digest, content, None)
        if is_first:
            dump_object(state, name="common state")
    kept = deepcopy(state) if manner.is_async else state

    def save(place: Location) -> None:
        with allowing(manner.allow):
            saver.save_common(kept, place)

    return CommonState(compared, digest, None, save)


def _save_otherwise(save: _Save) -> LocalSaveRequest | None:
    """Save by a strategy of another package, or with other ranks. Collective."""
    comm = save.comm
    if save.common.compared is not None:
        check_save(comm, save.parts.sharded, save.common.compared)
    agree_on_first(comm, lambda: make_directory(save.root))
    if isinstance(save.base, ZarrSaveShardedStrategy):
        return agree(comm, lambda: _save_by_ours(save))
    if isinstance(save.base, LocalReplicatedSaveShardedStrategy):
        _save_on_nodes(save)
    else:
        _save_staged(save)
    return None


def _save_by_ours(save: _Save) -> LocalSaveRequest | None:
    base = save.base
    if base is not save.sharded:
        spread_main_replicas(save.sharded, save.parts.sharded)
    comm = base.communicator(save.root)
    if save.manner.is_async:
        request: LocalSaveRequest = base.begin_with(comm, lambda: save.inputs(comm))
        return request
    base.save_with(comm, lambda: save.inputs(comm))
    return None


def _save_common(save: _Save, place: DirectoryPlace) -> None:
    """Write the common state to the place of the save. Rank-local, on every rank."""
    if save.common.save is not None:
        save.common.save(place.location)
    elif save.common.content is not None:
        Directory(place.location).write(COMMON_NAME, save.common.content)


def _save_on_nodes(save: _Save) -> None:
    """Shards to the nodes' own disks; every node gets a copy of the rest, which is staged."""
    comm, place = save.comm, _staged(save)
    agree(comm, lambda: _save_common(save, place))
    agree(
        comm,
        lambda: save.base.save_with_common(save.parts.sharded, save.root, place.location),
    )
    agree_on_first(comm, lambda: place.commit(save.marker))


def _save_staged(save: _Save) -> None:
    """By a strategy of another package, which takes the staging directory for the checkpoint."""
    comm, sharded, state = save.comm, save.sharded, save.parts.sharded
    place = _staged(save)
    agree(comm, lambda: place.require(f"rank {comm.global_rank(0)}"))
    if not sharded.can_handle_sharded_objects:
        objects, state = agree(comm, lambda: split_objects(state))
        agree(comm, lambda: _save_objects(objects, place.location, sharded, save.common_saver))
    agree(comm, lambda: sharded.save(state, place.location))
    agree(comm, lambda: _save_common(save, place))
    agree_on_first(comm, lambda: place.commit(save.marker))


def _staged(save: _Save) -> DirectoryPlace:
    """The staging directory of a save whose strategy makes none. Collective."""
    root = require_path(save.root, type(save.sharded).__name__)
    place = DirectoryPlace(root, save.options, keeps_old=True, overwrite=save.manner.overwrite)
    save_id = agree_and_gather(save.comm, place.new_save_id)[0]
    place.join(save_id)
    agree_on_first(save.comm, lambda: place.begin(None))
    return place


def _save_objects(objects: StateDict, root: Location, sharded: Any, common_saver: Any) -> None:
    require_objects_handled(sharded, common_saver)
    common_saver.save_sharded_objects(objects, root)
