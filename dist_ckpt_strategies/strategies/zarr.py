"""The Zarr backend, under the names that Megatron-Core 0.15 gave it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dist_ckpt_strategies.comm.process_group import ProcessGroup
from dist_ckpt_strategies.config import Options, options_from_environment
from dist_ckpt_strategies.core.array import ArraySpec, DType
from dist_ckpt_strategies.errors import ShapeMismatchError
from dist_ckpt_strategies.formats.checkpoint_writer import CheckpointWriter, Format1Writer
from dist_ckpt_strategies.formats.checkpoints import Format1Checkpoint, Share
from dist_ckpt_strategies.formats.locations import Location, require_path
from dist_ckpt_strategies.formats.objects import Allowed, object_ids, remove_object
from dist_ckpt_strategies.formats.zarr2 import Zarr2Layout
from dist_ckpt_strategies.megatron.errors import raises_megatron_errors
from dist_ckpt_strategies.megatron.shards import StateDict, metadata_object, metadata_tensor
from dist_ckpt_strategies.storage.base import StoredCheckpoint
from dist_ckpt_strategies.storage.files import require_directory
from dist_ckpt_strategies.storage.io_pool import limited
from dist_ckpt_strategies.strategies.registry import (
    register_default_zarr_strategies as register_default_zarr_strategies,  # noqa: PLC0414 - also importable from here
)
from dist_ckpt_strategies.strategies.registry import require_own
from dist_ckpt_strategies.strategies.sharded_strategies import (
    BaseLoadShardedStrategy,
    BaseSaveShardedStrategy,
)

BACKEND = "zarr"
VERSION = 1
FORMAT = f"format {(BACKEND, VERSION)}"


class ZarrSaveShardedStrategy(BaseSaveShardedStrategy):
    """Save strategy for the Zarr backend: one Zarr v2 array per key, one chunk per shard.

    Args:
        backend: name of the format; ``"zarr"``.
        version: version of the format; 1.
        engine: ``"tensorstore"`` or ``"zarr"``; by default what the environment says.
        group: ranks that save together; the world by default.
        options: timeouts and memory bounds; by default what the environment says.
        allow: further classes that ShardedObjects may be of; a load has to allow them too.

    What it keeps from save to save is the last plan, taken again where every rank saves the same
    shards as before, and room for asynchronous saves, which it runs one after the other.

    Source: layout of Megatron-Core <= 0.15.3, which loads what this saves.
    """

    format_name = FORMAT

    @raises_megatron_errors
    def __init__(
        self,
        backend: str = BACKEND,
        version: int = VERSION,
        *,
        engine: str | None = None,
        group: ProcessGroup | None = None,
        options: Options | None = None,
        allow: Allowed = (),
    ) -> None:
        require_own((BACKEND, VERSION), backend, version)
        chosen = (options or options_from_environment()).with_changes(engine=engine)
        super().__init__(
            backend,
            version,
            group=group,
            options=chosen,
            allow=allow,
        )

    def open_writer(
        self,
        root: Location,
        global_rank: int,  # noqa: ARG002 - format 1 names no writers
        *,
        keeps_old: bool,
        overwrite: bool,
    ) -> CheckpointWriter:
        """See BaseSaveShardedStrategy."""
        return Format1Writer(root, self._options, keeps_old=keeps_old, overwrite=overwrite)


class ZarrLoadShardedStrategy(BaseLoadShardedStrategy):
    """Load strategy for the Zarr backend, for checkpoints old and new.

    Args:
        engine: ``"tensorstore"`` or ``"zarr"``; by default what the environment says.
        group: ranks that load together; the world by default.
        options: timeouts and memory bounds; by default what the environment says.
        allow: further classes that ShardedObjects may be unpickled to.
    """

    format_name = FORMAT

    @raises_megatron_errors
    def __init__(
        self,
        *,
        engine: str | None = None,
        group: ProcessGroup | None = None,
        options: Options | None = None,
        allow: Allowed = (),
    ) -> None:
        chosen = (options or options_from_environment()).with_changes(engine=engine)
        super().__init__(group=group, options=chosen, allow=allow)

    def open_checkpoint(
        self,
        root: Location,
        options: Options,
        share: Share,  # noqa: ARG002 - nothing is looked at together
    ) -> StoredCheckpoint:
        """See BaseLoadShardedStrategy."""
        return Format1Checkpoint(require_path(root, FORMAT), options)

    def stored_metadata(self, root: Location, *, with_objects: bool) -> StateDict:
        """See BaseLoadShardedStrategy."""
        return stored_metadata(require_path(root, FORMAT), with_objects=with_objects)

    @raises_megatron_errors
    def remove_sharded_tensors(self, checkpoint_dir: str | Path, key_prefix: str) -> None:
        """Remove the arrays and objects whose key starts with a prefix. One rank calls it."""
        remove_arrays(Path(checkpoint_dir).absolute(), key_prefix)

    @raises_megatron_errors
    def check_backend_compatibility(self, loaded_version: str) -> None:
        """Raise IncompatibleVersionError unless the backend is ``"zarr"``.

        Args:
            loaded_version: the backend's name; Megatron-Core called it so in this class.
        """
        require_own((BACKEND, VERSION), loaded_version, VERSION)

    @raises_megatron_errors
    def check_version_compatibility(self, loaded_version: int) -> None:
        """Raise IncompatibleVersionError unless the version is 1."""
        require_own((BACKEND, VERSION), BACKEND, loaded_version)


def load_zarr_based_sharded_metadata(
    checkpoint_dir: Path,
    get_shape_dtype_fn: Callable[[str], tuple[tuple[int, ...], npt.DTypeLike]],
) -> StateDict:
    """A ShardedTensor without data, by key, for each Zarr v2 array below a directory.

    Args:
        checkpoint_dir: the checkpoint.
        get_shape_dtype_fn: gives shape, in elements, and numpy dtype of the array at a path.

    Source: the function of this name in Megatron-Core 0.15; keys with ``/`` are found too.
    """
    layout = Zarr2Layout(Path(checkpoint_dir).absolute())
    found = {}
    for key in layout.keys():
        shape, dtype = get_shape_dtype_fn(str(layout.directory(key)))
        whole = tuple(shape)
        array = ArraySpec(
            key, whole, DType.from_numpy(dtype, key=key), tuple(max(1, n) for n in whole)
        )
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
    tensor = _as_torch(loaded_array, sharded_tensor.key)
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


def _as_torch(array: npt.NDArray[Any], key: str) -> torch.Tensor:
    dtype = DType.from_numpy(array.dtype, key=key)
    native = np.ascontiguousarray(array, dtype=dtype.numpy).reshape(array.shape)
    if not dtype.is_extension:
        return torch.from_numpy(native)
    bits = native.view(np.dtype(f"i{dtype.itemsize}"))
    return torch.from_numpy(bits).view(getattr(torch, dtype.value))


def flatten_range(sharded_tensor: Any, x: torch.Tensor) -> torch.Tensor:
    """The part of a flattened tensor that the ShardedTensor's flattened range names."""
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
    missing = [(0, e - f) for f, e in zip(found, expected, strict=True)]
    return torch.nn.functional.pad(x, [n for pair in reversed(missing) for n in pair])


@limited
def stored_metadata(root: Path, *, with_objects: bool) -> StateDict:
    """ShardedTensors (and objects) without data for all that a checkpoint holds. Rank-local.

    Raises:
        CheckpointNotFoundError: the directory does not exist.
        CorruptCheckpointError: the description of an array cannot be read.
    """
    require_directory(root)
    layout = Zarr2Layout(root)
    found: StateDict = {key: metadata_tensor(layout.find(key)) for key in layout.keys()}
    if with_objects:
        found.update({name.unique_key: metadata_object(name) for name in object_ids(root)})
    return found


def remove_arrays(root: Path, key_prefix: str) -> int:
    """Remove every array and object whose key starts with a prefix; returns how many.

    Rank-local: one rank calls it.
    """
    require_directory(root)
    layout = Zarr2Layout(root)
    keys = [key for key in layout.keys() if key.startswith(key_prefix)]
    for key in sorted(keys, key=len, reverse=True):
        layout.remove(key)
    names = [name for name in object_ids(root) if name.key.startswith(key_prefix)]
    for name in names:
        remove_object(root, name)
    return len(keys) + len(names)
