"""The types of Megatron-Core that the rest of the package builds on.

0.17 removed the registry, its enum and more; what is missing, be it the whole module, gets a
stand-in of the same name and attributes, so that our strategies stay what they are.
"""

from __future__ import annotations

from enum import Enum
from types import ModuleType
from typing import TYPE_CHECKING

from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.validation import StrictHandling

try:
    from megatron.core.dist_checkpointing.strategies import base
except ImportError:
    base = ModuleType("base")

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
    "base",
]


class _Action(Enum):
    """Specifies save vs load and sharded vs common action."""

    LOAD_COMMON = "load_common"
    LOAD_SHARDED = "load_sharded"
    SAVE_COMMON = "save_common"
    SAVE_SHARDED = "save_sharded"


class _Saver:
    """Something that saves in a format.

    Attributes:
        backend: name of the format.
        version: version of the format.
    """

    def __init__(self, backend: str, version: int) -> None:
        self.backend = backend
        self.version = version

    @property
    def can_handle_sharded_objects(self) -> bool:
        """Whether ShardedObjects are saved too."""
        return False

    def __str__(self) -> str:
        """Class and format, for messages."""
        return f"{type(self).__name__}({self.backend}, {self.version})"


class _Loader:
    """Something that loads from a format."""

    @property
    def can_handle_sharded_objects(self) -> bool:
        """Whether ShardedObjects are loaded too."""
        return False


class _ShardedSaver(_Saver):
    """Saves the sharded part of a state dict."""


class _AsyncShardedSaver(_ShardedSaver):
    """Saves it in the background too."""


class _CommonSaver(_Saver):
    """Saves the common part of a state dict."""


class _ShardedLoader(_Loader):
    """Loads the sharded part of a state dict."""


class _CommonLoader(_Loader):
    """Loads the common part of a state dict."""


if TYPE_CHECKING:
    from megatron.core.dist_checkpointing.strategies.base import (
        AsyncSaveShardedStrategy,
        LoadCommonStrategy,
        LoadShardedStrategy,
        SaveCommonStrategy,
        SaveShardedStrategy,
        StrategyAction,
    )
else:
    StrategyAction = getattr(base, "StrategyAction", _Action)
    SaveShardedStrategy = getattr(base, "SaveShardedStrategy", _ShardedSaver)
    AsyncSaveShardedStrategy = getattr(base, "AsyncSaveShardedStrategy", _AsyncShardedSaver)
    SaveCommonStrategy = getattr(base, "SaveCommonStrategy", _CommonSaver)
    LoadShardedStrategy = getattr(base, "LoadShardedStrategy", _ShardedLoader)
    LoadCommonStrategy = getattr(base, "LoadCommonStrategy", _CommonLoader)
