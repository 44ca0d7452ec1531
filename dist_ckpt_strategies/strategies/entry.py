"""``save``, ``save_async`` and ``load`` with Megatron-Core's signatures and further promises.

Every rank raises where one fails. A finished checkpoint is not overwritten by accident. The marker
appears whole, after everything else is durable. torch_dist never takes the place of a strategy.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import astuple, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from xxhash import xxh3_64_hexdigest

from dist_ckpt_strategies.comm.base import (
    Communicator,
    Message,
    run_and_gather,
    run_collectively,
    run_on_first_rank,
)
from dist_ckpt_strategies.comm.process_group import ProcessGroup, group_ranks, is_distributed
from dist_ckpt_strategies.comm.torch_communicator import open_communicator
from dist_ckpt_strategies.config import (
    Options,
    Verify,
    options_from_environment,
    rank_from_environment,
)
from dist_ckpt_strategies.core.array import COMMON_OBJECT
from dist_ckpt_strategies.errors import (
    CheckpointChangedError,
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    IncompleteCheckpointError,
    PeerLostError,
    PeerTimeoutError,
    StrategyError,
)
from dist_ckpt_strategies.formats.checkpoints import common_digest
from dist_ckpt_strategies.formats.commit import DirectoryPlace, complete_commit
from dist_ckpt_strategies.formats.locations import (
    PACKS,
    CheckpointMarker,
    Location,
    OpenedSave,
    current_place,
    is_finished,
    located,
    read_marker,
    require_path,
)
from dist_ckpt_strategies.formats.objects import Allowed, allowing, dump_loadable, dump_object
from dist_ckpt_strategies.formats.pack_checkpoint import place_of
from dist_ckpt_strategies.formats.pack_commit import MARKER_CONTENT
from dist_ckpt_strategies.megatron.shards import (
    StateDict,
    merged,
    parsed_strict,
    require_readable,
    sharded_values,
    split_for_load,
    split_for_save,
    split_objects,
)
from dist_ckpt_strategies.megatron.types import (
    ShardedTensor,
    StrategyAction,
    StrictHandling,
    handles_objects,
    raises_megatron_errors,
    require_psutil,
    require_reads,
)
from dist_ckpt_strategies.sharded.async_request import LocalSaveRequest
from dist_ckpt_strategies.sharded.async_save import begin_in_background
from dist_ckpt_strategies.sharded.checks import (
    check_load,
    check_save,
    different_strategies,
    require_same_checkpoint,
    warn_of_differences,
)
from dist_ckpt_strategies.sharded.load import ShardedLoad, conversions, require_fillable
from dist_ckpt_strategies.sharded.pack_save import Prepared, Started
from dist_ckpt_strategies.sharded.save import RUNNING_SAVES, CommonState, ShardedSave, begun_save
from dist_ckpt_strategies.storage.bucket import Bucket
from dist_ckpt_strategies.storage.files import COMMON_NAME, MARKER_NAME, Directory
from dist_ckpt_strategies.storage.io_pool import (
    OPENING,
    WORK,
    Deadline,
    restart_limit,
    run_within,
    time_limit,
    uncounted,
)
from dist_ckpt_strategies.strategies.common import BACKEND as TORCH_BACKEND
from dist_ckpt_strategies.strategies.common import COMMON_STATE, OPENED, TorchCommonSaveStrategy
from dist_ckpt_strategies.strategies.local_replicated import (
    LocalReplicatedLoadShardedStrategy,
    LocalReplicatedSaveShardedStrategy,
    restore_common,
)
from dist_ckpt_strategies.strategies.registry import Configured, StrategyChoice, resolve
from dist_ckpt_strategies.strategies.safetensors import PackSaveShardedStrategy, contents_of
from dist_ckpt_strategies.strategies.zarr import ZarrLoadShardedStrategy, ZarrSaveShardedStrategy

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
        *_opened(action, sharded_strategy, detail, timeout_s, allow),
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
        verify: what is compared with the digests of ("zarr", 2): ``"read"``, ``"full"`` or
            ``"off"``; by default what the strategy or the environment says, ``"read"``.
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
    opened = _opened(action, sharded_strategy, detail, timeout_s, allow, process_group)
    for _ in range(_ATTEMPTS):
        call = _Load(
            *opened,
            sharded_state_dict,
            checkpoint_dir,
            sharded_strategy,
            common_strategy,
            validate_access_integrity,
            strict,
            Verify.READ if verify_integrity else verify,
            strict_dtype,
            timeout_s,
            process_group,
        )
        try:
            return call.load(allow)
        except (PeerTimeoutError, PeerLostError):
            raise  # ranks are out of step: there is no collective any more
        except CheckpointError as error:
            failure = error
        if not call.has_changed(failure):
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
        require_reads(_inner(found), *stored)
    except StrategyError as error:
        path = f"{root}/{MARKER_NAME}"
        raise type(error)(f"{path}: {error.message}", path=path) from error
    return found


_LOCAL, _OTHER = "local", "other"
"""What a rank answers whose load does not go straight to a strategy of this package.

