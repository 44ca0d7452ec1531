"""Strategies by action, backend and version: registered ones and this package's defaults.

And the options that strategies of this package have in common.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from types import MappingProxyType
from typing import Any, NamedTuple, Self

from dist_ckpt_strategies.comm.base import Communicator
from dist_ckpt_strategies.comm.process_group import ProcessGroup
from dist_ckpt_strategies.comm.torch_communicator import open_communicator
from dist_ckpt_strategies.config import LocalOptions, Options, options_from_environment
from dist_ckpt_strategies.errors import (
    IncompatibleVersionError,
    StrategyError,
    StrategyExistsError,
    StrategyNotFoundError,
)
from dist_ckpt_strategies.formats.objects import Allowed
from dist_ckpt_strategies.megatron.types import (
    TORCH_DIST,
    StrategyAction,
    allow_in_common_state,
    default_allowed,
    has_registry,
    is_strategy,
    raises_megatron_errors,
    register_strategy,
    registered_strategy,
    torch_dist_strategy,
)

logger = logging.getLogger(__name__)

__all__ = [
    "StrategyAction",
    "get_default_strategy",
    "register",
    "register_default_strategy",
    "register_default_tensorstore_strategies",
    "register_default_zarr_strategies",
]

Strategy = Any
"""An instance with the methods of one of Megatron-Core's four kinds of strategies."""

StrategyFactory = Callable[[], Strategy]

StrategyChoice = Any
"""A strategy, a (backend, version) tuple, or None for the default."""


class _Key(NamedTuple):
    """What a strategy is looked up by: ``(SAVE_SHARDED, "zarr", 1)``."""

    action: StrategyAction
    backend: str
    version: int

    def __str__(self) -> str:
        """The key as users write it."""
        action = getattr(self.action, "value", self.action)
        return f"({action}, {self.backend!r}, {self.version!r})"


@dataclass(slots=True)
class _Registered:
    """A strategy, once it was made, and what it was made by or given as."""

    factory: Strategy | StrategyFactory
    strategy: Strategy | None = None


REGISTERED: dict[_Key, _Registered] = {}
"""The strategies that were registered here, by key."""

_SAVE, _LOAD = StrategyAction.SAVE_SHARDED, StrategyAction.LOAD_SHARDED
_SAVE_COMMON, _LOAD_COMMON = StrategyAction.SAVE_COMMON, StrategyAction.LOAD_COMMON

_LOCAL = "local_replicated"

_NO_REGISTRY = (
    "this release of Megatron-Core has no registry of strategies: dist_checkpointing.save with "
    "('safetensors', 1) or ('zarr', 1) saves torch_dist there, and its load finds no strategy; "
    "call dist_ckpt_strategies.save and load, or pass strategies to Megatron-Core's, such as "
    "PackSaveShardedStrategy() and PackLoadShardedStrategy() of "
    "dist_ckpt_strategies.strategies.safetensors"
)

_DEFAULTS: Mapping[_Key, str] = MappingProxyType(
    {
        _Key(_SAVE, "zarr", 1): "zarr.ZarrSaveShardedStrategy",
        _Key(_LOAD, "zarr", 1): "zarr.ZarrLoadShardedStrategy",
        _Key(_LOAD, "zarr", 2): "zarr.ZarrLoadShardedStrategy",
        _Key(_SAVE, "safetensors", 1): "safetensors.PackSaveShardedStrategy",
        _Key(_LOAD, "safetensors", 1): "safetensors.PackLoadShardedStrategy",
        _Key(_SAVE, _LOCAL, 1): f"{_LOCAL}.LocalReplicatedSaveShardedStrategy",
        _Key(_LOAD, _LOCAL, 1): f"{_LOCAL}.LocalReplicatedLoadShardedStrategy",
        _Key(_SAVE_COMMON, "torch", 1): "common.TorchCommonSaveStrategy",
        _Key(_LOAD_COMMON, "torch", 1): "common.TorchCommonLoadStrategy",
    }
)
"""Module and class of this package's strategy for each key, imported at the first look-up."""


@dataclass(frozen=True, slots=True)
class _OwnFactory:
    """Makes a strategy of this package. Equal factories make strategies that do the same."""

    name: str
    options: Options
    allow: tuple[Any, ...] = ()
    local: LocalOptions = field(default_factory=LocalOptions)

    def __call__(self) -> Strategy:
        module, _, cls = self.name.partition(".")
        arguments: dict[str, Any] = {"options": self.options, "allow": self.allow}
        if module == _LOCAL:
            arguments["local"] = self.local
        return getattr(import_module(f"{__package__}.{module}"), cls)(**arguments)


