"""Get training going again: from the memory of other ranks, or from the newest checkpoint.

What looks for checkpoints is imported on first use: it needs Megatron-Core, whose import would
make up most of the time until a process that has died is replaced.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dist_ckpt_strategies.recovery.checksums import MemoryChecksumManager
from dist_ckpt_strategies.recovery.manager import CheckpointManager
from dist_ckpt_strategies.recovery.peft import PEFTCheckpointManager
from dist_ckpt_strategies.recovery.provider import Phase, StateProvider
from dist_ckpt_strategies.recovery.torch_provider import TorchStateProvider
from dist_ckpt_strategies.recovery.update_lock import ParameterUpdateLock

if TYPE_CHECKING:
    from dist_ckpt_strategies.recovery.latest import Attempt, Loaded, Tier, load_latest

_OF_LATEST = frozenset({"Attempt", "Loaded", "Tier", "load_latest"})

__all__ = [
    "Attempt",
    "CheckpointManager",
    "Loaded",
    "MemoryChecksumManager",
    "PEFTCheckpointManager",
    "ParameterUpdateLock",
    "Phase",
    "StateProvider",
    "Tier",
    "TorchStateProvider",
    "load_latest",
]


def __getattr__(name: str) -> Any:
    """A name of ``recovery.latest``, on first use.

    Raises:
        AttributeError: there is no such name.
    """
    if name in _OF_LATEST:
        return getattr(import_module("dist_ckpt_strategies.recovery.latest"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
