"""Megatron-Core's wrappers around strategies of others."""

from __future__ import annotations

from typing import Any

from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelSaveStrategyWrapper,
)

from dist_ckpt_strategies.megatron.shards import StateDict


def parallel_base(strategy: Any) -> Any | None:
    """What a FullyParallelSaveStrategyWrapper wraps; None for another strategy."""
    return (
        strategy.base_strategy if isinstance(strategy, FullyParallelSaveStrategyWrapper) else None
    )


def spread_main_replicas(wrapper: Any, sharded: StateDict) -> None:
    """Deal the main replicas out among the wrapper's ranks; changes the ``replica_id`` of each.

    Collective over the wrapper's group. What its ``save`` does before it calls its base.
    """
    wrapper.apply_saving_parallelization(sharded)
