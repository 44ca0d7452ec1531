"""Get training going again: from the memory of other ranks, or from the newest checkpoint."""

from __future__ import annotations

from dist_ckpt_strategies.recovery.checksums import MemoryChecksumManager
from dist_ckpt_strategies.recovery.latest import Attempt, Loaded, Tier, load_latest
from dist_ckpt_strategies.recovery.manager import CheckpointManager
from dist_ckpt_strategies.recovery.peft import PEFTCheckpointManager
from dist_ckpt_strategies.recovery.provider import Phase, StateProvider
from dist_ckpt_strategies.recovery.torch_provider import TorchStateProvider
from dist_ckpt_strategies.recovery.update_lock import ParameterUpdateLock

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
