"""``save`` and ``save_async`` with Megatron-Core's signatures and further promises.

Every rank raises where one fails. A finished checkpoint is not overwritten by accident. The marker
appears whole, after everything else is durable. torch_dist never takes the place of a strategy.
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xxhash import xxh3_64_hexdigest

from dist_ckpt_strategies.comm.base import (
    Communicator,
    run_and_gather,
    run_collectively,
    run_on_first_rank,
)
from dist_ckpt_strategies.config import Options
from dist_ckpt_strategies.errors import CheckpointExistsError, StrategyError
from dist_ckpt_strategies.formats.commit import DirectoryPlace, complete_commit
from dist_ckpt_strategies.formats.locations import (
    CheckpointMarker,
    Location,
    is_finished,
    located,
    require_path,
)
from dist_ckpt_strategies.formats.objects import Allowed, allowing, dump_loadable, dump_object
from dist_ckpt_strategies.formats.pack_checkpoint import place_of
from dist_ckpt_strategies.formats.pack_commit import MARKER_CONTENT
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
from dist_ckpt_strategies.sharded.async_request import LocalSaveRequest
from dist_ckpt_strategies.sharded.async_save import begin_in_background
from dist_ckpt_strategies.sharded.checks import check_save, warn_of_differences
from dist_ckpt_strategies.sharded.pack_save import Prepared, Started
from dist_ckpt_strategies.sharded.save import RUNNING_SAVES, CommonState, ShardedSave, begun_save
from dist_ckpt_strategies.storage.files import COMMON_NAME, Directory
from dist_ckpt_strategies.storage.io_pool import (
    OPENING,
    WORK,
    Deadline,
    run_within,
    time_limit,
    uncounted,
)
from dist_ckpt_strategies.strategies.call import opened_call
from dist_ckpt_strategies.strategies.common import BACKEND as TORCH_BACKEND
from dist_ckpt_strategies.strategies.common import COMMON_STATE, TorchCommonSaveStrategy
from dist_ckpt_strategies.strategies.local_replicated import LocalReplicatedSaveShardedStrategy
from dist_ckpt_strategies.strategies.registry import StrategyChoice, resolve
from dist_ckpt_strategies.strategies.safetensors import PackSaveShardedStrategy, contents_of
from dist_ckpt_strategies.strategies.zarr import ZarrSaveShardedStrategy

Preprocess = Callable[[StateDict], StateDict]

SaveHandle = LocalSaveRequest
"""A save in the background."""


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
) -> LocalSaveRequest | None:
    """Save a checkpoint, which becomes visible when it is complete and durable.

    Collective over the world. The directory is made where it is missing.

    Args:
        sharded_state_dict: nested dict of ShardedTensors, ShardedObjects, factories and values
            that are equal on all ranks.
        checkpoint_dir: a directory that all ranks see; for ("zarr", 2) also ``s3://bucket/path``
            or ``gs://bucket/path``. ``file:///path`` is a directory.
        sharded_strategy: strategy or (backend, version); ("zarr", 2) by default.
        common_strategy: strategy or (backend, version); ("torch", 1) by default.
        validate_access_integrity: also run Megatron-Core's own checks of the sharding.
        async_sharded_save: write in the background, and return a request for Megatron-Core's queue;
            see ``save_async``.
        preprocess_common_before_consistancy_check: applied to the common state before ranks
            compare it.
        content_metadata: stored in the common state, for Megatron-Core's ``load_content_metadata``,
            which takes what ``load`` gives, or after ``register()`` a directory.
        async_strategy: ``"nvrx"`` or ``"mcore"``; any queue of theirs takes the request.
        verify_integrity: have digests of all that is saved. ("zarr", 2) always has them, no other
            format does.
        overwrite: replace a finished checkpoint, which stays loadable until the new one is durable:
            this needs space for both. Without a marker, also remove arrays and objects that
            this save does not replace.
        allow: further classes that objects and the common state may be of; ``load`` has to be given
            them too.
        timeout_s: longest wait for a peer; by default the strategy's own.

    Raises:
        CheckpointExistsError: the directory holds a finished checkpoint, or other arrays.
        PlanError: the main replicas do not make up the arrays.
        UnsafeObjectError: an object needs a class that ``load`` would refuse.
        StorageError: writing failed on this rank.
        PeerError: another rank failed; it is of the class of that rank's error too, and names
            rank, key and file.
        StrategyError: there is no such strategy, or it cannot save in the background or with
            digests where that is asked for.
    """
    action, detail = StrategyAction.SAVE_SHARDED, f"to {checkpoint_dir}"
    call = _Save(
        *opened_call(action, sharded_strategy, detail, timeout_s, allow),
        sharded_state_dict,
        checkpoint_dir,
        common_strategy,
        validate_access_integrity,
        async_sharded_save,
        preprocess_common_before_consistancy_check,
        content_metadata,
        async_strategy,
        verify_integrity,
        overwrite,
        allow,
    )
    if call.invalid is None and isinstance(call.base, PackSaveShardedStrategy):
        return call.run_packs()
    with (
        time_limit(call.options.timeout_s, OPENING, then=WORK),
        allowing(() if call.invalid else allow),
    ):
        begun = begun_save(call.comm, call.open) or call.run_otherwise()
        if begun and async_sharded_save:
            return begin_in_background(begun)
        if begun:
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
    async_strategy: str | None = None,
    verify_integrity: bool = False,
    overwrite: bool = False,
    allow: Allowed = (),
    timeout_s: float | None = None,
) -> SaveHandle:
    """Save a checkpoint in the background; blocks for the copy to host memory only.

    Collective over the world. Tensors on the CPU are copied too: all may be overwritten as soon as
    it returns. The common state is taken as it is now. A save that still runs is waited for first.

    Arguments are those of ``save``; the strategy has to be one of ("zarr", 1) or ("zarr", 2).

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
    )
    assert request is not None  # noqa: S101 - an asynchronous save returns one
    return request


