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

from dist_ckpt_strategies.comm.agree import agree, agree_on_first
from dist_ckpt_strategies.comm.base import Communicator
from dist_ckpt_strategies.config import limit_of_wait
from dist_ckpt_strategies.errors import StrategyError
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
from dist_ckpt_strategies.run.checks import Preprocess, check_save
from dist_ckpt_strategies.spec.marker import CheckpointMarker
from dist_ckpt_strategies.storage.locations import (
    Location,
    is_finished,
    make_directory,
    publish,
    require_unfinished,
    retract,
)
from dist_ckpt_strategies.storage.objects.pickled import dump_object
from dist_ckpt_strategies.strategies.choices import (
    StrategyChoice,
    location_of,
    require_taken,
    save_strategies,
)
from dist_ckpt_strategies.strategies.sharded_strategies import BaseSaveShardedStrategy
from dist_ckpt_strategies.strategies.world import entry_options, open_world


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
    comm = open_world("save", f"to {checkpoint_dir}", manner.timeout_s)

    def check() -> _Save:
        options = entry_options(manner.timeout_s)
        chosen = save_strategies(*strategies, manner.timeout_s)
        root = location_of(checkpoint_dir, chosen[0], options)
        require_taken(root, chosen[0])
        parts = take_apart_for_save(state_dict, content_metadata)
        RUNNING_SAVES.wait(root, limit_of_wait(options.timeout_s))
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
