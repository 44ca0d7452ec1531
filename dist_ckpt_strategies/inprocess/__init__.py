"""Restart a block of training in place: healthy processes stay alive when one rank fails."""

from dist_ckpt_strategies.inprocess.abort import (
    Abort,
    AbortTransformerEngine,
    CheckpointlessAbortManager,
    Compose,
    HPAbortTorchDistributed,
    HPCheckpointingAbort,
    HPDataLoaderAbort,
)
from dist_ckpt_strategies.inprocess.attempt import RankShouldRestart
from dist_ckpt_strategies.inprocess.finalize import CheckpointlessFinalizeCleanup, Finalize
from dist_ckpt_strategies.inprocess.health_check import (
    ChainedHealthCheck,
    CudaHealthCheck,
    FaultCounter,
    HealthCheck,
    HPState,
)
from dist_ckpt_strategies.inprocess.rendezvous import Fault, FaultMode, RankInfo, RendezvousClient
from dist_ckpt_strategies.inprocess.wrap import HPCallWrapper, HPWrapper

__all__ = [
    "Abort",
    "AbortTransformerEngine",
    "ChainedHealthCheck",
    "CheckpointlessAbortManager",
    "CheckpointlessFinalizeCleanup",
    "Compose",
    "CudaHealthCheck",
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
    "RendezvousClient",
]
