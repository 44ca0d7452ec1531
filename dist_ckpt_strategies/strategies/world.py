"""All ranks and their options, as the entry points of saves and loads take them."""

from __future__ import annotations

from dist_ckpt_strategies.comm.base import Communicator
from dist_ckpt_strategies.comm.torch_communicator import open_communicator
from dist_ckpt_strategies.config import Options, options_from_environment
from dist_ckpt_strategies.errors import StrategyError


def open_world(purpose: str, detail: str, timeout_s: float | None) -> Communicator:
    """All ranks. Options that this rank cannot make are for the first agreed step to raise."""
    try:
        limit_s = entry_options(timeout_s).timeout_s
    except StrategyError:
        limit_s = Options().timeout_s
    return open_communicator(None, timeout_s=limit_s, purpose=purpose, detail=detail)


def entry_options(timeout_s: float | None) -> Options:
    """The environment's, and the time limit that the caller has given, in seconds.

    Raises:
        StrategyError: they cannot be.
    """
    return options_from_environment().with_changes(timeout_s=timeout_s)
