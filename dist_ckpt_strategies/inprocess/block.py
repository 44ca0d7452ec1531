"""What HPWrapper is given: its options, checked at once, and the block with its parameters."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable
from numbers import Integral, Real
from typing import Any

from dist_ckpt_strategies.config import require_in_range
from dist_ckpt_strategies.errors import StrategyError

_LONGEST_S = 1e9
_LIMITS = ("barrier_timeout_s", "finish_timeout_s", "abort_timeout", "progress_timeout_s")
_COUNTS = ("max_attempts", "max_idle_attempts")
_NEEDED = _LIMITS[:2]
"""The others may be None."""


def require_usable(options: Any) -> None:
    """Raise unless the options can be used: times and counts above 0, and parts to be called.

    Args:
        options: has them as attributes, by the names of HPWrapper's parameters.

    Raises:
        StrategyError: one cannot be used; names it.
    """
    for name in (*_LIMITS, *_COUNTS):
        kind, most = (Real, _LONGEST_S) if name in _LIMITS else (Integral, math.inf)
        value = getattr(options, name)
        if value is not None or name in _NEEDED:
            require_in_range(name, kind, most, value)
    for name in ("abort", "finalize", "health_check", "hp_api_factory"):
        value = getattr(options, name)
        # Called with the state, a class would make an object, and do nothing.
        if isinstance(value, type) and name != "hp_api_factory":
            raise StrategyError(
                f"option {name}: expected an object, found the class; write {value.__name__}()"
            )
        if value is not None and not callable(value):
            raise StrategyError(f"option {name}: expected a function, found {value!r}")


def parameter_of(kind: type, fn: Callable[..., Any]) -> str | None:
    """The name of the parameter annotated with ``kind``, alone or among others; None: none is."""
    try:
        parameters = inspect.signature(fn).parameters
    except ValueError:  # some functions that are written in C do not say
        return None
    for name, parameter in parameters.items():
        if re.search(rf"\b{kind.__name__}\b", str(parameter.annotation)):
            return name
    return None
