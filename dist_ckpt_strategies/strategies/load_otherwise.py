"""Loads by strategies that are called as they are: of other packages, or with their own ranks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from dist_ckpt_strategies.comm.base import Communicator, Message, run_collectively
from dist_ckpt_strategies.comm.process_group import ProcessGroup
from dist_ckpt_strategies.config import Options
from dist_ckpt_strategies.core.array import COMMON_OBJECT
from dist_ckpt_strategies.errors import StrategyError
from dist_ckpt_strategies.formats.checkpoints import common_digest
from dist_ckpt_strategies.formats.locations import (
    PACKS,
    Location,
    OpenedSave,
    located,
    require_path,
)
from dist_ckpt_strategies.local.common_state import restore_common
from dist_ckpt_strategies.megatron.shards import StateDict, merged, sharded_values, split_objects
from dist_ckpt_strategies.megatron.types import ShardedTensor, StrictHandling, handles_objects
from dist_ckpt_strategies.sharded.checks import (
    check_load,
    different_strategies,
    require_same_checkpoint,
)
from dist_ckpt_strategies.sharded.load import (
    LoadPlan,
    Validated,
    conversions,
    require_fillable,
)
from dist_ckpt_strategies.storage.io_pool import (
    ENDING,
    OPENING,
    Deadline,
    run_within,
)
from dist_ckpt_strategies.strategies.call import inner_strategy
from dist_ckpt_strategies.strategies.local_replicated import LocalReplicatedLoadShardedStrategy
from dist_ckpt_strategies.strategies.registry import StrategyChoice
from dist_ckpt_strategies.strategies.two_stage import TwoStageDataParallelLoadShardedStrategy
from dist_ckpt_strategies.strategies.zarr import ZarrLoadShardedStrategy

_LOCAL, _OTHER = "local", "other"
"""What a rank answers whose load does not go straight to a strategy of this package.

