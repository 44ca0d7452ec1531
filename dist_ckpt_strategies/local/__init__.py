"""Checkpoints on the nodes' own disks, copied between ranks; names and signatures are NVRx's.

Names are imported on first use: ``dist-ckpt inspect`` and ``verify`` must not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dist_ckpt_strategies.errors import NoReplicasAvailableError
    from dist_ckpt_strategies.local.manager import LocalCheckpointManager
    from dist_ckpt_strategies.local.mcore_state_dict import (
        MCoreTensorAwareStateDict,
        ShardDistribution,
    )
    from dist_ckpt_strategies.local.plan import ExchangePlan
    from dist_ckpt_strategies.local.replication import (
        CliqueReplicationStrategy,
        LazyCliqueReplicationStrategy,
        LazyReplicationStrategyBuilder,
        ReplicationStrategy,
    )
    from dist_ckpt_strategies.local.state_dicts import (
        BasicTensorAwareStateDict,
        TensorAwareStateDict,
    )
    from dist_ckpt_strategies.sharded.async_request import LocalSaveRequest

_MODULES = (
    "errors",
    "local.plan",
    "local.state_dicts",
    "local.mcore_state_dict",
    "local.replication",
    "local.manager",
)
"""Modules of the public names."""


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
    "TensorAwareStateDict",
]


def __getattr__(name: str) -> Any:
    """Import a public name the first time it is asked for."""
    for module in _MODULES if name in __all__ else ():
        found = import_module(f"dist_ckpt_strategies.{module}")
        if name in vars(found):
            return vars(found)[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names."""
    return sorted([*globals(), *__all__])
