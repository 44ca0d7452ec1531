"""Functions of Megatron-Core 0.15's Zarr and TensorStore strategies, under their names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorstore as ts
import torch

from dist_ckpt_strategies.core.array import ArraySpec, DType
from dist_ckpt_strategies.errors import (
    ArrayNotFoundError,
    PlanError,
    ShapeMismatchError,
    StorageError,
)
from dist_ckpt_strategies.formats.decoders import array_store_spec
from dist_ckpt_strategies.formats.zarr2 import METADATA_NAME, Zarr2Layout
from dist_ckpt_strategies.megatron.errors import raises_megatron_errors
from dist_ckpt_strategies.megatron.shards import StateDict, metadata_tensor


def load_zarr_based_sharded_metadata(
    checkpoint_dir: Path,
    get_shape_dtype_fn: Callable[[str], tuple[tuple[int, ...], npt.DTypeLike]],
) -> StateDict:
    """A ShardedTensor without data, by key, for each Zarr v2 array below a directory.

    Args:
        checkpoint_dir: the checkpoint.
        get_shape_dtype_fn: gives shape, in elements, and numpy dtype of the array at a path.
    """
    layout = Zarr2Layout(Path(checkpoint_dir).absolute())
    found = {}
    for key in layout.keys():
        shape, dtype = get_shape_dtype_fn(str(layout.directory(key)))
        chunk = tuple(max(1, extent) for extent in shape)
        array = ArraySpec(key, tuple(shape), DType.from_numpy(dtype, key=key), chunk)
        found[key] = metadata_tensor(array)
    return found


@raises_megatron_errors
def postprocess_numpy_array(
    loaded_array: npt.NDArray[Any],
    sharded_tensor: Any,
    apply_flattened_range: bool = True,  # noqa: FBT001, FBT002 - Megatron's signature
) -> torch.Tensor:
    """A loaded numpy array as the torch tensor that a ShardedTensor asks for; no copy if it fits.

    Args:
        loaded_array: elements as stored, shaped like the local shape or, where
            ``allow_shape_mismatch`` is set, smaller.
        sharded_tensor: says the local shape in elements.
        apply_flattened_range: cut the flattened range out, where there is one.

    Raises:
        ShapeMismatchError: the shapes differ, and ``allow_shape_mismatch`` is not set.
    """
    dtype = DType.from_numpy(loaded_array.dtype, key=sharded_tensor.key)
    native = np.ascontiguousarray(loaded_array, dtype=dtype.numpy)
    bits = native.view(f"i{dtype.itemsize}") if dtype.is_extension else native
    tensor = torch.from_numpy(bits).view(getattr(torch, dtype.value)).reshape(loaded_array.shape)
    expected = tuple(sharded_tensor.local_shape)
    if tuple(tensor.shape) != expected:
        if not sharded_tensor.allow_shape_mismatch:
            raise ShapeMismatchError(
                f"{sharded_tensor.key}: local shape {tuple(tensor.shape)} loaded, "
                f"{expected} expected",
                key=sharded_tensor.key,
            )
        tensor = pad_to_expected_shape(tensor, sharded_tensor)
    if apply_flattened_range and getattr(sharded_tensor, "flattened_range", None) is not None:
        return flatten_range(sharded_tensor, tensor)
    return tensor


def flatten_range(sharded_tensor: Any, x: torch.Tensor) -> torch.Tensor:
    """The elements of a flattened tensor that the ShardedTensor's flattened range names."""
    return x.flatten()[sharded_tensor.flattened_range]


@raises_megatron_errors
def pad_to_expected_shape(x: torch.Tensor, expected_sharded_ten: Any) -> torch.Tensor:
    """The tensor with zeros appended in each dim up to the ShardedTensor's local shape.

    Raises:
        ShapeMismatchError: the tensor is larger in a dim, or has another number of dims.
    """
    found, expected = tuple(x.shape), tuple(expected_sharded_ten.local_shape)
    if len(found) != len(expected) or any(f > e for f, e in zip(found, expected, strict=True)):
        raise ShapeMismatchError(
            f"{expected_sharded_ten.key}: shape {found} cannot be padded to {expected}",
            key=expected_sharded_ten.key,
        )
    padded = x.new_zeros(expected)
    padded[tuple(map(slice, found))] = x
    return padded


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
                raise PlanError(f"{key}: slice {span} lies beyond extent {size}", key=key)
            stop = size if wanted.stop is None else min(wanted.stop, size)
            found.append(slice(wanted.start or 0, stop, wanted.step))
        else:
            found.append(wanted)
    return tuple(found)
