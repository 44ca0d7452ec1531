"""Which strategy serves which action, backend and version."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from dist_ckpt_strategies.errors import (
    IncompatibleVersionError,
    StrategyError,
    StrategyExistsError,
    StrategyNotFoundError,
)
from dist_ckpt_strategies.megatron.bases import StrategyAction
from dist_ckpt_strategies.megatron.errors import raises_megatron_errors

__all__ = [
    "DEFAULT_REGISTRY",
    "StrategyAction",
    "StrategyKey",
    "StrategyRegistry",
    "get_default_strategy",
    "register_default_strategy",
]

Strategy = Any
"""An instance of one of Megatron-Core's four strategy base classes."""

StrategyFactory = Callable[[], Strategy]


@dataclass(frozen=True, slots=True)
class StrategyKey:
    """What a strategy is looked up by: ``(SAVE_SHARDED, "zarr", 1)``."""

    action: StrategyAction
    backend: str
    version: int

    def __post_init__(self) -> None:
        """Refuse what no look-up would find."""
        if not isinstance(self.action, StrategyAction):
            names = ", ".join(f"StrategyAction.{action.name}" for action in StrategyAction)
            raise StrategyError(f"action: expected one of {names}, found {self.action!r}")
        backend: Any = self.backend
        version: Any = self.version
        if not (isinstance(backend, str) and isinstance(version, int)):
            raise StrategyError(
                f"expected a str as backend and an int as version, found ({backend!r}, {version!r})"
            )

    def __str__(self) -> str:
        """The key as people write it."""
        return f"({self.action.value}, {self.backend!r}, {self.version})"


class StrategyRegistry:
    """Factories of strategies by key. The first look-up makes a strategy, later ones return it."""

    def __init__(self) -> None:
        self._factories: dict[StrategyKey, StrategyFactory] = {}
        self._strategies: dict[StrategyKey, Strategy] = {}

    def register(
        self, key: StrategyKey, factory: StrategyFactory, *, replace: bool = False
    ) -> None:
        """Put a factory under a key. Registering an equal factory again changes nothing.

        Raises:
            StrategyExistsError: another factory is there and ``replace`` is not set.
            StrategyError: the key is no StrategyKey, or the factory cannot be called.
        """
        found: Any = (key, factory)
        if not (isinstance(found[0], StrategyKey) and callable(found[1])):
            raise StrategyError(
                f"expected a StrategyKey and a callable, found {key!r} and {factory!r}"
            )
        if self.has(key, factory):
            return
        if key in self and not replace:
            raise strategy_exists(key, self._factories[key])
        self._factories[key] = factory
        self._strategies.pop(key, None)

    def has(self, key: StrategyKey, factory: StrategyFactory) -> bool:
        """Whether this factory, or an equal one, is registered under the key."""
        return key in self and self._factories[key] == factory

    def get(self, key: StrategyKey) -> Strategy:
        """The strategy for the key, the same one at every look-up.

        Raises:
            StrategyNotFoundError: nothing is registered there; the message lists what is.
        """
        if key not in self:
            raise strategy_not_found(key, self.keys())
        if key not in self._strategies:
            self._strategies[key] = self._factories[key]()
        return self._strategies[key]

    def keys(self) -> tuple[StrategyKey, ...]:
        """Every key that has a factory, sorted."""
        return tuple(sorted(self._factories, key=lambda k: (k.backend, k.version, k.action.value)))

    def __contains__(self, key: object) -> bool:
        """Whether a factory is registered under the key."""
        return key in self._factories


def require_own(own: tuple[str, int], backend: str, version: int) -> None:
    """Raise unless this is the format that a strategy knows.

    Args:
        own: that format.
        backend: that is asked for, or was found.
        version: of it.

    Raises:
        IncompatibleVersionError: it is another.
    """
    if (backend, version) != own:
        raise IncompatibleVersionError(f"expected backend {own}, found ({backend!r}, {version!r})")


def strategy_exists(key: StrategyKey, present: object) -> StrategyExistsError:
    """The error for a key that is taken: says by what."""
    return StrategyExistsError(
        f"{key} is already registered ({present}), with another strategy or other arguments; pass "
        "replace=True to replace it"
    )


def strategy_not_found(key: StrategyKey, known: Iterable[StrategyKey]) -> StrategyNotFoundError:
    """The error for a key without a strategy: says what there is."""
    names = ", ".join(map(str, known)) or "none"
    return StrategyNotFoundError(f"no strategy for {key}; registered: {names}")


DEFAULT_REGISTRY = StrategyRegistry()
"""The registry behind get_default_strategy, save and load."""


@dataclass(frozen=True, slots=True)
class _Instance:
    """A factory that returns the instance it was made with."""

    strategy: Strategy

    def __call__(self) -> Strategy:
        return self.strategy


@raises_megatron_errors
def get_default_strategy(action: StrategyAction, backend: str, version: int) -> Strategy:
    """A strategy from the default registry.

    Raises:
        StrategyNotFoundError: nothing is registered; the message lists what is.
        StrategyError: the action is none, the backend no str or the version no int.
    """
    return DEFAULT_REGISTRY.get(StrategyKey(action, backend, version))


@raises_megatron_errors
def register_default_strategy(
    action: StrategyAction,
    backend: str,
    version: int,
    strategy: Strategy | StrategyFactory,
    *,
    replace: bool = False,
) -> None:
    """Put a strategy, or a factory of strategies, into the default registry.

    Args:
        action: save or load, sharded or common.
        backend: name of the format.
        version: version of the format.
        strategy: an instance, or a callable that makes it at the first look-up.
        replace: take the place of what is registered there.

    Raises:
        StrategyExistsError: the key is taken and ``replace`` is not set.
        StrategyError: the action is none, or the strategy neither a strategy nor a callable.
    """
    is_instance = hasattr(strategy, "can_handle_sharded_objects") and not isinstance(strategy, type)
    factory = _Instance(strategy) if is_instance else strategy
    DEFAULT_REGISTRY.register(StrategyKey(action, backend, version), factory, replace=replace)
