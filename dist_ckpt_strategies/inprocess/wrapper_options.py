"""What HPWrapper is given: refused at once if it could only fail, or hang, at the first fault."""

from __future__ import annotations

import math
from collections.abc import Mapping
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
