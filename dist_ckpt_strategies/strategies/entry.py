"""``save``, ``save_async`` and ``load`` with Megatron-Core's signatures and further promises.

Every rank raises where one fails. A finished checkpoint is not overwritten by accident. The marker
appears whole, after everything else is durable. torch_dist never takes the place of a strategy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xxhash import xxh3_64_hexdigest

from dist_ckpt_strategies.comm.base import Communicator, Message
from dist_ckpt_strategies.comm.collective import run_and_gather, run_collectively, run_on_first_rank
from dist_ckpt_strategies.comm.torch_communicator import open_communicator
from dist_ckpt_strategies.config import Options, options_from_environment
from dist_ckpt_strategies.core.array import COMMON_OBJECT
from dist_ckpt_strategies.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    IncompleteCheckpointError,
    StrategyError,
)
from dist_ckpt_strategies.formats.commit import DirectoryPlace, complete_commit
from dist_ckpt_strategies.formats.locations import (
    CheckpointMarker,
    Location,
    content_of,
    is_finished,
    located,
    read_marker,
    require_path,
)
from dist_ckpt_strategies.formats.objects import Allowed, allowing, dump_loadable, dump_object
from dist_ckpt_strategies.megatron.shards import (
    StateDict,
    merge_factories,
    merged,
    parsed_strict,
    sharded_values,
    split_for_load,
    split_for_save,
    split_objects,
)
from dist_ckpt_strategies.megatron.types import (
    ShardedTensor,
    StrategyAction,
    StrictHandling,
    raises_megatron_errors,
)
from dist_ckpt_strategies.sharded.async_request import LocalSaveRequest
from dist_ckpt_strategies.sharded.async_save import begin_in_background
from dist_ckpt_strategies.sharded.checks import (
    check_load,
    check_save,
    different_strategies,
)
from dist_ckpt_strategies.sharded.load import ShardedLoad, conversions
from dist_ckpt_strategies.sharded.save import RUNNING_SAVES, CommonState, ShardedSave, begun_save
from dist_ckpt_strategies.storage.files import COMMON_NAME, MARKER_NAME
from dist_ckpt_strategies.storage.io_pool import OPENING, WORK, restart_limit, time_limit, uncounted
from dist_ckpt_strategies.storage.store import Directory
from dist_ckpt_strategies.strategies.common import BACKEND as TORCH_BACKEND
from dist_ckpt_strategies.strategies.common import COMMON_STATE, TorchCommonSaveStrategy
from dist_ckpt_strategies.strategies.local_replicated import (
    LocalReplicatedLoadShardedStrategy,
    LocalReplicatedSaveShardedStrategy,
    common_digest,
    restore_common,
)
from dist_ckpt_strategies.strategies.registry import StrategyChoice, resolve
from dist_ckpt_strategies.strategies.zarr import ZarrLoadShardedStrategy, ZarrSaveShardedStrategy

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
    comm, options, invalid = _open_world("save", f"to {checkpoint_dir}", timeout_s, allow)
    saves: list[_Save] = []

    def open_save() -> ShardedSave | None:
        if invalid:
            raise invalid
        saver = resolve(StrategyAction.SAVE_SHARDED, sharded_strategy, ("zarr", 2), timeout_s)
        common_saver = resolve(StrategyAction.SAVE_COMMON, common_strategy, ("torch", 1))
        root = _location_for(saver, checkpoint_dir, options)
        state, common_state = split_for_save(sharded_state_dict, content_metadata)
        compared: StateDict | None = None
        if validate_access_integrity:
            preprocess = preprocess_common_before_consistancy_check
            compared = preprocess(common_state) if preprocess else common_state
        common = _common_state(
            common_state,
            common_saver,
            compared,
            allow,
            is_first=comm.rank == 0,
            is_async=async_sharded_save,
        )
        is_wrapper = hasattr(saver, "apply_saving_parallelization")
        base = saver.base_strategy if is_wrapper else saver
        marker = CheckpointMarker(
            saver.backend, saver.version, common_saver.backend, common_saver.version
        ).to_json()
        saves[:] = [
            _Save(comm, root, options, saver, base, common_saver, state, common, marker, overwrite)
        ]
        return saves[0].open(is_async=async_sharded_save, validates=validate_access_integrity)

    with time_limit(options.timeout_s, OPENING, then=WORK), allowing(() if invalid else allow):
        begun = begun_save(comm, open_save)
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

    Arguments are those of ``save``; the strategy has to be one of ("zarr", 1) or ("zarr", 2).

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
        and nothing is visible. Where storage stopped answering in the commit's last renames, the
        next load completes the commit: all of the save had been written by then.

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
    is_ours = isinstance(saver, TorchCommonSaveStrategy)
    content: bytes | None = None
    if is_ours and is_first:
        content = dump_loadable(state, name=COMMON_STATE, allow=saver.allowed())
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
    kept = deepcopy(state) if is_async else state

    def write(place: Location) -> None:
        with allowing(allow):
            saver.save_common(kept, place)

    return CommonState(compared, digest, None, write)


@dataclass(frozen=True, slots=True)
class _Save:
    """A save of which nothing is written yet; ``comm`` is all ranks.

    ``base`` is the strategy inside of Megatron-Core's FullyParallelSaveStrategyWrapper, or
    ``sharded`` itself.
    """

    comm: Communicator
    root: Location
    options: Options
    sharded: Any
    base: Any
    common_saver: Any
    state: StateDict
    common: CommonState
    marker: bytes
    overwrite: bool

    def open(self, *, is_async: bool, validates: bool) -> ShardedSave | None:
        """This rank's save, with the ranks and the time limit of this call. Rank-local.

        None where another package's strategy saves, or one with other ranks.
        """
        base, root = self.base, self.root
        _require_taken(root, base)
        is_ours = isinstance(base, ZarrSaveShardedStrategy)
        if is_async and not is_ours:
            raise StrategyError(
                f"{self.sharded}: this package saves in the background with ('zarr', 1) and "
                "('zarr', 2) only; call dist_checkpointing.save for the strategy's own way"
            )
        if self.comm.rank == 0:
            complete_commit(root)
            if not self.overwrite and is_finished(root):
                raise CheckpointExistsError(
                    f"{root} already holds a finished checkpoint; pass overwrite=True to replace "
                    "it",
                    path=str(root),
                )
        if not (is_ours and base is self.sharded and base.runs_in_world(self.options)):
            return None
        if is_async:
            base.cache.get_ready(base.options)
        opened: ShardedSave = base.open_save(
            self.comm,
            self.state,
            root,
            overwrite=self.overwrite,
            validates=validates,
            common=self.common,
            marker=self.marker,
        )
        return opened

    def run_otherwise(self, *, is_async: bool) -> LocalSaveRequest | None:
        """Save by a strategy of another package, or with other ranks. Collective."""
        comm, base, state = self.comm, self.base, self.state
        if self.common.compared is not None:
            check_save(comm, state, self.common.compared)
        if isinstance(base, ZarrSaveShardedStrategy):
            return run_collectively(comm, lambda: self._by_base(base, is_async=is_async))
        root = require_path(self.root, type(self.sharded).__name__)
        place = DirectoryPlace(root, self.options, keeps_old=True, overwrite=self.overwrite)

        def new_save_id() -> str:
            with uncounted():
                RUNNING_SAVES.wait(root, WORK * self.options.timeout_s)
            return place.new_save_id()

        place.save_id = run_and_gather(comm, new_save_id)[0]
        run_on_first_rank(comm, lambda: place.begin(None))

        def commit() -> None:
            place.commit(self.marker)

        if isinstance(base, LocalReplicatedSaveShardedStrategy):
            run_collectively(comm, lambda: self._write_common(place))
            run_collectively(
                comm, lambda: base.save(state, root, common_dir=place.location, commit=commit)
            )
        else:
            self._by_foreign(place)
            run_on_first_rank(comm, commit)
        return None

    def _by_base(self, base: ZarrSaveShardedStrategy, *, is_async: bool) -> LocalSaveRequest | None:
        if base is not self.sharded:
            self.sharded.apply_saving_parallelization(self.state)
        return base.run(
            self.state,
            self.root,
            is_async=is_async,
            overwrite=self.overwrite,
            common=self.common,
            marker=self.marker,
        )

    def _by_foreign(self, place: DirectoryPlace) -> None:
        """The strategy of another package takes the staging directory for the checkpoint."""
        comm, sharded, state = self.comm, self.sharded, self.state
        run_collectively(comm, lambda: place.require(f"rank {comm.global_rank(0)}"))
        if not sharded.can_handle_sharded_objects:
            objects, state = run_collectively(comm, lambda: split_objects(state))
            run_collectively(comm, lambda: self._write_objects(objects, place.location))
        run_collectively(comm, lambda: sharded.save(state, place.location))
        run_collectively(comm, lambda: self._write_common(place))

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
        allow: further classes that objects of this checkpoint may be unpickled to.
        timeout_s: longest wait for a peer in the steps around the strategies, and within those of
            this package that are not given as instances.
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
        StrategyError: there is no such strategy, or one that ``verify`` means nothing to.
        PeerError: another rank failed; it is of the class of that rank's error too.
    """
    comm, options, invalid = _open_world("load", f"from {checkpoint_dir}", timeout_s, allow)
    loads: list[_Load] = []

    def describe(*, is_last: bool = False) -> Message:
        if invalid:
            raise invalid
        place = _location_for(sharded_strategy, checkpoint_dir, options)
        try:
            if comm.rank == 0:
                complete_commit(place)
            root = content_of(place)
            marker = read_marker(root)
            loader = _loader(
                root,
                StrategyAction.LOAD_SHARDED,
                sharded_strategy,
                (marker.sharded_backend, marker.sharded_backend_version),
                timeout_s,
            )
            commons = _loader(
                root,
                StrategyAction.LOAD_COMMON,
                common_strategy,
                (marker.common_backend, marker.common_backend_version),
                None,
            )
            result: StateDict = commons.load_common(root)
        except (CheckpointNotFoundError, IncompleteCheckpointError):
            if is_last or not isinstance(place, Path):
                raise
            return None  # the first rank may have completed a commit, or another node has it
        state, nonpersistent, factories = split_for_load(sharded_state_dict)
        loader = _with_options(loader, root, state, verify, strict_dtype=strict_dtype)
        merged(result, nonpersistent)
        strictness = parsed_strict(strict)
        loads[:] = [_Load(comm, root, loader, commons, state, factories, result, strictness)]
        return loads[0].describe(options, checkpoint_dir, validates=validate_access_integrity)

    with time_limit(options.timeout_s, OPENING, then=WORK), allowing(() if invalid else allow):
        answers = run_and_gather(comm, describe)
        restart_limit()
        if None in answers or len(set(filter(_is_local, answers))) > 1:
            _restore_local(comm, answers, checkpoint_dir)
            answers = run_and_gather(comm, lambda: describe(is_last=True))
        return loads[0].run(answers, validates=validate_access_integrity)


