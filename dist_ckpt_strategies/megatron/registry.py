"""Megatron-Core's own registry of default strategies, where the installed version has one."""

from __future__ import annotations

from typing import Any

import megatron.core
from megatron.core.dist_checkpointing.strategies import base

from dist_ckpt_strategies.errors import StrategyError
from dist_ckpt_strategies.megatron.bases import StrategyAction


def megatron_version() -> str:
    """The installed version of Megatron-Core."""
    return str(megatron.core.__version__)


def has_registry() -> bool:
    """Whether ``dist_checkpointing.save/load`` look strategies up, as up to 0.16."""
    return hasattr(base, "default_strategies") and hasattr(base, "register_default_strategy")


def registered_strategy(action: StrategyAction, backend: str, version: int) -> Any | None:
    """What Megatron-Core has under a key; None where there is nothing, or no registry."""
    if not has_registry():
        return None
    return base.default_strategies[action.value].get((backend, version))


def register_strategy(action: StrategyAction, backend: str, version: int, strategy: Any) -> None:
    """Put a strategy into Megatron-Core's registry, in place of what is there."""
    base.register_default_strategy(action, backend, version, strategy)


def default_strategy(action: StrategyAction, backend: str, version: int) -> Any:
    """Megatron-Core's own default, torch_dist and the common ones registered on the way.

    Raises:
        CheckpointingException: Megatron-Core has none.
    """
    return base.get_default_strategy(action, backend, version)


def require_registry(what: str) -> None:
    """Raise where the installed Megatron-Core would use torch_dist in place of what it is given.

    Raises:
        StrategyError: Megatron-Core >= 0.17.
    """
    if not has_registry():
        raise StrategyError(
            f"{what}: Megatron-Core {megatron_version()} has no strategy registry and replaces "
            "foreign strategies by torch_dist; install megatron-core 0.16"
        )