@raises_megatron_errors
def register(
    *,
    replace_common: bool = False,
    replace: bool = False,
    allow: Allowed = (),
    options: Options | None = None,
    local: LocalOptions | None = None,
) -> None:
    """Make this package's backends known to ``megatron.core.dist_checkpointing``.

    From then on ``dist_checkpointing.save(state_dict, path, ("zarr", 1))`` and ``load`` find this
    package's strategies, by the tuple or by a checkpoint's ``metadata.json``. Not collective; call
    it once on every rank, at start-up. The same call again changes nothing. Megatron-Core 0.17 and
    later have no registry: there a warning says what to call instead.

    Args:
        replace_common: this package's own save and load use its common strategies in any case;
            with this they also take the place of Megatron's ``("torch", 1)``, which write
            ``common.pt`` beside a marker that may still be there, and leave the other ranks
            waiting when rank 0 cannot write.
        replace: replace strategies registered under the same keys, by others or by an earlier call
            with other arguments.
        allow: further classes that objects of a checkpoint may be unpickled to.
        options: timeouts and memory bounds; by default from the environment.
        local: cliques and directories of ``("local_replicated", 1)``.

    Raises:
        StrategyExistsError: a key has another strategy, or one made with other arguments,
            and ``replace`` is not set.
        StrategyError: a variable of the environment is invalid.
    """
    if not has_registry():
        logger.warning(_NO_REGISTRY)
    chosen = options or options_from_environment()
    factories = {
        key: _OwnFactory(name, chosen, tuple(allow), local or LocalOptions())
        for key, name in _DEFAULTS.items()
    }
    common = {key: factories.pop(key) for key in _DEFAULTS if key.backend == "torch"}
    _register_everywhere(factories, replace=replace)
    if replace_common:
        _register_everywhere(common, replace=True)
        return
    for key, factory in common.items():
        if replace or key not in REGISTERED:
            _register(key, factory, replace=True)


@raises_megatron_errors
def register_default_zarr_strategies() -> None:
    """Make ``("zarr", 1)`` savable, here and in Megatron-Core's registry. Idempotent.

    Raises:
        StrategyExistsError: another strategy is registered for that, or one with other options.
    """
    _register_one(_SAVE, "zarr.ZarrSaveShardedStrategy")


@raises_megatron_errors
def register_default_tensorstore_strategies() -> None:
    """Make ``("zarr", 1)`` loadable with TensorStore, here and in Megatron-Core's registry.

    Idempotent.

    Raises:
        StrategyExistsError: another strategy is registered for that, or one with other options.
    """
    _register_one(_LOAD, "tensorstore.TensorStoreLoadShardedStrategy")


@raises_megatron_errors
def get_default_strategy(action: StrategyAction, backend: str, version: int) -> Strategy:
    """The registered strategy for a format, the same one at every look-up.

    Raises:
        StrategyNotFoundError: nothing is registered; the message lists what is.
    """
    return _found(_Key(action, backend, version))


@raises_megatron_errors
def register_default_strategy(
    action: StrategyAction,
    backend: str,
    version: int,
    strategy: Strategy | StrategyFactory,
    *,
    replace: bool = False,
) -> None:
    """Register a strategy, or a factory of one, for ``save`` and ``load``.

    Registering an equal one again changes nothing.

    Args:
        action: save or load, sharded or common.
        backend: name of the format.
        version: version of the format.
        strategy: an instance, or a callable that makes it at the first look-up.
        replace: replace the strategy that is registered there.

    Raises:
        StrategyExistsError: the key is taken and ``replace`` is not set.
        StrategyError: the action is none, the backend no str, the version no int, or the strategy
            neither a strategy nor a callable.
    """
    found: tuple[Any, ...] = (action, backend, version)
    is_key = all(map(isinstance, found, (StrategyAction, str, int)))
    if not (is_key and (_is_instance(strategy) or callable(strategy))):
        raise StrategyError(
            f"expected an action, a str, an int and a strategy or callable, found {found!r} and "
            f"{strategy!r}"
        )
    _register(_Key(action, backend, version), strategy, replace=replace)


def resolve(
    action: StrategyAction,
    choice: StrategyChoice,
    default: tuple[str, int],
    timeout_s: float | None = None,
    group: ProcessGroup | None = None,
) -> Strategy:
    """The strategy that ``save`` or ``load`` uses for an argument. Registers nothing.

    None is ``default``. What is registered comes first, then this package's strategies with the
    options of the environment, then Megatron-Core's torch_dist. A strategy of this package gets
    ``timeout_s``, and ``group`` if it was looked up, unless that is None.

    Raises a StrategyNotFoundError if there is no strategy for that backend and version, and a
    StrategyError if the choice is no strategy of this kind, and no tuple.
    """
    kind = "".join(map(str.title, action.value.split("_"))) + "Strategy"
    strategy = choice
    if not is_strategy(choice, action):
        found: Any = choice or default
        if not (isinstance(found, tuple) and len(found) == len(default)):
            raise StrategyError(
                f"expected a {kind} or a tuple (backend, version), found {choice!r}"
            )
        key = _Key(action, *found)
        if key in REGISTERED:
            strategy = _found(key)
        elif key in _DEFAULTS:
            strategy = _unregistered(key, options_from_environment())
        elif (key.backend, key.version) == TORCH_DIST:
            return torch_dist_strategy(action)
        else:
            raise _not_found(key, {*REGISTERED, *_DEFAULTS})
        if not is_strategy(strategy, action):
            raise StrategyError(f"{key}: expected a {kind} there, found {strategy!r}")
    group = None if strategy is choice else group
    if isinstance(strategy, Configured) and (timeout_s, group) != (None, None):
        strategy = strategy.with_options(timeout_s=timeout_s)
        strategy.group = group or strategy.group
    return strategy


