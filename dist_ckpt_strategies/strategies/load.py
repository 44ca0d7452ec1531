"""``load`` with Megatron-Core's signature; every rank raises where one fails."""

import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

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
    Location,
    OpenedSave,
    located,
    read_marker,
    require_path,
)
from dist_ckpt_strategies.formats.objects import Allowed, allowing
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
from dist_ckpt_strategies.sharded.checks import (
    check_load,
    different_strategies,
    require_same_checkpoint,
)
from dist_ckpt_strategies.sharded.load import ShardedLoad, conversions, require_fillable
from dist_ckpt_strategies.storage.files import MARKER_NAME
from dist_ckpt_strategies.storage.io_pool import (
    OPENING,
    WORK,
    Deadline,
    restart_limit,
    run_within,
    time_limit,
    uncounted,
)
from dist_ckpt_strategies.strategies.call import inner_strategy, opened_call
from dist_ckpt_strategies.strategies.common import OPENED
from dist_ckpt_strategies.strategies.local_replicated import (
    LocalReplicatedLoadShardedStrategy,
    restore_common,
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
    opened = opened_call(action, sharded_strategy, detail, timeout_s, allow, process_group)
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
        require_reads(inner_strategy(found), *stored)
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
            self.root = root = place
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
            return None  # another node may have it
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
        base = inner_strategy(self.sharded)
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


def _require_group(strategy: Any, comm: Communicator) -> None:
    own = group_ranks(getattr(inner_strategy(strategy), "group", None))
    if own != tuple(sorted(comm.global_ranks)):
        raise StrategyError(
            f"process_group: its {comm.size} ranks are not the {len(own)} that the strategy loads "
            "with; pass a strategy made with group=process_group"
        )
