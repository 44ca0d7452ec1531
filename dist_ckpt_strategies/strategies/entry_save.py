"""Save with the signature of Megatron-Core's, and promises that it does not make.

Every rank raises where one fails. A finished checkpoint is not overwritten by accident. The marker
appears whole, after everything else is durable. torch_dist never takes the place of a strategy.
"""

from __future__ import annotations

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
from dist_ckpt_strategies.local.requests import LocalSaveRequest
from dist_ckpt_strategies.local.running import RUNNING_SAVES
from dist_ckpt_strategies.megatron.errors import raises_megatron_errors
from dist_ckpt_strategies.megatron.flow import (
    SaveParts,
    require_objects_handled,
    split_objects,
    take_apart_for_save,
)
from dist_ckpt_strategies.megatron.shards import StateDict
from dist_ckpt_strategies.megatron.wrappers import parallel_base, spread_main_replicas
from dist_ckpt_strategies.sharded.checks import Preprocess, check_save
from dist_ckpt_strategies.storage.time_limit import restart_limit, time_left
from dist_ckpt_strategies.strategies.choices import (
    StrategyChoice,
    location_of,
    require_taken,
    save_strategies,
)
from dist_ckpt_strategies.strategies.common import TorchCommonSaveStrategy
from dist_ckpt_strategies.strategies.local_replicated import LocalReplicatedSaveShardedStrategy
from dist_ckpt_strategies.strategies.sharded_save import Completion
from dist_ckpt_strategies.strategies.sharded_strategies import BaseSaveShardedStrategy
from dist_ckpt_strategies.strategies.world import entry_options, open_world, with_time_limit


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
            there has to be room for both. Without a marker, also remove arrays and objects that
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
    began = _begun_save(
        sharded_state_dict,
        checkpoint_dir,
        (sharded_strategy, common_strategy),
        content_metadata,
        _Manner(
            validate_access_integrity,
            preprocess_common_before_consistancy_check,
            overwrite,
            allow,
            timeout_s,
            is_async=async_sharded_save,
        ),
    )
    if async_sharded_save:
        return _begin_async(began)
    with allowing(allow):
        _save_parts(began)
    return None


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
    began = _begun_save(
        sharded_state_dict,
        checkpoint_dir,
        (sharded_strategy, common_strategy),
        content_metadata,
        _Manner(
            validate_access_integrity,
            preprocess_common_before_consistancy_check,
            overwrite,
            allow,
            timeout_s,
            is_async=True,
        ),
    )
    return SaveHandle(_begin_async(began))


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
class _Save:
    """A save whose parts are known, and nothing of it is written.

    Attributes:
        comm: all ranks.
        root: where the checkpoint goes.
        options: those of the steps around the strategies.
        sharded: saves the sharded part.
        common_saver: saves the common state.
        parts: what is saved.
        overwrite: see ``save``.
        allow: see ``save``.
    """

    comm: Communicator
    root: Location
    options: Options
    sharded: Any
    common_saver: Any
    parts: SaveParts
    overwrite: bool
    allow: Allowed

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
    def completion(self) -> Completion:
        """For a strategy of ours, which writes the whole checkpoint."""
        return Completion(self.save_common, self.marker, self.overwrite)

    def save_common(self, place: Location) -> None:
        """Write the common state. Rank-local, on every rank."""
        with allowing(self.allow):
            self.common_saver.save_common(self.parts.common, place)


@dataclass(frozen=True, slots=True)
class _Manner:
    """How a save is prepared; see ``save``."""

    validates: bool
    preprocess: Preprocess | None
    overwrite: bool
    allow: Allowed
    timeout_s: float | None
    is_async: bool


