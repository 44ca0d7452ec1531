"""Checkpoints on the nodes' own disks, copied between ranks; names and signatures are NVRx's."""

from __future__ import annotations

from dist_ckpt_strategies.errors import NoReplicasAvailableError
from dist_ckpt_strategies.local.base_state_dict import TensorAwareStateDict
from dist_ckpt_strategies.local.basic_state_dict import BasicTensorAwareStateDict
from dist_ckpt_strategies.local.manager import LocalCheckpointManager
from dist_ckpt_strategies.local.mcore_state_dict import MCoreTensorAwareStateDict
from dist_ckpt_strategies.local.plan import ExchangePlan
from dist_ckpt_strategies.local.replication import (
    CliqueReplicationStrategy,
    LazyCliqueReplicationStrategy,
    LazyReplicationStrategyBuilder,
    ReplicationStrategy,
)
from dist_ckpt_strategies.local.requests import LocalSaveRequest
from dist_ckpt_strategies.local.shard_distribution import ShardDistribution
from dist_ckpt_strategies.local.state_codecs import StateCodec, StateCodecs

__all__ = [
    "BasicTensorAwareStateDict",
    "CliqueReplicationStrategy",
    "ExchangePlan",
    "LazyCliqueReplicationStrategy",
    "LazyReplicationStrategyBuilder",
    "LocalCheckpointManager",
    "LocalSaveRequest",
    "MCoreTensorAwareStateDict",
    "NoReplicasAvailableError",
    "ReplicationStrategy",
    "ShardDistribution",
    "StateCodec",
    "StateCodecs",
    "TensorAwareStateDict",
]
