"""Get training going again: from the memory of other ranks, or from the newest checkpoint.

What needs Megatron-Core is imported on first use: its import would make up most of the time until
a process that has died is replaced. The search for the newest checkpoint is the manager's.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dist_ckpt_strategies.recovery.manager import CheckpointManager, InMemoryCheckpointManager
from dist_ckpt_strategies.recovery.peft import PEFTCheckpointManager
from dist_ckpt_strategies.recovery.plan import Phase
from dist_ckpt_strategies.recovery.provider import (
    MemoryChecksumManager,
    ParameterUpdateLock,
    StateProvider,
)
from dist_ckpt_strategies.recovery.torch_provider import TorchStateProvider

if TYPE_CHECKING:
    from dist_ckpt_strategies.recovery.megatron_provider import MegatronStateProvider

_HOMES = {
    "Attempt": "manager.candidates",
    "Loaded": "manager.candidates",
    "MegatronStateProvider": "recovery.megatron_provider",
    "Tier": "manager.candidates",
    "load_latest": "manager.latest",
}

__all__ = [
    "Attempt",
    "CheckpointManager",
    "InMemoryCheckpointManager",
    "Loaded",
    "MegatronStateProvider",
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
    """A name of a module that needs Megatron-Core, on first use."""
    if name in _HOMES:
        return getattr(import_module(f"dist_ckpt_strategies.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
