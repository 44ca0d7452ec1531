"""Which strategies save and load a checkpoint, and where that is, by what a caller says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from dist_ckpt_strategies.config import Options, options_from_environment
from dist_ckpt_strategies.errors import StrategyError
from dist_ckpt_strategies.formats.locations import Location, located, read_marker, require_path
from dist_ckpt_strategies.formats.marker import CheckpointMarker
from dist_ckpt_strategies.megatron.bases import (
    LoadCommonStrategy,
    LoadShardedStrategy,
    SaveCommonStrategy,
    SaveShardedStrategy,
    ShardedTensor,
    StrategyAction,
)
from dist_ckpt_strategies.megatron.registry import torch_dist_strategy
from dist_ckpt_strategies.megatron.shards import StateDict, sharded_values
from dist_ckpt_strategies.sharded.load import conversions
from dist_ckpt_strategies.storage.files import MARKER_NAME
from dist_ckpt_strategies.strategies import common, zarr
from dist_ckpt_strategies.strategies.common import (
    TorchCommonLoadStrategy,
    TorchCommonSaveStrategy,
)
from dist_ckpt_strategies.strategies.local_replicated import (
    LocalReplicatedLoadShardedStrategy,
    LocalReplicatedSaveShardedStrategy,
)
from dist_ckpt_strategies.strategies.registry import (
    DEFAULT_REGISTRY,
    StrategyKey,
    strategy_not_found,
)
from dist_ckpt_strategies.strategies.sharded_strategies import (
    BaseLoadShardedStrategy,
    BaseSaveShardedStrategy,
)
from dist_ckpt_strategies.strategies.zarr_format2 import (
    BACKEND,
    VERSION,
    Format2LoadShardedStrategy,
    Format2SaveShardedStrategy,
)

_KINDS: Mapping[StrategyAction, Any] = MappingProxyType(
    {
        StrategyAction.SAVE_SHARDED: SaveShardedStrategy,
        StrategyAction.LOAD_SHARDED: LoadShardedStrategy,
        StrategyAction.SAVE_COMMON: SaveCommonStrategy,
        StrategyAction.LOAD_COMMON: LoadCommonStrategy,
    }
)

StrategyChoice = Any
"""A strategy, a (backend, version) tuple, or None for the default."""

_DEFAULT_SHARDED = (BACKEND, VERSION)

_OWN: Mapping[StrategyKey, Any] = MappingProxyType(
    {
        StrategyKey(StrategyAction.SAVE_SHARDED, "zarr", 1): zarr.ZarrSaveShardedStrategy,
        StrategyKey(StrategyAction.LOAD_SHARDED, "zarr", 1): zarr.ZarrLoadShardedStrategy,
        StrategyKey(StrategyAction.SAVE_SHARDED, "zarr", 2): Format2SaveShardedStrategy,
        StrategyKey(StrategyAction.LOAD_SHARDED, "zarr", 2): Format2LoadShardedStrategy,
        StrategyKey(
            StrategyAction.SAVE_SHARDED, "local_replicated", 1
        ): LocalReplicatedSaveShardedStrategy,
        StrategyKey(
            StrategyAction.LOAD_SHARDED, "local_replicated", 1
        ): LocalReplicatedLoadShardedStrategy,
        StrategyKey(StrategyAction.SAVE_COMMON, "torch", 1): TorchCommonSaveStrategy,
        StrategyKey(StrategyAction.LOAD_COMMON, "torch", 1): TorchCommonLoadStrategy,
    }
)
"""What ``save`` and ``load`` use without ``register``, which is for Megatron-Core's own."""


def location_of(checkpoint_dir: str | Path, strategy: StrategyChoice, around: Options) -> Location:
    """Where the checkpoint is; an object store is reached as the strategy's options say.

    Args:
        checkpoint_dir: as the caller names it.
        strategy: an instance; where it is none, those around it hold.
        around: the options of the steps around it. Peers wait there too, and maybe for less time.
    """
    inner = getattr(strategy, "base_strategy", strategy)
    options = getattr(inner, "options", None) or around
    limit_s = min(options.timeout_s, around.timeout_s)
    return located(checkpoint_dir, options.with_changes(timeout_s=limit_s))


def require_taken(root: Location, strategy: Any) -> None:
    """Raise where the strategy needs a directory, and this is none."""
    inner = getattr(strategy, "base_strategy", strategy)
    if not getattr(inner, "takes_urls", False):
        require_path(root, getattr(inner, "format_name", type(inner).__name__))


def _chosen(action: StrategyAction, choice: StrategyChoice) -> Any:
    """The strategy that a caller means by an instance or by a tuple."""
    if isinstance(choice, _KINDS[action]):
        return choice
    if not isinstance(choice, tuple):
        raise StrategyError(
            f"expected a {_KINDS[action].__name__} or a tuple (backend, version), found {choice!r}"
        )
    if len(choice) != len(("backend", "version")):
        raise StrategyError(f"expected a strategy or a tuple (backend, version), found {choice!r}")
    key = StrategyKey(action, *choice)
    if key in DEFAULT_REGISTRY:
        return _require_kind(key, DEFAULT_REGISTRY.get(key))
    return _of_megatron_or_missing(key)


