"""The TensorStore loader of the Zarr backend, under the names that Megatron-Core 0.15 gave it."""

from typing import Any

import torch

from dist_ckpt_strategies.errors import StrategyError
from dist_ckpt_strategies.sharded.load import destination
from dist_ckpt_strategies.strategies.registry import register_default_tensorstore_strategies
from dist_ckpt_strategies.strategies.zarr import ZarrLoadShardedStrategy

__all__ = [
    "TensorStoreLoadShardedStrategy",
    "register_default_tensorstore_strategies",
]


class TensorStoreLoadShardedStrategy(ZarrLoadShardedStrategy):
    """Load strategy for the Zarr backend through TensorStore.

    Args:
        load_directly_on_device: every ShardedTensor must have data, which is filled on its device.
        kwargs: as for ZarrLoadShardedStrategy.
    """

    def __init__(self, load_directly_on_device: bool = False, **kwargs: Any) -> None:  # noqa: FBT001, FBT002 - Megatron's signature
        super().__init__(**kwargs)
        self.load_directly_on_device = load_directly_on_device

    def destination_of(self, tensor: Any) -> torch.Tensor:
        """The tensor that is filled for a ShardedTensor."""
        if self.load_directly_on_device and tensor.data is None:
            raise StrategyError(
                f"{tensor.key}: load_directly_on_device needs a ShardedTensor with data",
                key=tensor.key,
            )
        return destination(tensor)
