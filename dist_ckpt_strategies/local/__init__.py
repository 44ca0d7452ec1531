"""Checkpoints on the nodes' own disks, copied between ranks; names and signatures are NVRx's.

Names are imported on first use: ``dist-ckpt inspect`` and ``verify`` must not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
    from dist_ckpt_strategies.local.shard_distribution import ShardDistribution
    from dist_ckpt_strategies.local.state_codecs import StateCodec, StateCodecs
    from dist_ckpt_strategies.sharded.async_request import LocalSaveRequest

_HOMES = {
    "BasicTensorAwareStateDict": "local.basic_state_dict",
    "CliqueReplicationStrategy": "local.replication",
    "ExchangePlan": "local.plan",
    "LazyCliqueReplicationStrategy": "local.replication",
    "LazyReplicationStrategyBuilder": "local.replication",
    "LocalCheckpointManager": "local.manager",
    "LocalSaveRequest": "sharded.async_request",
    "MCoreTensorAwareStateDict": "local.mcore_state_dict",
    "NoReplicasAvailableError": "errors",
    "ReplicationStrategy": "local.replication",
    "ShardDistribution": "local.shard_distribution",
    "StateCodec": "local.state_codecs",
    "StateCodecs": "local.state_codecs",
    "TensorAwareStateDict": "local.base_state_dict",
}

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


def __getattr__(name: str) -> Any:
    """Import a public name from its home the first time it is asked for."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"dist_ckpt_strategies.{home}"), name)


def __dir__() -> list[str]:
    """The public names."""
    return sorted([*globals(), *__all__])
