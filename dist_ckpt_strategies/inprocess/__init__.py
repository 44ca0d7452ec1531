"""Restart a block of training in place: healthy processes stay alive when one rank fails.

Names are imported on first use: what the supervisor needs must not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dist_ckpt_strategies.inprocess.abort import (
        Abort,
        AbortTransformerEngine,
        CheckpointlessAbortManager,
        Compose,
        HPAbortTorchDistributed,
        HPCheckpointingAbort,
        HPDataLoaderAbort,
    )
    from dist_ckpt_strategies.inprocess.coordinator import (
        Coordinator,
        Epoch,
        Fault,
        FaultMode,
        RankInfo,
    )
    from dist_ckpt_strategies.inprocess.finalize import CheckpointlessFinalizeCleanup, Finalize
    from dist_ckpt_strategies.inprocess.health_check import (
        ChainedHealthCheck,
        CudaHealthCheck,
        FaultCounter,
        HealthCheck,
        HPState,
    )
    from dist_ckpt_strategies.inprocess.interruption import RankShouldRestart
    from dist_ckpt_strategies.inprocess.wrap import HPCallWrapper, HPWrapper

_MODULES = ("coordinator", "abort", "finalize", "health_check", "interruption", "wrap")
"""Where the public names are; the first of them imports no torch."""


__all__ = [
    "Abort",
    "AbortTransformerEngine",
    "ChainedHealthCheck",
    "CheckpointlessAbortManager",
    "CheckpointlessFinalizeCleanup",
    "Compose",
    "Coordinator",
    "CudaHealthCheck",
    "Epoch",
    "Fault",
    "FaultCounter",
    "FaultMode",
    "Finalize",
    "HPAbortTorchDistributed",
    "HPCallWrapper",
    "HPCheckpointingAbort",
    "HPDataLoaderAbort",
    "HPState",
    "HPWrapper",
    "HealthCheck",
    "RankInfo",
    "RankShouldRestart",
]


def __getattr__(name: str) -> Any:
    """Import a public name the first time it is asked for."""
    for module in _MODULES if name in __all__ else ():
        found = import_module(f"{__name__}.{module}")
        if name in vars(found):
            return vars(found)[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names."""
    return sorted([*globals(), *__all__])