def _restore_local(
    comm: Communicator, answers: Sequence[Message], checkpoint_dir: str | Path
) -> None:
    """Where a checkpoint is local, have every node hold its common state. Collective."""
    if any(map(_is_local, answers)):
        directory = run_collectively(
            comm, lambda: require_path(located(checkpoint_dir, None), "local_replicated")
        )
        restore_common(comm, directory, str(checkpoint_dir))


def _loader(
    root: Location,
    action: StrategyAction,
    choice: StrategyChoice,
    stored: tuple[str, int],
    timeout_s: float | None,
) -> Any:
    """The strategy that loads: the caller's, which has to read what is stored, or the marker's.

    Errors about the stored formats name ``metadata.json``.
    """
    found = choice and resolve(action, choice, stored, timeout_s)
    try:
        if not found:
            return resolve(action, None, stored, timeout_s)
        found.check_backend_compatibility(stored[0])
        found.check_version_compatibility(stored[1])
    except StrategyError as error:
        path = f"{root}/{MARKER_NAME}"
        raise type(error)(f"{path}: {error.message}", path=path) from error
    return found


def _with_options(
    loader: Any, root: Location, wanted: StateDict, verify: str | None, *, strict_dtype: bool
) -> Any:
    """The load strategy with the caller's options. Rank-local.

    For a strategy without the option ``strict_dtype`` the stored dtypes are compared here.
    """
    if verify is not None and not getattr(loader, "has_digests", False):
        raise StrategyError(
            f"verify={verify!r}: digests are kept by format ('zarr', 2), which "
            f"{type(loader).__name__} does not read itself; set verify on the strategy that does, "
            "or in its options"
        )
    if verify is None and not strict_dtype:
        return loader
    if hasattr(loader, "with_options"):
        return loader.with_options(verify=verify, strict_dtype=strict_dtype or None)
    if strict_dtype:
        arrays = loader.load_tensors_metadata(root).values()
        stored = {array.key: str(array.dtype).removeprefix("torch.") for array in arrays}
        tensors = [value for value in sharded_values(wanted) if isinstance(value, ShardedTensor)]
        conversions(tensors, stored, is_strict=True)
    return loader


