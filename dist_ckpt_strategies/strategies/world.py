"""All ranks and their options, as the entry points of saves and loads take them."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from dist_ckpt_strategies.comm.base import Communicator
from dist_ckpt_strategies.comm.torch_communicator import open_communicator
from dist_ckpt_strategies.config import Options, options_from_environment
from dist_ckpt_strategies.errors import StrategyError
from dist_ckpt_strategies.storage.time_limit import time_limit

P = ParamSpec("P")
T = TypeVar("T")


def open_world(purpose: str, detail: str, timeout_s: float | None) -> Communicator:
    """All ranks. Options that this rank cannot make are for the first agreed step to raise."""
    return open_communicator(None, timeout_s=_limit_s(timeout_s), purpose=purpose, detail=detail)


def with_time_limit(function: Callable[P, T]) -> Callable[P, T]:
    """The same entry point; all its storage work shares the limit of its argument ``timeout_s``."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        timeout_s = kwargs.get("timeout_s")
        with time_limit(_limit_s(timeout_s if isinstance(timeout_s, (int, float)) else None)):
            return function(*args, **kwargs)

    return call


def _limit_s(timeout_s: float | None) -> float:
    try:
        return entry_options(timeout_s).timeout_s
    except StrategyError:
        return Options().timeout_s


def entry_options(timeout_s: float | None) -> Options:
    """The environment's, and the time limit that the caller has given, in seconds.

    Raises:
        StrategyError: they cannot be.
    """
    return options_from_environment().with_changes(timeout_s=timeout_s)
