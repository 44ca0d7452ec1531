"""The TensorStore loader of the Zarr backend, under the names that Megatron-Core 0.15 gave it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tensorstore as ts
import torch

from dist_ckpt_strategies.errors import (
    ArrayNotFoundError,
    PlanError,
    StorageError,
    StrategyError,
)
from dist_ckpt_strategies.formats.zarr2 import METADATA_NAME, array_store_spec
from dist_ckpt_strategies.megatron.types import raises_megatron_errors
from dist_ckpt_strategies.sharded.load import destination
from dist_ckpt_strategies.strategies.registry import register_default_tensorstore_strategies
from dist_ckpt_strategies.strategies.zarr import ZarrLoadShardedStrategy

__all__ = [
    "TensorStoreLoadShardedStrategy",
    "merge_global_slice_with_shape",
    "open_ts_array",
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


@raises_megatron_errors
def open_ts_array(arr_path: str | Path) -> ts.TensorStore:
    """The Zarr v2 array at a path, relative ones too, opened with TensorStore for reading.

    Missing chunks are errors, not zeros.

    Raises:
        ArrayNotFoundError: there is no array.
        StorageError: it cannot be opened.
    """
    path = Path(arr_path).absolute()
    fields = {"key": path.name, "path": str(path)}
    if not (path / METADATA_NAME).exists():
        text = f"no Zarr v2 array at {path}: expected a file {METADATA_NAME} there"
        raise ArrayNotFoundError(f"{path.name}: {text}", **fields)
    try:
        return ts.open(array_store_spec(path), read=True).result()
    except ValueError as error:
        text = f"array {path} cannot be opened: {str(error).partition(' [')[0]}"
        raise StorageError(f"{path.name}: {text}", **fields) from error


@raises_megatron_errors
def merge_global_slice_with_shape(
    global_slice: Sequence[int | slice], actual_shape: Sequence[int], key: str
) -> tuple[int | slice, ...]:
    """The global slice, cut where it reaches past the actual shape.

    Args:
        global_slice: one int or slice for each dim, in elements.
        actual_shape: of the stored array, in elements.
        key: of the array, for messages.

    Raises:
        PlanError: the number of dims differs, or nothing is left of a slice.
    """
    if len(global_slice) != len(actual_shape):
        raise PlanError(
            f"{key}: {len(global_slice)} slices for the {len(actual_shape)} dims of "
            f"{tuple(actual_shape)}",
            key=key,
        )
    found: list[int | slice] = []
    for wanted, size in zip(global_slice, actual_shape, strict=True):
        if isinstance(wanted, slice):
            if (wanted.start or 0) >= size:
                span = f"{wanted.start}:{wanted.stop}"
                raise PlanError(f"{key}: slice {span} lies beyond size {size}", key=key)
            stop = size if wanted.stop is None else min(wanted.stop, size)
            found.append(slice(wanted.start or 0, stop, wanted.step))
        else:
            found.append(wanted)
    return tuple(found)
