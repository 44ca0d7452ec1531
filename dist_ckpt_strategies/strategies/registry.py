"""From an argument to a strategy, its options and its ranks; what is registered, and our own."""

import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from types import MappingProxyType
from typing import Any

from dist_ckpt_strategies.comm.base import Communicator
from dist_ckpt_strategies.comm.process_group import ProcessGroup, is_distributed
from dist_ckpt_strategies.comm.torch_communicator import open_communicator
from dist_ckpt_strategies.config import (
    LocalOptions,
    Options,
    options_from_environment,
    rank_from_environment,
)
from dist_ckpt_strategies.errors import StrategyError
from dist_ckpt_strategies.formats.locations import PACKS
from dist_ckpt_strategies.formats.objects import Allowed, allowing
from dist_ckpt_strategies.megatron.types import (
    TORCH_DIST,
    StrategyAction,
    has_registry,
    is_strategy,
    raises_megatron_errors,
    register_strategy,
    registered_strategy,
    torch_dist_strategy,
)
from dist_ckpt_strategies.strategies.configured import Configured

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

StrategyChoice = Any
"""A strategy, a (backend, version) tuple, or None for the default."""


_Key = tuple[StrategyAction, str, int]
"""The key of a strategy: ``(SAVE_SHARDED, "zarr", 1)``."""

