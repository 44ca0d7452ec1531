"""Megatron-Core's own registry of default strategies, where the installed version has one."""

from __future__ import annotations

import inspect
from typing import Any

from dist_ckpt_strategies.megatron.bases import CheckpointingException, StrategyAction, base


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


def torch_dist_strategy(action: StrategyAction) -> Any:
    """Megatron-Core's own strategy for ``("torch_dist", 1)``.

    Raises:
        CheckpointingException: it has none for this action.
    """
    if has_registry():
        return base.get_default_strategy(action, "torch_dist", 1)
    from megatron.core.dist_checkpointing.strategies.torch import (  # noqa: PLC0415 - takes seconds
        TorchDistLoadShardedStrategy,
        TorchDistSaveShardedStrategy,
    )

    if action is StrategyAction.SAVE_SHARDED:
        return _without_arguments(TorchDistSaveShardedStrategy, "torch_dist", 1)
    if action is StrategyAction.LOAD_SHARDED:
        return TorchDistLoadShardedStrategy()
    raise CheckpointingException(f"torch_dist has no strategy for {action.value}")


def _without_arguments(cls: Any, *arguments: Any) -> Any:
    """An object of a class that takes its backend and version, or no longer does."""
    takes = list(inspect.signature(cls).parameters)[: len(arguments)]
    return cls(*arguments) if takes == ["backend", "version"] else cls()