_LOCAL, _OTHER = "local", "other"
"""What a rank answers whose load does not go straight to a strategy of this package.

Where the checkpoint is local, the digest of its common state follows a colon.
"""


def _is_local(answer: Message) -> bool:
    return isinstance(answer, str) and answer.startswith(_LOCAL)


@dataclass(slots=True)
class _Load:
    """A load of which nothing is read yet; ``comm`` is all ranks, ``result`` what it returns.

    ``direct`` is set where a strategy of this package loads with the ranks and limit of this call.
    """

    comm: Communicator
    root: Location
    sharded: Any
    common_loader: Any
    state: StateDict
    factories: StateDict
    result: StateDict
    strictness: StrictHandling
    direct: ShardedLoad | None = None

    def describe(self, options: Options, name: str | Path, *, validates: bool) -> Message:
        """What other ranks have to know at first. Rank-local; errors as of ``load``."""
        ours, strict = self.sharded, self.strictness
        if (
            isinstance(ours, ZarrLoadShardedStrategy)
            and type(ours).load is ZarrLoadShardedStrategy.load
            and ours.runs_in_world(options)
            and not StrictHandling.requires_explicit_ckpt_mismatch_check(strict)
            and not StrictHandling.requires_global_app_metadata(strict)
        ):
            self.direct = ours.open_load(
                self.comm, self.state, self.root, name=name, validates=validates
            )
            return self.direct.describe()
        _require_taken(self.root, ours)
        if isinstance(ours, LocalReplicatedLoadShardedStrategy) and isinstance(self.root, Path):
            return f"{_LOCAL}:{common_digest(self.root)}"
        return _OTHER

    def run(
        self, answers: Sequence[Message], *, validates: bool
    ) -> StateDict | tuple[StateDict, set[str], set[str]]:
        """Load; what ``load`` returns. Collective.

        Args:
            answers: what ``describe`` has returned on every rank.
            validates: whether Megatron-Core's own checks of the sharding are run.

        Raises:
            PlanError: ranks load by strategies of different kinds.
        """
        comm, strict = self.comm, self.strictness
        kinds = [a.partition(":")[0] if isinstance(a, str) else "zarr" for a in answers]
        if len(set(kinds)) > 1:
            raise different_strategies(comm, "a load", kinds)
        if self.direct is not None:
            self.direct.begin(answers)
            result: StateDict = self.direct.run(self._finished)
            return result
        outcome = check_load(comm, self.state, strict, self._stored_keys, validates)
        loaded = self._load_otherwise(outcome.sharded)
        run_collectively(comm, lambda: self._finished(*loaded))
        if StrictHandling.requires_returning_mismatch_keys(strict):
            return self.result, outcome.missing, outcome.unexpected
        return self.result

    def _finished(self, *loaded: StateDict) -> StateDict:
        merge_factories(merged(self.result, *loaded), self.factories)
        return self.result

    def _stored_keys(self) -> StateDict:
        """What is stored, but for the object that is the common state, which no caller requests."""
        found: StateDict = self.sharded.load_sharded_metadata(self.root)
        if not self.sharded.can_handle_sharded_objects:
            found = merged(found, self.common_loader.load_sharded_metadata(self.root))
        if all(value.key != COMMON_OBJECT.key for value in sharded_values(self.state)):
            found.pop(COMMON_OBJECT.unique_key, None)
        return found

    def _load_otherwise(self, state: StateDict) -> tuple[StateDict, ...]:
        """What the strategies load: objects apart, where the sharded one does not take them."""
        comm, sharded, root = self.comm, self.sharded, self.root
        if sharded.can_handle_sharded_objects:
            return (run_collectively(comm, lambda: sharded.load(state, root)),)
        objects, tensors = run_collectively(comm, lambda: split_objects(state))
        loaded = run_collectively(
            comm, lambda: self.common_loader.load_sharded_objects(objects, root)
        )
        return loaded, run_collectively(comm, lambda: sharded.load(tensors, root))