Unless a strategy of this package compares it, the digest of the common state follows a colon.
"""


def _seen(address: str | Path, options: Options) -> str | None:
    """The identity of the packs at a place; None where there are none."""
    root = located(address, options)
    if isinstance(root, Path) and root.is_dir():
        list(root.iterdir())  # an NFS client then asks its server
    save = OpenedSave(root)
    return save.identity if save.has_packs else None


@dataclass(slots=True)
class _Load:
    """A load: what ``_opened`` returns, the arguments of ``load``, and what ``describe`` sets.

    ``direct`` is set where a strategy of this package loads with the ranks and limit of this call;
    ``finish`` makes what ``load`` returns of what the strategies have loaded.
    """

    comm: Communicator
    options: Options
    chosen: Any
    base: Any
    invalid: Exception | None
    state: StateDict
    checkpoint_dir: str | Path
    sharded_strategy: StrategyChoice
    common_strategy: StrategyChoice
    validates: bool
    strict: str | StrictHandling
    verify: str | None
    strict_dtype: bool
    timeout_s: float | None
    process_group: ProcessGroup | None
    root: Location = Path()
    save: OpenedSave = field(init=False)
    sharded: Any = None
    common_loader: Any = None
    wanted: StateDict = field(default_factory=dict)
    strictness: StrictHandling = StrictHandling.ASSUME_OK_UNEXPECTED
    finish: Callable[..., StateDict] = merged
    direct: ShardedLoad | None = None

    def load(self, allow: Allowed) -> StateDict | tuple[StateDict, set[str], set[str]]:
        """What ``load`` returns. Collective; every rank raises where one fails."""
        comm = self.comm
        with (
            time_limit(self.options.timeout_s, OPENING, then=WORK),
            allowing(() if self.invalid else allow),
        ):
            answers = run_and_gather(comm, self.describe)
            restart_limit()
            local = {a for a in answers if isinstance(a, str) and a.startswith(_LOCAL)}
            if None in answers or len(local) > 1:
                if local:  # have every node hold the common state
                    place = self.checkpoint_dir
                    root = run_collectively(
                        comm, lambda: require_path(located(place, None), "local_replicated")
                    )
                    restore_common(comm, root, str(place))
                answers = run_and_gather(comm, lambda: self.describe(is_last=True))
            if self.direct is None or any(isinstance(answer, str) for answer in answers):
                return self.run_otherwise(answers)
            self.direct.begin(answers)
            result: StateDict = self.direct.run(self.finish)
            OPENED.set(None)
            return result

    def has_changed(self, failure: CheckpointError) -> bool:
        """Whether another save has replaced packs since, which explains a failure. Collective.

        Ranks may have failed for different reasons. Returns as soon as all of them see the same
        save, which a network file system may take a while for.
        """
        comm, options = self.comm, self.options
        is_explained = isinstance(failure, CheckpointChangedError | IncompleteCheckpointError)
        if not any(run_and_gather(comm, lambda: is_explained)):
            return False
        before = getattr(self, "save", None)
        deadline = Deadline.after(min(_VIEW_S, options.timeout_s / 2))
        OPENED.set(None)

        def look() -> Message:
            limit = Deadline.after(OPENING * options.timeout_s)
            found = run_within(
                limit, self.checkpoint_dir, lambda: _seen(self.checkpoint_dir, options)
            )
            return [found, before.identity if before and before.has_packs else None]

        while True:
            answers = run_and_gather(comm, look)
            now, was = zip(*answers, strict=True)
            is_over = any(run_and_gather(comm, lambda: deadline.left_s == 0))
            if None in now or None in was or is_over:
                return False
            if len(set(now)) == 1:
                return set(now) != set(was)
            time.sleep(_PAUSE_S)

    def describe(self, *, is_last: bool = False) -> Message:
        """What other ranks have to know at first. Rank-local; errors as of ``load``.

        None: the checkpoint was not found here, so the others have to look again. A strategy with
        other ranks or another limit than this call is called as it is.
        """
        if self.invalid is not None:
            raise self.invalid
        place = located(self.checkpoint_dir, self.options)
        try:
            self.root = root = current_place(place) if isinstance(place, Bucket) else place
            self.save = OpenedSave(root)
            OPENED.set(self.save)
            formats = astuple(read_marker(root))
            choice = self.sharded_strategy and self.chosen
            action = StrategyAction.LOAD_SHARDED
            ours = _fitting(root, action, choice, formats[:2], self.timeout_s, self.process_group)
            if self.process_group is not None:
                _require_group(ours, self.comm)
            action = StrategyAction.LOAD_COMMON
            self.common_loader = _fitting(root, action, self.common_strategy, formats[2:])
            result: StateDict = self.common_loader.load_common(root)
        except (CheckpointNotFoundError, IncompleteCheckpointError):
            if is_last or not isinstance(place, Path):
                raise
            if self.comm.rank == 0:
                complete_commit(place)
            return None  # that may have completed an interrupted one, or another node has it
        self.wanted, nonpersistent, factories = uncounted()(split_for_load)(self.state)
        if self.verify is not None or self.strict_dtype:
            ours = self._with_options(ours, formats[:2])
        self.sharded, self.strictness = ours, parsed_strict(self.strict)
        self.finish = uncounted()(
            partial(merged, merged(result, nonpersistent), factories=factories)
        )
        limits = (getattr(self.base, "group", None), self.options.timeout_s)
        if (
            isinstance(ours, ZarrLoadShardedStrategy)
            and type(ours).load is ZarrLoadShardedStrategy.load
            and (ours.group, ours.options.timeout_s) == limits
            and not StrictHandling.requires_explicit_ckpt_mismatch_check(self.strictness)
            and not StrictHandling.requires_global_app_metadata(self.strictness)
        ):
            self.direct = ours.open_load(
                self.comm, self.wanted, root, name=self.checkpoint_dir, validates=self.validates
            )
            return self.direct.describe()
        return self._describe_otherwise(root)

    def _describe_otherwise(self, root: Location) -> str:
        require_fillable(sharded_values(self.wanted))
        base = _inner(self.sharded)
        if isinstance(base, ZarrLoadShardedStrategy):
            return _OTHER
        root = require_path(root, type(base).__name__)
        is_local = isinstance(self.sharded, LocalReplicatedLoadShardedStrategy)
        return f"{_LOCAL if is_local else _OTHER}:{common_digest(root)}"

    def _with_options(self, loader: Any, format_: tuple[str, int]) -> Any:
        """The load strategy with the caller's options. Rank-local.

        For a strategy without the option ``strict_dtype`` the stored dtypes are compared here.
        """
        verify, is_strict = self.verify, self.strict_dtype
        has_digests = format_ in {("zarr", 2), PACKS.sharded_format}
        if verify is not None and not (has_digests and hasattr(loader, "versions")):
            raise StrategyError(
                f"verify={verify!r}: digests are kept by formats ('zarr', 2) and "
                f"{PACKS.sharded_format}, which {type(loader).__name__} does not read itself, "
                f"found {format_}; set verify on the strategy that does, or in its options"
            )
        if hasattr(loader, "with_options"):
            return loader.with_options(verify=verify, strict_dtype=is_strict or None)
        if is_strict:
            arrays = loader.load_tensors_metadata(self.root).values()
            stored = {array.key: str(array.dtype).removeprefix("torch.") for array in arrays}
            values = sharded_values(self.wanted)
            tensors = [value for value in values if isinstance(value, ShardedTensor)]
            conversions(tensors, stored, is_strict=True)
        return loader

    def run_otherwise(
        self, answers: Sequence[Message]
    ) -> StateDict | tuple[StateDict, set[str], set[str]]:
        """Load where not every rank has a ``direct`` load; what ``load`` returns. Collective.

        Raises:
            PlanError: ranks load by strategies of different kinds.
            StorageError: the common state that they have read differs.
        """
        comm, strict = self.comm, self.strictness
        kinds = [a.partition(":")[0] if isinstance(a, str) else "zarr" for a in answers]
        if len(set(kinds)) > 1:
            raise different_strategies(comm, "a load", kinds)
        digests = [a.partition(":")[2] for a in answers if isinstance(a, str)]
        require_same_checkpoint(comm, self.checkpoint_dir, digests)
        outcome = check_load(comm, self.wanted, strict, self._stored_keys, self.validates)
        load = uncounted()(self._load_otherwise)  # its time is its own, as in a save
        read = lambda: self.finish(*load(outcome.sharded))  # noqa: E731
        result = run_collectively(comm, lambda: self.save.read(read))
        OPENED.set(None)
        if StrictHandling.requires_returning_mismatch_keys(strict):
            return result, outcome.missing, outcome.unexpected
        return result

    def _stored_keys(self) -> StateDict:
        """What is stored, but for the object that is the common state, which no caller requests."""
        found: StateDict = self.sharded.load_sharded_metadata(self.root)
        if not handles_objects(self.sharded):
            found = merged(found, self.common_loader.load_sharded_metadata(self.root))
        if all(value.key != COMMON_OBJECT.key for value in sharded_values(self.wanted)):
            found.pop(COMMON_OBJECT.unique_key, None)
        return found

    def _load_otherwise(self, state: StateDict) -> tuple[StateDict, ...]:
        """What the strategies load: objects apart, where the sharded one does not take them.

        Collective. The caller runs it within an error check.
        """
        comm, sharded, root = self.comm, self.sharded, self.root
        if handles_objects(sharded):
            return (sharded.load(state, root),)
        objects, tensors = run_collectively(comm, lambda: split_objects(state))
        loaded = run_collectively(
            comm, lambda: self.common_loader.load_sharded_objects(objects, root)
        )
        return loaded, sharded.load(tensors, root)


def _inner(strategy: Any) -> Any:
    """The strategy inside of a wrapper; one that is in none itself."""
    return _inner(strategy.base_strategy) if hasattr(strategy, "base_strategy") else strategy


def _require_group(strategy: Any, comm: Communicator) -> None:
    own = group_ranks(getattr(_inner(strategy), "group", None))
    if own != tuple(sorted(comm.global_ranks)):
        raise StrategyError(
            f"process_group: its {comm.size} ranks are not the {len(own)} that the strategy loads "
            "with; pass a strategy made with group=process_group"
        )


def _require_process_group() -> None:
    size = 1
    with suppress(StrategyError):  # it is not set as torchrun sets it
        size = 1 if is_distributed() else rank_from_environment()[1]
    if size > 1:
        raise StrategyError(
            f"torch.distributed is not initialised, but WORLD_SIZE says that there are {size} "
            "ranks: each would save alone; call torch.distributed.init_process_group first"
        )


def _opened(
    action: StrategyAction,
    choice: StrategyChoice,
    detail: str,
    timeout_s: float | None,
    allow: Allowed,
    process_group: ProcessGroup | None = None,
) -> tuple[Communicator, Options, Any, Any, Exception | None]:
    """The ranks and options of a call, its strategy, and that inside of wrappers. Rank-local.

    Ranks and options are those of the strategy, where it is one of this package. An error is
    returned too, for the first collective to raise.
    """
    options, group, found, base, invalid = None, None, None, None, None
    purpose = action.value.partition("_")[0]
    try:
        if purpose == "save":
            _require_process_group()
        options = options_from_environment()  # reported if invalid, whatever the strategy's are
        with allowing(allow):
            found = resolve(action, choice, ("zarr", 2), timeout_s, process_group)
        base = _inner(found) if hasattr(found, "base_strategy") else found
        if isinstance(base, Configured):
            options, group = base.options, base.group
        if timeout_s is not None:
            options = options.with_changes(timeout_s=timeout_s)
        group = process_group or group
    except Exception as error:  # noqa: BLE001 - raised in the first collective
        invalid = error
    options = options or Options()
    comm = open_communicator(group, timeout_s=options.timeout_s, purpose=purpose, detail=detail)
    return comm, options, found, base, invalid