REGISTERED: dict[_Key, tuple[Strategy | Callable[[], Strategy], Strategy | None]] = {}
"""The registry: by key a factory or a strategy, and the strategy that the factory has made."""

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
        (_SAVE, "zarr", 1): "zarr.ZarrSaveShardedStrategy",
        (_LOAD, "zarr", 1): "zarr.ZarrLoadShardedStrategy",
        (_LOAD, "zarr", 2): "zarr.ZarrLoadShardedStrategy",
        (_SAVE, "safetensors", 1): "safetensors.PackSaveShardedStrategy",
        (_LOAD, "safetensors", 1): "safetensors.PackLoadShardedStrategy",
        (_SAVE, _LOCAL, 1): f"{_LOCAL}.LocalReplicatedSaveShardedStrategy",
        (_LOAD, _LOCAL, 1): f"{_LOCAL}.LocalReplicatedLoadShardedStrategy",
        (_SAVE_COMMON, "torch", 1): "common.TorchCommonSaveStrategy",
        (_LOAD_COMMON, "torch", 1): "common.TorchCommonLoadStrategy",
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
        StrategyError: a key has another strategy, or one made with other arguments, and
            ``replace`` is not set; or a variable of the environment is invalid.
    """
    if not has_registry():
        logger.warning(_NO_REGISTRY)
    chosen = options or options_from_environment()
    factories = {
        key: _OwnFactory(name, chosen, tuple(allow), local or LocalOptions())
        for key, name in _DEFAULTS.items()
    }
    common = {key: factories.pop(key) for key in _DEFAULTS if key[1] == "torch"}
    _register_everywhere(factories, replace=replace)
    if replace_common:
        _register_everywhere(common, replace=True)
        return
    for key, factory in common.items():
        if replace or key not in REGISTERED:
            _put(key, factory)


_Held = Mapping[_Key, tuple[Any, Strategy | None]]


def registered_formats() -> _Held:
    """The entries of both registries under the keys of ``register``, for ``put_back``."""
    return {key: (REGISTERED.get(key), registered_strategy(*key)) for key in _DEFAULTS}


def put_back(held: _Held) -> None:
    """Have both registries hold what they held before. Rank-local."""
    for key, (ours, theirs) in held.items():
        REGISTERED.pop(key, None)
        if ours is not None:
            REGISTERED[key] = ours
        if has_registry():
            register_strategy(*key, theirs)


@raises_megatron_errors
def register_default_zarr_strategies() -> None:
    """Make ``("zarr", 1)`` savable, here and in Megatron-Core's registry. Idempotent.

    Raises:
        StrategyError: another strategy is registered for that, or one with other options.
    """
    _register_one(_SAVE, "zarr.ZarrSaveShardedStrategy")


@raises_megatron_errors
def register_default_tensorstore_strategies() -> None:
    """Make ``("zarr", 1)`` loadable with TensorStore, here and in Megatron-Core's registry.

    Idempotent.

    Raises:
        StrategyError: another strategy is registered for that, or one with other options.
    """
    _register_one(_LOAD, "tensorstore.TensorStoreLoadShardedStrategy")


@raises_megatron_errors
def get_default_strategy(action: StrategyAction, backend: str, version: int) -> Strategy:
    """The registered strategy for a format, the same one at every look-up.

    Raises:
        StrategyError: nothing is registered; the message lists what is.
    """
    key = (action, backend, version)
    if key not in REGISTERED:
        raise _not_found(key, REGISTERED)
    factory, strategy = REGISTERED[key]
    if strategy is None:
        strategy = factory if _is_instance(factory) else factory()
        REGISTERED[key] = factory, strategy
    return strategy


@raises_megatron_errors
def register_default_strategy(
    action: StrategyAction,
    backend: str,
    version: int,
    strategy: Strategy | Callable[[], Strategy],
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
        StrategyError: the key is taken and ``replace`` is not set.
        StrategyError: the action is none, the backend no str, the version no int, or the strategy
            neither a strategy nor a callable.
    """
    given: tuple[Any, ...] = (action, backend, version)
    is_key = all(map(isinstance, given, (StrategyAction, str, int)))
    if not (is_key and (_is_instance(strategy) or callable(strategy))):
        raise StrategyError(
            f"expected an action, a str, an int and a strategy or callable, found {given!r} and "
            f"{strategy!r}"
        )
    key = (action, backend, version)
    present, _ = REGISTERED.get(key, (strategy, None))
    if present != strategy and not replace:
        raise _exists(key, present)
    _put(key, strategy)


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

    Raises a StrategyError if there is no strategy for that backend and version, or if the choice
    is no strategy of this kind, and no tuple.
    """
    strategy, kind = choice, "".join(map(str.title, action.value.split("_"))) + "Strategy"
    if not is_strategy(choice, action):
        named: Any = choice or default
        if not (isinstance(named, tuple) and len(named) == len(default)):
            raise StrategyError(
                f"expected a {kind} or a tuple (backend, version), found {choice!r}"
            )
        key = (action, *named)
        if key in REGISTERED:
            strategy = get_default_strategy(*key)
        elif key in _DEFAULTS:
            strategy = _made(_OwnFactory(_DEFAULTS[key], options_from_environment()))
        elif named == TORCH_DIST:
            return torch_dist_strategy(action)
        else:
            raise _not_found(key, {*REGISTERED, *_DEFAULTS})
        if not is_strategy(strategy, action):
            raise StrategyError(f"{_text(key)}: expected a {kind} there, found {strategy!r}")
    else:
        group = None
    if isinstance(strategy, Configured) and (timeout_s, group) != (None, None):
        strategy = strategy.with_options(timeout_s=timeout_s)
        strategy.group = group or strategy.group
    return strategy


Call = tuple[Communicator, Options, Strategy, Strategy, Exception | None]
"""The parts of a save or a load: the ranks; the options, those of the strategy where it
is one of this package; the strategy to call, and that inside of wrappers, both None after an error;
an error in the arguments, for the first collective to raise."""


def open_call(
    action: StrategyAction,
    choice: StrategyChoice,
    detail: str,
    changes: Mapping[str, Any],
    allow: Allowed,
    process_group: ProcessGroup | None = None,
) -> Call:
    """The strategy of a save or load, and what it is carried out with. Rank-local; raises nothing.

    Ranks and options are those of the strategy, where it is one of this package, with ``changes``
    of options; None leaves one as it is.
    """
    options, group, strategy, base, invalid = None, None, None, None, None
    purpose, timeout_s = action.value.partition("_")[0], changes["timeout_s"]
    try:
        if purpose == "save":
            _require_process_group()
        # Reported if invalid, whatever the strategy's are.
        options = options_from_environment().with_changes(**changes)
        with allowing(allow):  # refuses what cannot be allowed
            strategy = resolve(action, choice, PACKS.sharded_format, timeout_s, process_group)
        base = inner_strategy(strategy)
        if isinstance(base, Configured):
            options, group = base.options, base.group
        options = options.with_changes(**changes)
    except Exception as error:  # noqa: BLE001 - raised in the first collective
        invalid = error
    options, group = options or Options(), process_group or group
    comm = open_communicator(group, timeout_s=options.timeout_s, purpose=purpose, detail=detail)
    return comm, options, strategy, base, invalid


def _require_process_group() -> None:
    size = 1
    with suppress(StrategyError):  # it is not set as torchrun sets it
        size = 1 if is_distributed() else rank_from_environment()[1]
    if size > 1:
        raise StrategyError(
            f"torch.distributed is not initialised, but WORLD_SIZE says that there are {size} "
            "ranks: each would save alone; call torch.distributed.init_process_group first"
        )


def inner_strategy(strategy: Any) -> Any:
    """The strategy inside of wrappers; one that is in none itself."""
    while hasattr(strategy, "base_strategy"):
        strategy = strategy.base_strategy
    return strategy


@cache
def _made(factory: _OwnFactory) -> Strategy:
    """A strategy that is not registered, one per process: saves share plan and writer."""
    return factory()


def _is_instance(strategy: Any) -> bool:
    return any(is_strategy(strategy, action) for action in StrategyAction)


def _put(key: _Key, factory: Strategy | Callable[[], Strategy]) -> None:
    if key not in REGISTERED or REGISTERED[key][0] != factory:
        REGISTERED[key] = factory, None


def _register_one(action: StrategyAction, name: str) -> None:
    factory = _OwnFactory(name, options_from_environment())
    _register_everywhere({(action, "zarr", 1): factory}, replace=False)


def _register_everywhere(
    factories: Mapping[_Key, Callable[[], Strategy]], *, replace: bool
) -> None:
    """Register one strategy per key in both registries; without ``replace`` all keys or none.

    If the installed Megatron-Core has no registry (0.17), only ours is filled.
    """
    for key, factory in () if replace else factories.items():
        ours = get_default_strategy(*key) if key in REGISTERED else None
        theirs = registered_strategy(*key)
        if ours is not None and REGISTERED[key][0] != factory:
            raise _exists(key, type(ours).__qualname__)
        if theirs is not None and theirs is not ours:
            raise _exists(key, type(theirs).__qualname__)
    for key, factory in factories.items():
        _put(key, factory)
        if has_registry():
            register_strategy(*key, get_default_strategy(*key))


def _exists(key: _Key, present: object) -> StrategyError:
    return StrategyError(
        f"{_text(key)} is already registered ({present}), with another strategy or other "
        "arguments; pass replace=True to replace it"
    )


def _not_found(key: _Key, keys: Iterable[_Key]) -> StrategyError:
    listed = sorted((backend, version, action.value) for action, backend, version in keys)
    names = ", ".join(_text((action, *of_format)) for *of_format, action in listed) or "none"
    return StrategyError(f"no strategy for {_text(key)}; registered: {names}")


def _text(key: tuple[Any, ...]) -> str:
    """The key as users write it."""
    action, backend, version = key
    return f"({getattr(action, 'value', action)}, {backend!r}, {version!r})"
