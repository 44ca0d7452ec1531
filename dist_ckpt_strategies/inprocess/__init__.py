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

_HOMES = {
    "Abort": "abort",
    "AbortTransformerEngine": "abort",
    "ChainedHealthCheck": "health_check",
    "CheckpointlessAbortManager": "abort",
    "CheckpointlessFinalizeCleanup": "finalize",
    "Compose": "abort",
    "Coordinator": "coordinator",
    "CudaHealthCheck": "health_check",
    "Epoch": "coordinator",
    "Fault": "coordinator",
    "FaultCounter": "health_check",
    "FaultMode": "coordinator",
    "Finalize": "finalize",
    "HPAbortTorchDistributed": "abort",
    "HPCallWrapper": "wrap",
    "HPCheckpointingAbort": "abort",
    "HPDataLoaderAbort": "abort",
    "HPState": "health_check",
    "HPWrapper": "wrap",
    "HealthCheck": "health_check",
    "RankInfo": "coordinator",
    "RankShouldRestart": "interruption",
}

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
    """Import a public name from its home the first time it is asked for."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    """The public names."""
    return sorted([*globals(), *__all__])
