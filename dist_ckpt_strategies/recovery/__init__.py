"""Get training going again from the memory of other ranks.

The provider that needs Megatron-Core is imported on first use: its import would make up most of the
time until a process that has died is replaced.
"""

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

__all__ = [
    "CheckpointManager",
    "InMemoryCheckpointManager",
    "MegatronStateProvider",
    "MemoryChecksumManager",
    "PEFTCheckpointManager",
    "ParameterUpdateLock",
    "Phase",
    "StateProvider",
    "TorchStateProvider",
]


def __getattr__(name: str) -> Any:
    """A name of a module that needs Megatron-Core, on first use."""
    if name == "MegatronStateProvider":
        from dist_ckpt_strategies.recovery import megatron_provider  # noqa: PLC0415

        return megatron_provider.MegatronStateProvider
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
