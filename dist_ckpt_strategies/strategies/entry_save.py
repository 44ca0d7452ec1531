"""``save`` with Megatron-Core's signature and further promises, and ``save_async``.

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
from dist_ckpt_strategies.errors import (
    StrategyError,
)
from dist_ckpt_strategies.formats.commit import DirectoryPlace
from dist_ckpt_strategies.formats.locations import (
    Location,
    complete_commit,
    require_path,
    require_unfinished,
)
from dist_ckpt_strategies.formats.marker import CheckpointMarker
from dist_ckpt_strategies.formats.objects import Allowed, allowing, dump_object
from dist_ckpt_strategies.megatron.errors import raises_megatron_errors
from dist_ckpt_strategies.megatron.flow import (
    SaveParts,
    split_for_save,
    split_objects,
)
from dist_ckpt_strategies.megatron.shards import StateDict
from dist_ckpt_strategies.megatron.types import StrategyAction
from dist_ckpt_strategies.sharded.async_request import RUNNING_SAVES, LocalSaveRequest
from dist_ckpt_strategies.sharded.async_save import begin_in_background
from dist_ckpt_strategies.sharded.checks import check_save, digest_of_common
from dist_ckpt_strategies.sharded.save import CommonState, SaveInputs, begun_save
from dist_ckpt_strategies.storage.files import COMMON_NAME
from dist_ckpt_strategies.storage.store import Directory
from dist_ckpt_strategies.storage.time_limit import OPENING, WORK, time_limit, uncounted
from dist_ckpt_strategies.strategies.common import TorchCommonSaveStrategy
from dist_ckpt_strategies.strategies.configured import (
    entry_options,
    location_for,
    open_world,
    require_taken,
)
from dist_ckpt_strategies.strategies.local_replicated import (
    LocalReplicatedSaveShardedStrategy,
)
from dist_ckpt_strategies.strategies.registry import StrategyChoice, resolve
from dist_ckpt_strategies.strategies.zarr import ZarrSaveShardedStrategy

Preprocess = Callable[[StateDict], StateDict]


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
            this package that are not given as instances.

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
    comm, limit_s = open_world("save", f"to {checkpoint_dir}", timeout_s)
    saves: list[_Save] = []

    def open_inputs() -> SaveInputs | None:
        options = entry_options(timeout_s)
        saver = resolve(StrategyAction.SAVE_SHARDED, sharded_strategy, ("zarr", 2), timeout_s)
        common_saver = resolve(StrategyAction.SAVE_COMMON, common_strategy, ("torch", 1))
        root = location_for(saver, checkpoint_dir, options)
        require_taken(root, saver)
        parts = split_for_save(sharded_state_dict, content_metadata)
        compared: StateDict | None = None
        if validate_access_integrity:
            preprocess = preprocess_common_before_consistancy_check
            compared = preprocess(parts.common) if preprocess else parts.common
        common = _common_state(
            parts.common,
            common_saver,
            compared,
            allow,
            is_first=comm.rank == 0,
            is_async=async_sharded_save,
        )
        saves.append(_Save(comm, root, options, saver, common_saver, parts, common, overwrite))
        return saves[0].open_inputs(
            is_async=async_sharded_save, validates=validate_access_integrity
        )

    with time_limit(limit_s, OPENING, then=WORK), allowing(allow):
        begun = begun_save(comm, open_inputs)
        if begun is None:
            return saves[0].run_otherwise(is_async=async_sharded_save)
        if async_sharded_save:
            return begin_in_background(begun)
        begun.run()
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
    request = save(
        sharded_state_dict,
        checkpoint_dir,
        sharded_strategy,
        common_strategy,
        validate_access_integrity,
        True,  # noqa: FBT003 - Megatron's signature
        preprocess_common_before_consistancy_check,
        content_metadata,
        overwrite=overwrite,
        allow=allow,
        timeout_s=timeout_s,
    )
    assert request is not None  # noqa: S101 - an asynchronous save returns one
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


def _common_state(
    state: StateDict,
    saver: Any,
    compared: StateDict | None,
    allow: Allowed,
    *,
    is_first: bool,
    is_async: bool,
) -> CommonState:
    """The common state, ready to be written; one that a load would refuse is an error."""
    digest = "" if compared is None else digest_of_common(compared)
    if isinstance(saver, TorchCommonSaveStrategy):
        return CommonState(compared, digest, saver.dump_common(state) if is_first else None, None)
    if is_first:
        dump_object(state, name="common state")
    kept = deepcopy(state) if is_async else state

    def write(place: Location) -> None:
        with allowing(allow):
            saver.save_common(kept, place)

    return CommonState(compared, digest, None, write)


@dataclass(frozen=True, slots=True)
class _Save:
    """A save of which nothing is written yet; ``comm`` is all ranks."""

    comm: Communicator
    root: Location
    options: Options
    sharded: Any
    common_saver: Any
    parts: SaveParts
    common: CommonState
    overwrite: bool

    @property
    def base(self) -> Any:
        """The strategy, or the one inside of Megatron-Core's FullyParallelSaveStrategyWrapper."""
        is_wrapper = hasattr(self.sharded, "apply_saving_parallelization")
        return self.sharded.base_strategy if is_wrapper else self.sharded

    @property
    def marker(self) -> bytes:
        """Content of ``metadata.json``."""
        saver, common = self.sharded, self.common_saver
        return CheckpointMarker(
            saver.backend, saver.version, common.backend, common.version
        ).to_json()

    def open_inputs(self, *, is_async: bool, validates: bool) -> SaveInputs | None:
        """What this rank brings to a save with the ranks and the time limit of this call.

        Rank-local. None where another package's strategy saves, or one with other ranks.
        """
        base, root = self.base, self.root
        is_ours = isinstance(base, ZarrSaveShardedStrategy)
        if is_async and not is_ours:
            raise StrategyError(
                f"{self.sharded}: this package saves in the background with ('zarr', 1) and "
                "('zarr', 2) only; call dist_checkpointing.save for the strategy's own way"
            )
        with uncounted():
            RUNNING_SAVES.wait(root, WORK * self.options.timeout_s)
        if self.comm.rank == 0:
            complete_commit(root)
            if not self.overwrite:
                require_unfinished(root)
        if not (is_ours and base is self.sharded and base.runs_in_world(self.options)):
            return None
        if is_async:
            base.cache.get_ready(base.options)
        return replace(self.inputs(self.comm), validates=validates)

    def inputs(self, comm: Communicator) -> SaveInputs:
        """What this rank brings to a save by a strategy of this package. Rank-local."""
        found: SaveInputs = self.base.inputs(
            comm, self.parts.sharded, self.root, overwrite=self.overwrite
        )
        return replace(found, common=self.common, marker=self.marker)

    def run_otherwise(self, *, is_async: bool) -> LocalSaveRequest | None:
        """Save by a strategy of another package, or with other ranks. Collective."""
        comm, base, sharded = self.comm, self.base, self.parts.sharded
        if self.common.compared is not None:
            check_save(comm, sharded, self.common.compared)
        if isinstance(base, ZarrSaveShardedStrategy):
            return agree(comm, lambda: self._by_base(base, is_async=is_async))
        root = require_path(self.root, type(self.sharded).__name__)
        place = self._staged(root)
        if isinstance(base, LocalReplicatedSaveShardedStrategy):
            agree(comm, lambda: self._write_common(place))
            agree(comm, lambda: base.save_with_common(sharded, root, place.location))
        else:
            self._by_foreign(place)
        agree_on_first(comm, lambda: place.commit(self.marker))
        return None

    def _by_base(self, base: ZarrSaveShardedStrategy, *, is_async: bool) -> LocalSaveRequest | None:
        if base is not self.sharded:
            self.sharded.apply_saving_parallelization(self.parts.sharded)
        return base.run(self.root, self.inputs, is_async=is_async)

    def _by_foreign(self, place: DirectoryPlace) -> None:
        """The strategy of another package takes the staging directory for the checkpoint."""
        comm, sharded, state = self.comm, self.sharded, self.parts.sharded
        agree(comm, lambda: place.require(f"rank {comm.global_rank(0)}"))
        if not sharded.can_handle_sharded_objects:
            objects, state = agree(comm, lambda: split_objects(state))
            agree(comm, lambda: self._write_objects(objects, place.location))
        agree(comm, lambda: sharded.save(state, place.location))
        agree(comm, lambda: self._write_common(place))

    def _staged(self, root: Path) -> DirectoryPlace:
        """The staging directory of a save whose strategy makes none. Collective."""
        place = DirectoryPlace(root, self.options, keeps_old=True, overwrite=self.overwrite)
        place.save_id = agree_and_gather(self.comm, place.new_save_id)[0]
        agree_on_first(self.comm, lambda: place.begin(None))
        return place

    def _write_common(self, place: DirectoryPlace) -> None:
        if self.common.save is not None:
            self.common.save(place.location)
        elif self.common.content is not None:
            Directory(place.location).write(COMMON_NAME, self.common.content)

    def _write_objects(self, objects: StateDict, root: Location) -> None:
        if not self.common_saver.can_handle_sharded_objects:
            raise StrategyError(
                f"the state dict has ShardedObjects, which neither {self.sharded} nor "
                f"{self.common_saver} can handle; choose a strategy that does"
            )
        self.common_saver.save_sharded_objects(objects, root)