@dataclass(slots=True)
class _Save:
    """A save: what ``_opened`` returns, the arguments of ``save``, and what ``open`` sets."""

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
    preprocess: Preprocess | None
    content_metadata: dict[str, Any] | None
    async_strategy: str | None
    verify: bool
    overwrite: bool
    allow: Allowed
    root: Location = Path()
    common_saver: Any = None
    common: CommonState | None = None
    marker: bytes = b""

    def run_packs(self) -> LocalSaveRequest | None:
        """Save as packs. Collective."""
        comm, compared = self.comm, []
        split: list[tuple[StateDict, StateDict]] = []
        if self.sharded is not self.base:  # a wrapper, which chooses the main replicas
            run_collectively(
                comm, lambda: split.append(split_for_save(self.state, self.content_metadata))
            )
            run_collectively(comm, lambda: self.sharded.apply_saving_parallelization(split[0][0]))

        def prepare() -> Prepared:
            if self.async_strategy not in {None, "nvrx", "mcore"}:
                self._require_suitable(is_ours=True)
            root = located(self.checkpoint_dir, self.options)
            RUNNING_SAVES.wait(root, self.options)
            saver = resolve(StrategyAction.SAVE_COMMON, self.common_strategy, ("torch", 1))
            if not isinstance(saver, TorchCommonSaveStrategy):
                raise StrategyError(
                    f"common_strategy: packs hold the common state themselves, found {saver}; "
                    "leave it out, or save another format"
                )
            state, common = split[0] if split else split_for_save(self.state, self.content_metadata)
            self.common_saver = saver
            found = self._common_state(common)
            compared.append(found.compared)
            if comm.rank == 0 and not self.overwrite:
                limit = Deadline.after(OPENING * self.options.timeout_s)
                run_within(limit, root, lambda: _require_unfinished(root))
            allow = *self.base.allowed, *self.allow
            contents = contents_of(state, found.content, allow, copies_common=True)
            return Prepared(place_of(root), contents, found.digest)

        def compare(started: Started) -> None:
            if len(set(started.notes)) > 1:
                warn_of_differences(comm, compared[0], started.notes)

        with allowing(self.allow):
            base = self.base.with_options(timeout_s=self.options.timeout_s)
            request: LocalSaveRequest | None = base.save_packs(
                comm, prepare, is_async=self.is_async, marker=MARKER_CONTENT, look_at=compare
            )
        return request

    def open(self) -> ShardedSave | None:
        """This rank's save; None where another package's strategy saves. Rank-local."""
        if self.invalid is not None:
            raise self.invalid
        base = self.base  # a wrapper of Megatron-Core 0.17 and later says torch_dist by default
        is_ours = isinstance(base, ZarrSaveShardedStrategy)
        self.root = located(self.checkpoint_dir, self.options)
        if not is_ours or base.version != 2 or self.async_strategy is not None:  # noqa: PLR2004
            self._require_suitable(is_ours=is_ours)
        saver = resolve(StrategyAction.SAVE_COMMON, self.common_strategy, ("torch", 1))
        self.common_saver = saver
        # What factories and callers do takes no storage's time, here and below.
        self.state, common = uncounted()(split_for_save)(self.state, self.content_metadata)
        self.common = self._common_state(common)
        self.marker = CheckpointMarker(
            base.backend, base.version, saver.backend, saver.version
        ).to_json()
        if self.comm.rank == 0:
            complete_commit(self.root)
            if not self.overwrite:
                _require_unfinished(self.root)
        if base is not self.sharded or not is_ours:
            require_readable(sharded_values(self.state))
            return None
        return self._begun(base, validates=self.validates)

    def _begun(self, base: Any, *, validates: bool) -> ShardedSave:
        begun: ShardedSave = base.open_save(
            self.comm,
            self.state,
            self.root,
            overwrite=self.overwrite,
            is_async=self.is_async,
            validates=validates,
            common=self.common,
            marker=self.marker,
        )
        return begun

    def _require_suitable(self, *, is_ours: bool) -> None:
        """Raise where the strategy cannot do what is asked for; only ("zarr", 2) can do it all."""
        stored = (self.base.backend, self.base.version)
        require_psutil(*stored)
        if self.async_strategy not in {None, "nvrx", "mcore"}:
            found = self.async_strategy
            raise StrategyError(f"async_strategy: expected one of 'nvrx', 'mcore', found {found!r}")
        if self.verify and stored != ("zarr", 2):
            raise StrategyError(
                "verify_integrity: only format ('zarr', 2) has digests; save that, or do without "
                f"verify_integrity, in Megatron-LM --verify-integrity, with {stored}"
            )
        if self.is_async and not is_ours:
            raise StrategyError(
                f"{self.sharded}: this package saves in the background with ('zarr', 1) and "
                "('zarr', 2) only; call dist_checkpointing.save for the strategy's own way"
            )
        if stored != ("zarr", 2):
            require_path(self.root, f"format {stored}")

    def _common_state(self, state: StateDict) -> CommonState:
        """The common state, ready to be written; one that a load would refuse is an error."""
        saver, allow, is_first = self.common_saver, self.allow, self.comm.rank == 0
        compared = None
        if self.validates:
            compared = uncounted()(self.preprocess)(state) if self.preprocess else state
        is_ours = isinstance(saver, TorchCommonSaveStrategy)
        content: bytes | None = None
        if is_ours and is_first:
            content = dump_loadable(state, name=COMMON_STATE, allow=saver.allowed)
        digest = ""  # where two differ, the states may still be equal
        if compared is not None:
            known = content if compared is state else None
            digest = xxh3_64_hexdigest(known or dump_object(compared, name=COMMON_STATE))
        if is_ours:
            return CommonState(compared, digest, content, None)
        if is_first and saver.backend == TORCH_BACKEND:
            dump_loadable(state, name=COMMON_STATE, allow=allow)
        elif is_first:
            dump_object(state, name=COMMON_STATE)
        kept = deepcopy(state) if self.is_async else state

        def write(place: Location) -> None:
            with allowing(allow), uncounted():
                saver.save_common(kept, place)

        return CommonState(compared, digest, None, write)

    def run_otherwise(self) -> ShardedSave | None:
        """Save by a strategy of another package, or open a save within a wrapper. Collective."""
        comm, saver, base, state = self.comm, self.sharded, self.base, self.state
        if self.common is not None and self.common.compared is not None:
            check_save(comm, state, self.common.compared)
        if isinstance(base, ZarrSaveShardedStrategy):
            run_collectively(comm, lambda: saver.apply_saving_parallelization(state))
            own = base.with_options(timeout_s=self.options.timeout_s)
            return begun_save(comm, lambda: self._begun(own, validates=False))
        root = require_path(self.root, type(saver).__name__)
        place = DirectoryPlace(root, self.options, keeps_old=True, overwrite=self.overwrite)

        def new_save_id() -> str:
            RUNNING_SAVES.wait(root, self.options)
            return place.new_save_id()

        place.save_id = run_and_gather(comm, new_save_id)[0]
        run_on_first_rank(comm, lambda: place.begin(None))

        def commit() -> None:
            place.commit(self.marker)

        if isinstance(base, LocalReplicatedSaveShardedStrategy):
            run_collectively(comm, lambda: self._write_common(place.location))
            run_collectively(
                comm, lambda: base.save(state, root, common_dir=place.location, commit=commit)
            )
            return None
        # The strategy of another package takes the staging directory for the checkpoint.
        run_collectively(comm, lambda: place.require(f"rank {comm.global_ranks[0]}"))
        if not handles_objects(saver):
            objects, state = run_collectively(comm, lambda: split_objects(state))
            run_collectively(comm, lambda: self._write_objects(objects, place.location))
        # Its time is its own; this package waits no longer than its limit for its own files.
        run_collectively(comm, uncounted()(lambda: saver.save(state, place.location)))
        run_collectively(comm, lambda: self._write_common(place.location))
        run_on_first_rank(comm, commit)
        return None

    def _write_common(self, place: Path) -> None:
        assert self.common is not None  # noqa: S101 - ``open`` has set it
        if self.common.save is not None:
            self.common.save(place)
        elif self.common.content is not None:
            Directory(place).write(COMMON_NAME, self.common.content)

    def _write_objects(self, objects: StateDict, place: Location) -> None:
        if not handles_objects(self.common_saver):
            raise StrategyError(
                f"the state dict has ShardedObjects, which neither {self.sharded} nor "
                f"{self.common_saver} can handle; choose a strategy that does"
            )
        self.common_saver.save_sharded_objects(objects, place)


def _require_unfinished(root: Location) -> None:
    if is_finished(root):
        raise CheckpointExistsError(
            f"{root} already holds a finished checkpoint; pass overwrite=True to replace it",
            path=str(root),
        )
