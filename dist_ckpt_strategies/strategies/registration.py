"""Put default strategies into our registry and into Megatron-Core's own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dist_ckpt_strategies.errors import StrategyExistsError
from dist_ckpt_strategies.megatron.bases import StrategyAction
from dist_ckpt_strategies.megatron.registry import (
    has_registry,
    register_strategy,
    registered_strategy,
)
from dist_ckpt_strategies.strategies.registry import (
    DEFAULT_REGISTRY,
    StrategyFactory,
    StrategyKey,
)

Default = tuple[StrategyAction, str, int, StrategyFactory]
"""Action, backend, version, and what makes the strategy."""

_PACKAGE = __name__.partition(".")[0]


def register_defaults(defaults: Iterable[Default], *, replace: bool = False) -> None:
    """Register each default in both registries; doing it again changes nothing.

    What this package registered before gives way. A strategy of somebody else does so only with
    ``replace``. Where the installed Megatron-Core has no registry (0.17), only ours is filled.

    Raises:
        StrategyExistsError: a key is taken by somebody else; nothing has been registered.
    """
    wanted = list(defaults)
    if not replace:
        for action, backend, version, _ in wanted:
            _require_free(StrategyKey(action, backend, version))
    for action, backend, version, factory in wanted:
        DEFAULT_REGISTRY.register(StrategyKey(action, backend, version), factory, replace=True)
        if has_registry():
            register_strategy(action, backend, version, factory())


def register_here(defaults: Iterable[Default], *, replace: bool = False) -> None:
    """Register each default for this package's own save and load, not in Megatron-Core.

    What somebody else has registered there stays, unless ``replace`` is set.
    """
    for action, backend, version, factory in defaults:
        key = StrategyKey(action, backend, version)
        if replace or key not in DEFAULT_REGISTRY or _is_replaceable(DEFAULT_REGISTRY.get(key)):
            DEFAULT_REGISTRY.register(key, factory, replace=True)


def _require_free(key: StrategyKey) -> None:
    in_megatron = registered_strategy(key.action, key.backend, key.version)
    in_ours = DEFAULT_REGISTRY.get(key) if key in DEFAULT_REGISTRY else None
    for present in (in_megatron, in_ours):
        if present is not None and not _is_replaceable(present):
            raise StrategyExistsError(
                f"{key} is already registered ({type(present).__qualname__}); pass replace=True "
                "to replace it"
            )


def _is_replaceable(strategy: Any) -> bool:
    return type(strategy).__module__.partition(".")[0] == _PACKAGE
