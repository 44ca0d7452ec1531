"""What HPWrapper is given: its options, checked at once, and the block with its parameters."""

from __future__ import annotations

import inspect
import math
import re
import typing
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from types import MappingProxyType
from typing import Any

from dist_ckpt_strategies.config import require_in_range
from dist_ckpt_strategies.errors import StrategyError

_LONGEST_S = 1e9

_RANGES: Mapping[str, tuple[type[Any], float]] = MappingProxyType(
    {
        "abort_timeout": (Real, _LONGEST_S),
        "barrier_timeout_s": (Real, _LONGEST_S),
        "finish_timeout_s": (Real, _LONGEST_S),
        "progress_timeout_s": (Real, _LONGEST_S),
        "max_attempts": (Integral, math.inf),
        "max_idle_attempts": (Integral, math.inf),
    }
)
_MAY_BE_NONE = frozenset(
    {"abort_timeout", "progress_timeout_s", "max_attempts", "max_idle_attempts"}
)
_CALLED = ("abort", "finalize", "health_check")


def require_usable(options: Any) -> None:
    """Raise unless the options can be used: times and counts above 0, and parts to be called.

    Args:
        options: has them as attributes, by the names of HPWrapper's parameters.

    Raises:
        StrategyError: one cannot be used; names it.
    """
    for name, (kind, limit) in _RANGES.items():
        value = getattr(options, name)
        if value is not None or name not in _MAY_BE_NONE:
            require_in_range(name, kind, limit, value)
    for name in _CALLED:
        _require_called(name, getattr(options, name))
    factory = options.hp_api_factory
    if factory is not None and not callable(factory):
        raise StrategyError(f"option hp_api_factory: expected a function, found {factory!r}")


def _require_called(name: str, value: Any) -> None:
    if isinstance(value, type):  # called with the state it would make an object, and do nothing
        raise StrategyError(
            f"option {name}: expected an object, found the class; write {value.__name__}()"
        )
    if value is not None and not callable(value):
        raise StrategyError(f"option {name}: expected a function of the state, found {value!r}")


def parameter_of(kind: type, fn: Callable[..., Any]) -> str | None:
    """The name of the parameter annotated with ``kind``, alone or among others; None: none is."""
    try:
        parameters = inspect.signature(fn).parameters
    except ValueError:  # some functions that are written in C do not say
        return None
    for name, parameter in parameters.items():
        if _names(kind, parameter.annotation):
            return name
    return None


def _names(kind: type, annotation: Any) -> bool:
    if isinstance(annotation, typing.ForwardRef):
        annotation = annotation.__forward_arg__
    if isinstance(annotation, str):
        return re.search(rf"\b{kind.__name__}\b", annotation) is not None
    if annotation is kind:
        return True
    return any(_names(kind, one) for one in typing.get_args(annotation))
