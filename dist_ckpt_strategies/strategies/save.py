"""``save`` and ``save_async`` with Megatron-Core's signatures and further promises.

Every rank raises where one fails. A finished checkpoint is not overwritten by accident. The marker
appears whole, after everything else is durable. torch_dist never takes the place of a strategy.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from dist_ckpt_strategies.comm.base import run_collectively
from dist_ckpt_strategies.errors import StrategyError
from dist_ckpt_strategies.formats.commit import require_unfinished
from dist_ckpt_strategies.formats.locations import located
from dist_ckpt_strategies.formats.objects import Allowed, allowing
from dist_ckpt_strategies.megatron.shards import StateDict, split_for_save
from dist_ckpt_strategies.megatron.types import StrategyAction, raises_megatron_errors
from dist_ckpt_strategies.sharded.async_request import LocalSaveRequest
from dist_ckpt_strategies.sharded.checks import warn_of_differences
from dist_ckpt_strategies.sharded.pack_save import Prepared, Started
from dist_ckpt_strategies.storage.io_pool import OPENING, Deadline, run_within
from dist_ckpt_strategies.strategies.call import opened_call
from dist_ckpt_strategies.strategies.common import TorchCommonSaveStrategy
from dist_ckpt_strategies.strategies.other_save import (
    CommonState,
    SaveCall,
    common_saver,
    common_state,
    marker_of,
    require_suitable,
    save_by_other,
)
from dist_ckpt_strategies.strategies.own_save import OwnSaveShardedStrategy
from dist_ckpt_strategies.strategies.registry import StrategyChoice

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
        checkpoint_dir: a directory that all ranks see; for ("safetensors", 1) also
            ``s3://bucket/path`` or ``gs://bucket/path``. ``file:///path`` is a directory.
        sharded_strategy: strategy or (backend, version); ("safetensors", 1) by default.
        common_strategy: strategy or (backend, version); ("torch", 1) by default.
        validate_access_integrity: compare the ranks' common states, and where a strategy of
            another package saves, run Megatron-Core's own checks of the sharding.
        async_sharded_save: write in the background, and return a request for Megatron-Core's queue;
            see ``save_async``.
        preprocess_common_before_consistancy_check: applied to the common state before ranks
            compare it.
        content_metadata: stored in the common state, for Megatron-Core's ``load_content_metadata``,
            which takes what ``load`` gives, or after ``register()`` a directory.
        async_strategy: ``"nvrx"`` or ``"mcore"``; any queue of theirs takes the request.
        verify_integrity: have digests of all that is saved. ("safetensors", 1) always has them, no
            other format does.
        overwrite: replace a finished checkpoint, which stays loadable until the new one is durable:
            this needs space for both. A save of ("safetensors", 1) that is killed leaves the one or
            the other, of another format in its last step maybe none. Also remove arrays and
            objects of ("zarr", 1) of no finished checkpoint that this save does not replace.
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
    call = SaveCall(
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
    with allowing(() if call.invalid else allow):
        if isinstance(call.base, OwnSaveShardedStrategy):
            return _save_own(call)
        save_by_other(call)
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

    Arguments are those of ``save``; the strategy has to be one of this package's formats.

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


def _save_own(call: SaveCall) -> LocalSaveRequest | None:
    """Save by a strategy of this package; begin to, and return the request. Collective."""
    comm = call.comm
    strategy: Any = call.base.with_options(timeout_s=call.options.timeout_s)
    split: list[tuple[StateDict, StateDict]] = []
    if call.sharded is not call.base:  # a wrapper, which chooses the main replicas
        run_collectively(
            comm, lambda: split.append(split_for_save(call.state, call.content_metadata))
        )
        run_collectively(comm, lambda: call.sharded.apply_saving_parallelization(split[0][0]))
    commons: list[CommonState] = []

    def prepare() -> Prepared:
        require_suitable(call)
        saver = common_saver(call)
        if not isinstance(saver, TorchCommonSaveStrategy):
            raise StrategyError(
                f"common_strategy: format {strategy.own_format} holds the common state itself, "
                f"found {saver}; leave it out"
            )
        store = strategy.place(call.checkpoint_dir)
        state, shared = split[0] if split else split_for_save(call.state, call.content_metadata)
        commons.append(common_state(call, saver, shared))
        if comm.rank == 0 and not call.overwrite:
            root = located(call.checkpoint_dir, call.options)
            limit = Deadline.after(OPENING * call.options.timeout_s)
            run_within(limit, root, lambda: require_unfinished(root))
        common = commons[0]
        contents = strategy.contents(state, common.content, copies_common=True, allow=call.allow)
        return Prepared(store, contents, common.digest, strategy.kind, call.overwrite)

    def compare(started: Started) -> None:
        if len(set(started.notes)) > 1:
            warn_of_differences(comm, commons[0].compared, started.notes)

    marker = marker_of(call.base, ("torch", 1))
    request: LocalSaveRequest | None = strategy.save_prepared(
        comm, prepare, is_async=call.is_async, marker=marker, look_at=compare
    )
    return request
