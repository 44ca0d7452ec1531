"""Put default strategies into our registry and into Megatron-Core's own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

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
    strategy_exists,
)

Default = tuple[StrategyAction, str, int, StrategyFactory]
"""Action, backend, version, and what makes the strategy."""


@dataclass(frozen=True, slots=True)
class Made:
    """Makes a strategy of one class. Equal ones make strategies that do the same."""

    cls: Any
    arguments: Mapping[str, Any]

    def __call__(self) -> Any:
        """A new strategy."""
        return self.cls(**self.arguments)


def register_defaults(defaults: Iterable[Default], *, replace: bool = False) -> None:
    """Register each default, as one strategy, in both registries; repeating it changes nothing.

    Where the installed Megatron-Core has no registry (0.17), only ours is filled.

    Raises:
        StrategyExistsError: a key is taken by another strategy, or by one with other arguments, and
            ``replace`` is not set; nothing has been registered.
    """
    wanted = [(StrategyKey(*key), factory) for *key, factory in defaults]
    if not replace:
        for key, factory in wanted:
            _require_free(key, factory)
    for key, factory in wanted:
        DEFAULT_REGISTRY.register(key, factory, replace=True)
        if has_registry():
            strategy = DEFAULT_REGISTRY.get(key)
            register_strategy(key.action, key.backend, key.version, strategy)


def register_here(defaults: Iterable[Default], *, replace: bool = False) -> None:
    """Register each default for this package's own save and load, not in Megatron-Core.

    What is registered there stays, unless ``replace`` is set.
    """
    for *names, factory in defaults:
        key = StrategyKey(*names)
        if replace or key not in DEFAULT_REGISTRY:
            DEFAULT_REGISTRY.register(key, factory, replace=True)


def _require_free(key: StrategyKey, factory: StrategyFactory) -> None:
    ours = DEFAULT_REGISTRY.get(key) if key in DEFAULT_REGISTRY else None
    in_megatron = registered_strategy(key.action, key.backend, key.version)
    if ours is not None and not DEFAULT_REGISTRY.has(key, factory):
        raise strategy_exists(key, type(ours).__qualname__)
    if in_megatron is not None and in_megatron is not ours:
        raise strategy_exists(key, type(in_megatron).__qualname__)
