"""Load with the signature of Megatron-Core's, and promises that it does not make.

Every rank raises where one fails. torch_dist never takes the place of a strategy.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from dist_ckpt_strategies.comm.agree import agree, agree_and_gather
from dist_ckpt_strategies.comm.base import Communicator
from dist_ckpt_strategies.core.array import COMMON_OBJECT
from dist_ckpt_strategies.formats.locations import (
    Location,
    complete_commit,
    content_of,
    is_finished,
    located,
    read_marker,
    require_path,
)
from dist_ckpt_strategies.formats.objects import Allowed, allowing
from dist_ckpt_strategies.megatron.bases import StrictHandling
from dist_ckpt_strategies.megatron.errors import raises_megatron_errors
from dist_ckpt_strategies.megatron.flow import (
    LoadParts,
    merge_factories,
    merged,
    parsed_strict,
    returns_keys,
    split_objects,
    take_apart_for_load,
)
from dist_ckpt_strategies.megatron.shards import StateDict, sharded_values
from dist_ckpt_strategies.sharded.checks import check_load
from dist_ckpt_strategies.storage.time_limit import restart_limit
from dist_ckpt_strategies.strategies.entry_options import (
    entry_options,
    load_strategies,
    location_of,
    open_world,
    require_taken,
    verifying,
    with_strict_dtype,
    with_time_limit,
)
from dist_ckpt_strategies.strategies.local_replicated import BACKEND as LOCAL_BACKEND
from dist_ckpt_strategies.strategies.local_replicated import restore_common
from dist_ckpt_strategies.strategies.registry import StrategyChoice


@raises_megatron_errors
@with_time_limit
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
            ("zarr", 1) and ("zarr", 2) that are not given as instances.
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
    comm = open_world("load", f"from {checkpoint_dir}", timeout_s)
    _restore_node(comm, checkpoint_dir)
    restart_limit()
    with ExitStack() as stack:

        def begin() -> tuple[Location, Any, Any, StateDict, LoadParts, StrictHandling]:
            root = content_of(
                location_of(checkpoint_dir, sharded_strategy, entry_options(timeout_s))
            )
            stack.enter_context(allowing(allow))
            loaders = load_strategies(root, sharded_strategy, common_strategy, timeout_s)
            require_taken(root, loaders[0])
            loader = verifying(loaders[0], verify)
            found: StateDict = loaders[1].load_common(root)
            parts = take_apart_for_load(sharded_state_dict)
            if strict_dtype:
                loader = with_strict_dtype(loader, root, parts.sharded)
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


def _restore_node(comm: Communicator, checkpoint_dir: str | Path) -> None:
    """Put the files of a local checkpoint's common state where they are lost. Collective."""

    def backend() -> str | None:
        root = located(checkpoint_dir, None)
        if comm.rank == 0:
            complete_commit(root)
        is_local = isinstance(root, Path) and is_finished(root)
        return read_marker(root).sharded_backend if is_local else None

    backends = agree_and_gather(comm, backend)
    if None in backends and LOCAL_BACKEND in backends:
        root = agree(comm, lambda: require_path(located(checkpoint_dir, None), LOCAL_BACKEND))
        restore_common(comm, root, str(checkpoint_dir))


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