Unless a strategy of this package compares it, the digest of the common state follows a colon.
"""

_OWN = (ZarrLoadShardedStrategy.load, TwoStageDataParallelLoadShardedStrategy.load)


@dataclass(frozen=True, slots=True)
class Request:
    """The arguments of ``load``, and the options and ranks that they amount to.

    ``chosen`` is the caller's strategy, ``group`` that of the strategy inside of its wrappers;
    ``invalid`` is an error in the arguments, for the first collective to raise.
    """

    state: StateDict
    checkpoint_dir: str | Path
    options: Options
    chosen: Any
    common_strategy: StrategyChoice
    group: ProcessGroup | None
    validates: bool
    strict: str | StrictHandling
    verify: str | None
    strict_dtype: bool
    timeout_s: float | None
    process_group: ProcessGroup | None
    invalid: Exception | None


@dataclass(frozen=True, slots=True)
class Load:
    """What one rank is about to load, and by which strategies.

    Attributes:
        root: where from.
        save: that is there.
        sharded: the strategy for ShardedTensors.
        common: the strategy for the common state.
        wanted: what is sharded.
        strict: what to do about keys that only one side has.
        finish: makes the result of what is loaded.
        plan: where a strategy of this package loads with the ranks and the limit of this call.
        validated: where the sharding is to be checked with a plan: see ``Validated``.
    """

    root: Location
    save: OpenedSave
    sharded: Any
    common: Any
    wanted: StateDict
    strict: StrictHandling
    finish: Callable[..., StateDict]
    plan: LoadPlan | None
    validated: Validated | None


def with_options(loader: Any, request: Request, stored: tuple[str, int]) -> Any:
    """The load strategy with the caller's options.

    Raises:
        StrategyError: it has no such option.
    """
    verify = request.verify
    has_digests = stored == PACKS.sharded_format
    if verify is not None and not (has_digests and hasattr(loader, "versions")):
        raise StrategyError(
            f"verify={verify!r}: digests are kept by format "
            f"{PACKS.sharded_format}, which {type(loader).__name__} does not read itself, "
            f"found {stored}; set verify on the strategy that does, or in its options"
        )
    if hasattr(loader, "with_options"):
        return loader.with_options(verify=verify, strict_dtype=request.strict_dtype or None)
    return loader


def described(begun: Load, request: Request) -> str:
    """What the other ranks have to know. Rank-local.

    Raises:
        PlanError, ShapeMismatchError: the data of a ShardedTensor cannot be filled.
        DTypeMismatchError: another dtype is stored, ``strict_dtype`` is set, and the strategy
            has no such option.
    """
    values = list(sharded_values(begun.wanted))
    require_fillable(values)
    base, root = inner_strategy(begun.sharded), begun.root
    if request.strict_dtype and not hasattr(begun.sharded, "with_options"):
        arrays = begun.sharded.load_tensors_metadata(root).values()
        stored = {array.key: str(array.dtype).removeprefix("torch.") for array in arrays}
        tensors = [value for value in values if isinstance(value, ShardedTensor)]
        conversions(tensors, stored, is_strict=True)
    if isinstance(base, ZarrLoadShardedStrategy):
        return _OTHER
    path = require_path(root, type(base).__name__)
    deadline = Deadline.after(OPENING * request.options.timeout_s)
    digest = run_within(deadline, path, lambda: common_digest(path))
    is_local = isinstance(begun.sharded, LocalReplicatedLoadShardedStrategy)
    return f"{_LOCAL if is_local else _OTHER}:{digest}"


def needs_common(answers: Sequence[Message]) -> bool:
    """Whether local checkpoints are to be loaded, and a node lacks the common state."""
    local = {a for a in answers if isinstance(a, str) and a.startswith(_LOCAL)}
    return len(local) > 1 or (bool(local) and None in answers)


def restore_everywhere(comm: Communicator, request: Request) -> None:
    """Have every node hold the common state of local checkpoints. Collective."""
    place = request.checkpoint_dir
    root = run_collectively(comm, lambda: require_path(located(place, None), "local_replicated"))
    restore_common(comm, root, str(place), request.options.timeout_s)


def load_otherwise(
    comm: Communicator, request: Request, begun: Load, answers: Sequence[Message]
) -> StateDict | tuple[StateDict, set[str], set[str]]:
    """Load where not every rank has a plan; what ``load`` returns. Collective.

    Raises:
        PlanError: ranks load by strategies of different kinds.
        CheckpointChangedError: the common state that they have read differs, or another save has
            replaced the checkpoint.
    """
    kinds = [a.partition(":")[0] if isinstance(a, str) else "zarr" for a in answers]
    if len(set(kinds)) > 1:
        raise different_strategies(comm, "a load", kinds)
    digests = [a.partition(":")[2] for a in answers if isinstance(a, str)]
    require_same_checkpoint(comm, request.checkpoint_dir, digests)
    strict, stored_keys = begun.strict, partial(_stored_keys, begun)
    outcome = check_load(comm, begun.wanted, strict, stored_keys, request.validates)

    limit_s = ENDING * request.options.timeout_s
    read = lambda: begun.finish(*_called(comm, begun, outcome.sharded))  # noqa: E731
    result = run_collectively(comm, lambda: begun.save.read(read, limit_s))
    if StrictHandling.requires_returning_mismatch_keys(strict):
        return result, outcome.missing, outcome.unexpected
    return result


def _stored_keys(begun: Load) -> StateDict:
    """What is stored, but for the object that is the common state, which no caller requests."""
    keys: StateDict = begun.sharded.load_sharded_metadata(begun.root)
    if not handles_objects(begun.sharded):
        keys = merged(keys, begun.common.load_sharded_metadata(begun.root))
    if all(value.key != COMMON_OBJECT.key for value in sharded_values(begun.wanted)):
        keys.pop(COMMON_OBJECT.unique_key, None)
    return keys


def _called(comm: Communicator, begun: Load, state: StateDict) -> tuple[StateDict, ...]:
    """What the strategies load: objects apart, where the sharded one does not take them.

    Collective. The caller runs it within an error check.
    """
    sharded, root = begun.sharded, begun.root
    if type(sharded).load in _OWN:
        return (sharded.load_from(state, root, begun.save),)
    if handles_objects(sharded):
        return (sharded.load(state, root),)
    objects, tensors = run_collectively(comm, lambda: split_objects(state))
    loaded = run_collectively(comm, lambda: begun.common.load_sharded_objects(objects, root))
    return loaded, sharded.load(tensors, root)