def _open_world(
    purpose: str, detail: str, timeout_s: float | None, allow: Allowed
) -> tuple[Communicator, Options, StrategyError | None]:
    """All ranks; the options of the environment with the caller's time limit, in seconds.

    If they or ``allow`` are invalid, the error, for the first collective to report.
    """
    options, invalid = Options(), None
    try:
        options = options_from_environment().with_changes(timeout_s=timeout_s)
        with allowing(allow):
            pass  # it raises what is not allowable
    except StrategyError as error:
        invalid = error
    timeout_s = options.timeout_s
    comm = open_communicator(None, timeout_s=timeout_s, purpose=purpose, detail=detail)
    return comm, options, invalid


def _location_for(strategy: Any, checkpoint_dir: str | Path, options: Options) -> Location:
    """Where the checkpoint is; requests to an object store use the options of an instance.

    The shorter of its time limit and that of ``options`` counts: peers wait there too.
    """
    inner = getattr(strategy, "base_strategy", strategy)
    chosen = getattr(inner, "options", None) or options
    if chosen.timeout_s > options.timeout_s:
        chosen = chosen.with_changes(timeout_s=options.timeout_s)
    return located(checkpoint_dir, chosen)


def _require_taken(root: Location, strategy: Any) -> None:
    """Raise if the strategy needs a directory, and this is a place in an object store."""
    inner = getattr(strategy, "base_strategy", strategy)
    if not getattr(inner, "takes_urls", False):
        require_path(root, getattr(inner, "format_name", type(inner).__name__))