@cache
def _unregistered(key: _Key, options: Options) -> Strategy:
    """This package's strategy for these options, one per process: saves share plan and writer."""
    return _OwnFactory(_DEFAULTS[key], options)()


def _is_instance(strategy: Any) -> bool:
    return any(is_strategy(strategy, action) for action in StrategyAction)


def _register(key: _Key, factory: Strategy | StrategyFactory, *, replace: bool) -> None:
    present = REGISTERED.get(key)
    if present is not None and present.factory == factory:
        return
    if present is not None and not replace:
        raise _exists(key, present.factory)
    REGISTERED[key] = _Registered(factory)


def _found(key: _Key) -> Strategy:
    if key not in REGISTERED:
        raise _not_found(key, REGISTERED)
    found = REGISTERED[key]
    if found.strategy is None:
        is_made = _is_instance(found.factory)
        found.strategy = found.factory if is_made else found.factory()
    return found.strategy


def _register_one(action: StrategyAction, name: str) -> None:
    factory = _OwnFactory(name, options_from_environment())
    _register_everywhere({_Key(action, "zarr", 1): factory}, replace=False)


def _register_everywhere(factories: Mapping[_Key, StrategyFactory], *, replace: bool) -> None:
    """Register one strategy per key in both registries; without ``replace`` all keys or none.

    If the installed Megatron-Core has no registry (0.17), only ours is filled.
    """
    for key, factory in factories.items():
        ours = _found(key) if key in REGISTERED else None
        theirs = registered_strategy(key.action, key.backend, key.version)
        if replace:
            continue
        if ours is not None and REGISTERED[key].factory != factory:
            raise _exists(key, type(ours).__qualname__)
        if theirs is not None and theirs is not ours:
            raise _exists(key, type(theirs).__qualname__)
    for key, factory in factories.items():
        _register(key, factory, replace=True)
        if has_registry():
            register_strategy(key.action, key.backend, key.version, _found(key))


def _exists(key: _Key, present: object) -> StrategyExistsError:
    return StrategyExistsError(
        f"{key} is already registered ({present}), with another strategy or other arguments; pass "
        "replace=True to replace it"
    )


def _not_found(key: _Key, known: Iterable[_Key]) -> StrategyNotFoundError:
    known = sorted(known, key=lambda k: (k.backend, k.version, k.action.value))
    names = ", ".join(map(str, known)) or "none"
    return StrategyNotFoundError(f"no strategy for {key}; registered: {names}")


class Configured:
    """A strategy's options, the ranks that work together, the classes that objects may be of."""

    options: Options

    def _configure(
        self,
        options: Options | None,
        allow: Allowed,
        group: ProcessGroup | None = None,
        **changes: Any,
    ) -> None:
        self.options = (options or options_from_environment()).with_changes(**changes)
        self._allow = tuple(allow)
        self.group = group
        allow_in_common_state()

    @property
    def allowed(self) -> Allowed:
        """All classes that objects may be of; Megatron-Core's list may grow meanwhile."""
        return (*default_allowed(), *self._allow)

    def with_options(self, **changes: Any) -> Self:
        """The same strategy with some other options; None leaves one as it is. Caches are shared.

        Raises:
            StrategyError: an option is out of range.
        """
        other = copy(self)
        other.options = self.options.with_changes(**changes)
        return other

    @property
    def can_handle_sharded_objects(self) -> bool:
        """ShardedObjects are saved and loaded too."""
        return True

    def communicator(self, purpose: str, detail: str = "") -> Communicator:
        """The ranks that work together, for one thing that they do."""
        return open_communicator(
            self.group, timeout_s=self.options.timeout_s, purpose=purpose, detail=detail
        )


def require_own(own: str, versions: Sequence[int], backend: str, version: int) -> None:
    """Raise IncompatibleVersionError unless backend and version are a strategy's own."""
    if backend != own or version not in versions:
        known = " or ".join(str((own, known)) for known in versions)
        raise IncompatibleVersionError(
            f"expected backend {known}, found ({backend!r}, {version!r}); use the "
            "strategy of that backend"
        )
