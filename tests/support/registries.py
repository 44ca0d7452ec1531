"""The registries of strategies, as before any registration, and put back afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from megatron.core.dist_checkpointing.strategies import base

from dist_ckpt_strategies.strategies.registry import _REGISTERED


@contextmanager
def fresh_registries() -> Iterator[None]:
    """Ours is empty and Megatron-Core's holds its own strategies; both are restored at the end."""
    theirs = {action: dict(found) for action, found in base.default_strategies.items()}
    ours = dict(_REGISTERED)
    _REGISTERED.clear()
    for action, found in theirs.items():
        base.default_strategies[action] = {
            key: strategy
            for key, strategy in found.items()
            if not type(strategy).__module__.startswith("dist_ckpt_strategies")
        }
    try:
        yield
    finally:
        base.default_strategies.clear()
        base.default_strategies.update(theirs)
        _REGISTERED.clear()
        _REGISTERED.update(ours)