def _require_kind(key: StrategyKey, found: Any) -> Any:
    """What somebody has registered, where it does what it is registered for."""
    kind = _KINDS[key.action]
    if not isinstance(found, kind):
        raise StrategyError(f"{key}: expected a {kind.__name__} there, found {found!r}")
    return found


def _of_megatron_or_missing(key: StrategyKey) -> Any:
    """A strategy of ours that is not registered, or one that Megatron-Core itself has."""
    if key in _OWN:
        is_kept = issubclass(_OWN[key], BaseSaveShardedStrategy)
        return _kept(key, options_from_environment()) if is_kept else _OWN[key]()
    if (key.backend, key.version) == ("torch_dist", 1):
        return torch_dist_strategy(key.action)
    raise strategy_not_found(key, dict.fromkeys([*DEFAULT_REGISTRY.keys(), *_OWN]))


@cache
def _kept(key: StrategyKey, options: Options) -> Any:
    """The strategy of ours for these options, the same one every time: it keeps its last plan."""
    return _OWN[key](options=options)


def save_strategies(
    sharded: StrategyChoice, common_choice: StrategyChoice, timeout_s: float | None
) -> tuple[Any, Any]:
    """Those that save the sharded part and the common one.

    Args:
        sharded: an instance, which stays as it is, or a tuple; None for ("zarr", 2).
        common_choice: the same for the common part.
        timeout_s: time limit of a sharded strategy that is no instance; None for its own.

    Raises:
        StrategyError: there is no such strategy.
    """
    return (
        _limited(
            _chosen(StrategyAction.SAVE_SHARDED, sharded or _DEFAULT_SHARDED),
            sharded,
            timeout_s,
        ),
        _chosen(StrategyAction.SAVE_COMMON, common_choice or (common.BACKEND, common.VERSION)),
    )


def _limited(made: Any, choice: StrategyChoice, timeout_s: float | None) -> Any:
    """The strategy, with a time limit where the caller gave one, and no instance."""
    is_ours = isinstance(made, (BaseSaveShardedStrategy, BaseLoadShardedStrategy))
    if made is choice or timeout_s is None or not is_ours:
        return made
    return made.limited(timeout_s)


def load_strategies(
    root: Location,
    sharded: StrategyChoice,
    common_choice: StrategyChoice,
    timeout_s: float | None,
) -> tuple[Any, Any]:
    """Those that load the sharded part and the common one; by default what the marker names.

    Args:
        root: the checkpoint.
        sharded: as in ``save_strategies``.
        common_choice: as in ``save_strategies``.
        timeout_s: as in ``save_strategies``.

    Raises:
        CheckpointNotFoundError, IncompleteCheckpointError: there is no finished checkpoint.
        StrategyError: there is no such strategy, or it reads another format.
    """
    marker = read_marker(root)
    loader = _loader(StrategyAction.LOAD_SHARDED, sharded, root, _sharded_key(marker))
    common_loader = _loader(StrategyAction.LOAD_COMMON, common_choice, root, _common_key(marker))
    return _limited(loader, sharded, timeout_s), common_loader


def verifying(loader: Any, verify: str | None) -> Any:
    """The load strategy, with what it compares with digests changed where that is given.

    Raises:
        StrategyError: no such choice, or not of this strategy.
    """
    if verify is None:
        return loader
    if not isinstance(loader, Format2LoadShardedStrategy):
        raise StrategyError(
            f"verify={verify!r}: digests are kept by format ('zarr', 2), which "
            f"{type(loader).__name__} does not read itself; set verify on the strategy that does, "
            "or in its options"
        )
    return loader.verifying(verify)


def with_strict_dtype(loader: Any, root: Location, wanted: StateDict) -> Any:
    """The load strategy, made to raise where an array is stored in another dtype.

    One that has no such option is asked for the stored dtypes here and now. Rank-local.

    Args:
        loader: the strategy.
        root: the checkpoint.
        wanted: the ShardedTensors and ShardedObjects to load.

    Raises:
        DTypeMismatchError: it has no such option, and an array is stored in another dtype.
    """
    if isinstance(loader, (BaseLoadShardedStrategy, LocalReplicatedLoadShardedStrategy)):
        return loader.with_strict_dtype()
    stored = {array.key: array.dtype for array in loader.load_tensors_metadata(root).values()}
    tensors = [value for value in sharded_values(wanted) if isinstance(value, ShardedTensor)]
    conversions(tensors, stored, is_strict=True)
    return loader


@contextmanager
def _told_of_marker(root: Location) -> Iterator[None]:
    """Have an error about a format say which file names that."""
    try:
        yield
    except StrategyError as error:
        path = f"{root}/{MARKER_NAME}"
        raise type(error)(f"{path}: {error.message}", path=path) from error


def _sharded_key(marker: CheckpointMarker) -> tuple[str, int]:
    return marker.sharded_backend, marker.sharded_backend_version


def _common_key(marker: CheckpointMarker) -> tuple[str, int]:
    return marker.common_backend, marker.common_backend_version


def _loader(
    action: StrategyAction, choice: StrategyChoice, root: Location, stored: tuple[str, int]
) -> Any:
    """The strategy of a checkpoint, or the caller's, which has to be one that can read it."""
    chosen = _chosen(action, choice) if choice else None
    with _told_of_marker(root):
        loader = _chosen(action, stored) if chosen is None else chosen
        backend, version = stored
        loader.check_backend_compatibility(backend)
        loader.check_version_compatibility(version)
    return loader
