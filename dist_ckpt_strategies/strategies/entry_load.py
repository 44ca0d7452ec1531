"""``load`` with Megatron-Core's signature and further promises.

Every rank raises where one fails. torch_dist never takes the place of a strategy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dist_ckpt_strategies.comm.agree import agree, agree_and_gather
from dist_ckpt_strategies.comm.base import Communicator, Message, who_is_where
from dist_ckpt_strategies.config import Options
from dist_ckpt_strategies.core.array import COMMON_OBJECT
from dist_ckpt_strategies.errors import (
    CheckpointNotFoundError,
    IncompleteCheckpointError,
    PlanError,
    StrategyError,
)
from dist_ckpt_strategies.formats.locations import (
    Location,
    complete_commit,
    content_of,
    located,
    read_marker,
    require_path,
)
from dist_ckpt_strategies.formats.objects import Allowed, allowing
from dist_ckpt_strategies.megatron.errors import raises_megatron_errors
from dist_ckpt_strategies.megatron.flow import (
    LoadParts,
    merge_factories,
    merged,
    needs_global_keys,
    needs_stored_keys,
    parsed_strict,
    returns_keys,
    split_for_load,
    split_objects,
)
from dist_ckpt_strategies.megatron.shards import StateDict, sharded_values
from dist_ckpt_strategies.megatron.types import ShardedTensor, StrategyAction, StrictHandling
from dist_ckpt_strategies.sharded.checks import check_load
from dist_ckpt_strategies.sharded.load import ShardedLoad, conversions
from dist_ckpt_strategies.storage.files import MARKER_NAME
from dist_ckpt_strategies.storage.time_limit import OPENING, WORK, restart_limit, time_limit
from dist_ckpt_strategies.strategies.configured import (
    entry_options,
    location_for,
    open_world,
    require_taken,
)
from dist_ckpt_strategies.strategies.local_replicated import (
    LocalReplicatedLoadShardedStrategy,
    restore_common,
)
from dist_ckpt_strategies.strategies.registry import StrategyChoice, resolve
from dist_ckpt_strategies.strategies.zarr import ZarrLoadShardedStrategy


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
    comm, limit_s = open_world("load", f"from {checkpoint_dir}", timeout_s)
    loads: list[_Load] = []

    def open_load() -> _Load:
        options = entry_options(timeout_s)
        place = location_for(sharded_strategy, checkpoint_dir, options)
        if comm.rank == 0:
            complete_commit(place)
        root = content_of(place)
        loader, commons = _loaders(root, sharded_strategy, common_strategy, timeout_s)
        require_taken(root, loader)
        found: StateDict = commons.load_common(root)
        parts = split_for_load(sharded_state_dict)
        loader = _with_options(loader, root, parts.sharded, verify, strict_dtype=strict_dtype)
        state = merged(found, parts.nonpersistent)
        return _Load(comm, root, options, loader, commons, parts, state, parsed_strict(strict))

    def describe(*, is_last: bool = False) -> Message:
        try:
            loads[:] = [open_load()]
        except (CheckpointNotFoundError, IncompleteCheckpointError):
            if is_last or not isinstance(located(checkpoint_dir, None), Path):
                raise
            return None  # the first rank may have completed a commit, or another node has it
        return loads[0].describe(checkpoint_dir, validates=validate_access_integrity)

    with time_limit(limit_s, OPENING, then=WORK), allowing(allow):
        answers = agree_and_gather(comm, describe)
        restart_limit()
        if None in answers:
            if _LOCAL in answers:
                directory = agree(
                    comm, lambda: require_path(located(checkpoint_dir, None), "local_replicated")
                )
                restore_common(comm, directory, str(checkpoint_dir))
            answers = agree_and_gather(comm, lambda: describe(is_last=True))
        return loads[0].run(answers, validates=validate_access_integrity)


def _loaders(
    root: Location, sharded: StrategyChoice, common: StrategyChoice, timeout_s: float | None
) -> tuple[Any, Any]:
    """The strategies that load the sharded and the common state, by default the marker's.

    Errors about the stored formats name ``metadata.json``.
    """
    marker = read_marker(root)

    def loader(
        action: StrategyAction, choice: StrategyChoice, stored: tuple[str, int], limit_s: Any
    ) -> Any:
        found = choice and resolve(action, choice, stored, limit_s)
        try:
            found = found or resolve(action, None, stored, limit_s)
            found.check_backend_compatibility(stored[0])
            found.check_version_compatibility(stored[1])
        except StrategyError as error:
            path = f"{root}/{MARKER_NAME}"
            raise type(error)(f"{path}: {error.message}", path=path) from error
        return found

    of_sharded = (marker.sharded_backend, marker.sharded_backend_version)
    of_common = (marker.common_backend, marker.common_backend_version)
    return (
        loader(StrategyAction.LOAD_SHARDED, sharded, of_sharded, timeout_s),
        loader(StrategyAction.LOAD_COMMON, common, of_common, None),
    )


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
    if hasattr(loader, "with_options"):
        return loader.with_options(verify=verify, strict_dtype=strict_dtype or None)
    if strict_dtype:
        stored = {array.key: array.dtype for array in loader.load_tensors_metadata(root).values()}
        tensors = [value for value in sharded_values(wanted) if isinstance(value, ShardedTensor)]
        conversions(tensors, stored, is_strict=True)
    return loader


_LOCAL, _OTHER = "local", "other"
"""What a rank answers whose load does not go straight to a strategy of this package."""


@dataclass(slots=True)
class _Load:
    """A load of which nothing is read yet; ``comm`` is all ranks, ``state`` what it returns.

    ``direct`` is set where a strategy of this package loads with the ranks and limit of this call.
    """

    comm: Communicator
    root: Location
    options: Options
    sharded: Any
    common_loader: Any
    parts: LoadParts
    state: StateDict
    strictness: StrictHandling
    direct: ShardedLoad | None = None

    def describe(self, name: str | Path, *, validates: bool) -> Message:
        """What other ranks have to know at first. Rank-local; errors as of ``load``."""
        ours, strict = self.sharded, self.strictness
        is_direct = (
            isinstance(ours, ZarrLoadShardedStrategy)
            and type(ours).load is ZarrLoadShardedStrategy.load
            and ours.runs_in_world(self.options)
            and not (needs_stored_keys(strict) or needs_global_keys(strict))
        )
        if is_direct:
            inputs = ours.inputs(self.comm, self.parts.sharded, self.root)
            self.direct = ShardedLoad(self.comm, replace(inputs, name=name, validates=validates))
            return self.direct.describe()
        is_local = isinstance(ours, LocalReplicatedLoadShardedStrategy)
        return _LOCAL if is_local and isinstance(self.root, Path) else _OTHER

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
        kinds = [answer if isinstance(answer, str) else "zarr" for answer in answers]
        if len(set(kinds)) > 1:
            texts = [f"a load by a strategy of kind {kind}" for kind in kinds]
            raise PlanError(f"expected one strategy, found {who_is_where(comm, kinds, texts)}")
        if self.direct is not None:
            self.direct.begin(answers)
            return self.direct.run(self._finished)
        outcome = check_load(comm, self.parts.sharded, strict, self._stored_keys, validates)
        loaded = self._load_otherwise(outcome.sharded)
        agree(comm, lambda: self._finished(*loaded))
        if returns_keys(strict):
            return self.state, outcome.missing, outcome.unexpected
        return self.state

    def _finished(self, *loaded: StateDict) -> StateDict:
        merge_factories(merged(self.state, *loaded), self.parts.factories)
        return self.state

    def _stored_keys(self) -> StateDict:
        """What is stored, but for the object that is the common state, which no caller requests."""
        found: StateDict = self.sharded.load_sharded_metadata(self.root)
        if not self.sharded.can_handle_sharded_objects:
            found = merged(found, self.common_loader.load_sharded_metadata(self.root))
        if all(value.key != COMMON_OBJECT.key for value in sharded_values(self.parts.sharded)):
            found.pop(COMMON_OBJECT.unique_key, None)
        return found

    def _load_otherwise(self, state: StateDict) -> tuple[StateDict, ...]:
        """What the strategies load: objects apart, where the sharded one does not take them."""
        comm, sharded, root = self.comm, self.sharded, self.root
        if sharded.can_handle_sharded_objects:
            return (agree(comm, lambda: sharded.load(state, root)),)
        objects, tensors = agree(comm, lambda: split_objects(state))
        loaded = agree(comm, lambda: self.common_loader.load_sharded_objects(objects, root))
        return loaded, agree(comm, lambda: sharded.load(tensors, root))
