"""What ``save`` and ``load`` make of their arguments: ranks, time limit, strategies, location."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from dist_ckpt_strategies.comm.base import Communicator
from dist_ckpt_strategies.comm.torch_communicator import open_communicator
from dist_ckpt_strategies.config import Options, options_from_environment
from dist_ckpt_strategies.errors import StrategyError
from dist_ckpt_strategies.formats.locations import Location, located, read_marker, require_path
from dist_ckpt_strategies.megatron.bases import ShardedTensor, StrategyAction
from dist_ckpt_strategies.megatron.shards import StateDict, sharded_values
from dist_ckpt_strategies.sharded.load import conversions
from dist_ckpt_strategies.storage.files import MARKER_NAME
from dist_ckpt_strategies.storage.time_limit import time_limit
from dist_ckpt_strategies.strategies.registry import StrategyChoice, resolve

P = ParamSpec("P")
T = TypeVar("T")


def open_world(purpose: str, detail: str, timeout_s: float | None) -> Communicator:
    """All ranks. Invalid options are reported by the first collective."""
    return open_communicator(None, timeout_s=_limit_s(timeout_s), purpose=purpose, detail=detail)


def with_time_limit(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate an entry point: all its storage work shares the limit ``timeout_s``."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        timeout_s = kwargs.get("timeout_s")
        with time_limit(_limit_s(timeout_s if isinstance(timeout_s, (int, float)) else None)):
            return function(*args, **kwargs)

    return call


def entry_options(timeout_s: float | None) -> Options:
    """The options of the environment with the caller's time limit, in seconds.

    Raises:
        StrategyError: one of them is invalid.
    """
    return options_from_environment().with_changes(timeout_s=timeout_s)


def _limit_s(timeout_s: float | None) -> float:
    try:
        return entry_options(timeout_s).timeout_s
    except StrategyError:
        return Options().timeout_s


def save_strategies(
    sharded: StrategyChoice, common: StrategyChoice, timeout_s: float | None
) -> tuple[Any, Any]:
    """The strategies that save the sharded state, by default ("zarr", 2), and the common state.

    ``timeout_s`` is the time limit of a sharded strategy that is no instance; None for its own.

    Raises:
        StrategyError: there is no such strategy.
    """
    saver = resolve(StrategyAction.SAVE_SHARDED, sharded, ("zarr", 2))
    common_saver = resolve(StrategyAction.SAVE_COMMON, common, ("torch", 1))
    return _with_timeout(saver, sharded, timeout_s), common_saver


def load_strategies(
    root: Location, sharded: StrategyChoice, common: StrategyChoice, timeout_s: float | None
) -> tuple[Any, Any]:
    """The strategies that load the sharded and the common state, by default the marker's.

    ``timeout_s`` as in ``save_strategies``.

    Raises:
        CheckpointNotFoundError, IncompleteCheckpointError: there is no finished checkpoint.
        StrategyError: there is no such strategy, or it reads another format.
    """
    marker = read_marker(root)
    stored = (marker.sharded_backend, marker.sharded_backend_version)
    loader = _loader(StrategyAction.LOAD_SHARDED, sharded, root, stored)
    stored = (marker.common_backend, marker.common_backend_version)
    common_loader = _loader(StrategyAction.LOAD_COMMON, common, root, stored)
    return _with_timeout(loader, sharded, timeout_s), common_loader


def _loader(
    action: StrategyAction, choice: StrategyChoice, root: Location, stored: tuple[str, int]
) -> Any:
    """The strategy for an action; errors about the stored format name ``metadata.json``."""
    chosen = resolve(action, choice, stored) if choice else None
    try:
        loader = resolve(action, None, stored) if chosen is None else chosen
        loader.check_backend_compatibility(stored[0])
        loader.check_version_compatibility(stored[1])
    except StrategyError as error:
        path = f"{root}/{MARKER_NAME}"
        raise type(error)(f"{path}: {error.message}", path=path) from error
    return loader


def _with_timeout(strategy: Any, choice: StrategyChoice, timeout_s: float | None) -> Any:
    """The strategy with the caller's time limit, unless it is the caller's own instance."""
    if strategy is choice or timeout_s is None or not hasattr(strategy, "limited"):
        return strategy
    return strategy.limited(timeout_s)


def location_of(checkpoint_dir: str | Path, strategy: StrategyChoice, around: Options) -> Location:
    """Where the checkpoint is; requests to an object store use the options of an instance.

    The shorter of its time limit and that of ``around`` counts: peers wait there too.
    """
    inner = getattr(strategy, "base_strategy", strategy)
    options = getattr(inner, "options", None) or around
    limit_s = min(options.timeout_s, around.timeout_s)
    return located(checkpoint_dir, options.with_changes(timeout_s=limit_s))


def require_taken(root: Location, strategy: Any) -> None:
    """Raise if the strategy needs a directory, and this is a place in an object store."""
    inner = getattr(strategy, "base_strategy", strategy)
    if not getattr(inner, "takes_urls", False):
        require_path(root, getattr(inner, "format_name", type(inner).__name__))


def verifying(loader: Any, verify: str | None) -> Any:
    """The load strategy with another choice of ``verify``; unchanged for None.

    Raises:
        StrategyError: no such choice, or the strategy reads no digests.
    """
    if verify is None:
        return loader
    if not hasattr(loader, "verifying"):
        raise StrategyError(
            f"verify={verify!r}: digests are kept by format ('zarr', 2), which "
            f"{type(loader).__name__} does not read itself; set verify on the strategy that does, "
            "or in its options"
        )
    return loader.verifying(verify)


def with_strict_dtype(loader: Any, root: Location, wanted: StateDict) -> Any:
    """The load strategy with ``strict_dtype`` set. Rank-local.

    For a strategy without that option the stored dtypes are compared here.

    Raises:
        DTypeMismatchError: they are, and an array is stored in another dtype.
    """
    if hasattr(loader, "with_strict_dtype"):
        return loader.with_strict_dtype()
    stored = {array.key: array.dtype for array in loader.load_tensors_metadata(root).values()}
    tensors = [value for value in sharded_values(wanted) if isinstance(value, ShardedTensor)]
    conversions(tensors, stored, is_strict=True)
    return loader