def _begun_save(
    state_dict: StateDict,
    checkpoint_dir: str | Path,
    strategies: tuple[StrategyChoice, StrategyChoice],
    content_metadata: dict[str, Any] | None,
    manner: _Manner,
) -> _Save:
    """What is saved, where to and by whom; checked, and the directory made. Collective."""
    comm = open_world("save", f"to {checkpoint_dir}", manner.timeout_s)

    def check() -> _Save:
        options = entry_options(manner.timeout_s)
        chosen = save_strategies(*strategies, manner.timeout_s)
        root = location_of(checkpoint_dir, chosen[0], options)
        require_taken(root, chosen[0])
        parts = take_apart_for_save(state_dict, content_metadata)
        found = _Save(comm, root, options, *chosen, parts, manner.overwrite, manner.allow)
        if manner.is_async:
            _require_ours(found)
        RUNNING_SAVES.wait(root, time_left(options.timeout_s))
        if comm.rank == 0:
            _require_loadable(found)
            complete_commit(root)
            if not manner.overwrite:
                require_unfinished(root)
        return found

    began = agree(comm, check)
    restart_limit()
    if manner.validates:
        check_save(comm, began.parts, manner.preprocess)
    agree_on_first(comm, lambda: make_directory(began.root))
    return began


def _require_ours(began: _Save) -> None:
    if not isinstance(began.base, BaseSaveShardedStrategy):
        raise StrategyError(
            f"{began.sharded}: this package saves in the background with ('zarr', 1) and "
            "('zarr', 2) only; call dist_checkpointing.save for the strategy's own way"
        )


def _require_loadable(began: _Save) -> None:
    """Raise unless a load would accept the classes in the common state."""
    with allowing(began.allow):
        if isinstance(began.common_saver, TorchCommonSaveStrategy):
            began.common_saver.dump_common(began.parts.common)
        else:
            dump_object(began.parts.common, name="common state")


def _begin_async(began: _Save) -> LocalSaveRequest:
    """Copy what is saved, and write it in the background. Collective."""
    base = began.base

    def keep() -> _Save:
        return replace(began, parts=SaveParts({}, deepcopy(began.parts.common)))

    def begin() -> LocalSaveRequest:
        if base is not began.sharded:
            spread_main_replicas(began.sharded, began.parts.sharded)
        with allowing(began.allow):
            request: LocalSaveRequest = base.begin_checkpoint(
                began.parts.sharded, began.root, kept.completion
            )
        return request

    kept = agree(began.comm, keep)
    return agree(began.comm, begin)


def _save_parts(began: _Save) -> None:
    """Write all parts and make them visible. Collective."""
    if isinstance(began.base, BaseSaveShardedStrategy):
        agree(began.comm, lambda: _save_ours(began))
    elif isinstance(began.base, LocalReplicatedSaveShardedStrategy):
        _save_on_nodes(began)
    else:
        _save_staged(began)


def _save_ours(began: _Save) -> None:
    if began.base is not began.sharded:
        spread_main_replicas(began.sharded, began.parts.sharded)
    began.base.save_checkpoint(began.parts.sharded, began.root, began.completion)


def _save_on_nodes(began: _Save) -> None:
    """Shards to the nodes' own disks; of the rest, which is staged, every node gets a copy."""
    place = _staged(began)
    agree(began.comm, lambda: began.save_common(place.location))
    agree(
        began.comm,
        lambda: began.base.save_with_common(began.parts.sharded, began.root, place.location),
    )
    agree_on_first(began.comm, lambda: place.commit(began.marker))


def _save_staged(began: _Save) -> None:
    """By a strategy of somebody else, to which the staging directory is the checkpoint's."""
    comm, sharded, state = began.comm, began.sharded, began.parts.sharded
    place = _staged(began)
    agree(comm, lambda: place.require(f"rank {comm.global_rank(0)}"))
    if not sharded.can_handle_sharded_objects:
        objects, state = agree(comm, lambda: split_objects(state))
        agree(comm, lambda: _save_objects(objects, place.location, sharded, began.common_saver))
    agree(comm, lambda: sharded.save(state, place.location))
    agree(comm, lambda: began.save_common(place.location))
    agree_on_first(comm, lambda: place.commit(began.marker))


def _staged(began: _Save) -> DirectoryPlace:
    """The staging directory of a save whose strategy makes none. Collective."""
    root = require_path(began.root, type(began.sharded).__name__)
    place = DirectoryPlace(root, began.options, keeps_old=True, overwrite=began.overwrite)
    save_id = agree_and_gather(began.comm, place.new_save_id)[0]
    place.join(save_id)
    agree_on_first(began.comm, lambda: place.begin(None))
    return place


def _save_objects(objects: StateDict, root: Location, sharded: Any, common_saver: Any) -> None:
    require_objects_handled(sharded, common_saver)
    common_saver.save_sharded_objects(objects, root)
