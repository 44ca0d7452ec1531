"""The types of Megatron-Core that the rest of the package builds on."""

from __future__ import annotations

from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies.base import (
    AsyncSaveShardedStrategy,
    LoadCommonStrategy,
    LoadShardedStrategy,
    SaveCommonStrategy,
    SaveShardedStrategy,
)
from megatron.core.dist_checkpointing.validation import StrictHandling

try:
    from megatron.core.dist_checkpointing.strategies.base import StrategyAction
except ImportError:  # 0.17 removed the registry and its enum
    from enum import Enum

    class StrategyAction(Enum):  # type: ignore[no-redef]
        """Specifies save vs load and sharded vs common action."""

        LOAD_COMMON = "load_common"
        LOAD_SHARDED = "load_sharded"
        SAVE_COMMON = "save_common"
        SAVE_SHARDED = "save_sharded"


__all__ = [
    "AsyncSaveShardedStrategy",
    "CheckpointingException",
    "LoadCommonStrategy",
    "LoadShardedStrategy",
    "SaveCommonStrategy",
    "SaveShardedStrategy",
    "ShardedObject",
    "ShardedTensor",
    "StrategyAction",
    "StrictHandling",
]
