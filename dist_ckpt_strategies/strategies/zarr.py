"""The Zarr backend, under the names that Megatron-Core 0.15 gave it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dist_ckpt_strategies.comm.agree import agree
from dist_ckpt_strategies.comm.base import Communicator
from dist_ckpt_strategies.comm.solo import SoloCommunicator
from dist_ckpt_strategies.comm.torch_group import ProcessGroup, open_communicator
from dist_ckpt_strategies.config import Options, options_from_environment
from dist_ckpt_strategies.errors import (
    IncompatibleVersionError,
    ShapeMismatchError,
)
from dist_ckpt_strategies.megatron.allowed import default_allowed
from dist_ckpt_strategies.megatron.bases import (
    LoadShardedStrategy,
    SaveShardedStrategy,
    StrategyAction,
)
from dist_ckpt_strategies.megatron.callers import is_exchanged, num_expected_meetings
from dist_ckpt_strategies.megatron.errors import raises_megatron_errors
from dist_ckpt_strategies.megatron.shards import StateDict, metadata_tensor
from dist_ckpt_strategies.run.report import BroadcastReport
from dist_ckpt_strategies.spec.array import ArraySpec
from dist_ckpt_strategies.spec.dtype import DType
from dist_ckpt_strategies.storage.base import StoredCheckpoint
from dist_ckpt_strategies.storage.checkpoints import Format1Checkpoint
from dist_ckpt_strategies.storage.objects import Allowed
from dist_ckpt_strategies.storage.zarr2 import Zarr2Layout
from dist_ckpt_strategies.strategies.format1 import (
    Format1Target,
    remove_arrays,
    stored_metadata,
)
from dist_ckpt_strategies.strategies.group_load import load_sharded_in_group
from dist_ckpt_strategies.strategies.registration import register_defaults
from dist_ckpt_strategies.strategies.save_planning import PlanMemory
from dist_ckpt_strategies.strategies.sharded_load import load_sharded
from dist_ckpt_strategies.strategies.sharded_save import save_sharded

logger = logging.getLogger(__name__)

BACKEND = "zarr"
VERSION = 1


class ZarrSaveShardedStrategy(SaveShardedStrategy):  # type: ignore[misc]
    """Save strategy for the Zarr backend: one Zarr v2 array per key, one chunk per shard.

    Args:
        backend: name of the format; ``"zarr"``.
        version: version of the format; 1.
        engine: ``"tensorstore"`` or ``"zarr"``; by default what the environment says.
        group: ranks that save together; the world by default.
        options: timeouts and memory bounds; by default what the environment says.
        plan_memory: shared with other strategies that save the same state; each keeps the last
            plan, and takes it again where every rank saves the same shards as before.

    Source: layout of Megatron-Core <= 0.15.3, which loads what this saves.
    """

    @raises_megatron_errors
    def __init__(
        self,
        backend: str = BACKEND,
        version: int = VERSION,
        *,
        engine: str | None = None,
        group: ProcessGroup | None = None,
        options: Options | None = None,
        plan_memory: PlanMemory | None = None,
    ) -> None:
        require_format1(backend, version)
        super().__init__(backend, version)
        self._memory = plan_memory or PlanMemory()
        self._group = group
        self._options = (options or options_from_environment()).with_changes(engine=engine)

    @property
    def can_handle_sharded_objects(self) -> bool:
        """ShardedObjects are written too, where Megatron-Core's common strategy puts them."""
        return True

    @raises_megatron_errors
    def save(self, sharded_state_dict: StateDict, checkpoint_dir: str | Path) -> None:
        """Write the main replicas, durably. Does not write ``metadata.json``.

        Collective over the group. CPU tensors in C order are written from their own memory;
        others take staging memory, ``max_inflight_bytes`` at most or twice the largest tensor.

        Raises:
            PlanError: main replicas overlap, leave a gap, or cannot be stored.
            StorageError: a write failed on this rank.
            PeerError: it failed on another; the message names rank, key and file.
        """
        self._save(sharded_state_dict, checkpoint_dir, keeps_old=False)

    @raises_megatron_errors
    def replace(self, sharded_state_dict: StateDict, checkpoint_dir: str | Path) -> None:
        """Like ``save``, but an earlier checkpoint stays whole until this one can be saved.

        For callers that have not touched ``common.pt`` yet. Collective, and raises, like ``save``.
        """
        self._save(sharded_state_dict, checkpoint_dir, keeps_old=True)

    def _save(self, state_dict: StateDict, checkpoint_dir: str | Path, *, keeps_old: bool) -> None:
        root = Path(checkpoint_dir).absolute()
        comm = open_communicator(
            self._group, timeout_s=self._options.timeout_s, purpose=f"save to {root}"
        )
        report = save_sharded(
            state_dict,
            lambda: Format1Target(root, self._options, keeps_old=keeps_old),
            comm,
            self._options,
            self._memory,
        )
        logger.info("rank %s: save to %s: %s", comm.global_rank(comm.rank), root, report)


class ZarrLoadShardedStrategy(LoadShardedStrategy):  # type: ignore[misc]
    """Load strategy for the Zarr backend, for checkpoints old and new.

    Args:
        engine: ``"tensorstore"`` or ``"zarr"``; by default what the environment says.
        group: ranks that load together; the world by default.
        options: timeouts and memory bounds; by default what the environment says.
        allow: further classes that ShardedObjects may be unpickled to.
    """

    @raises_megatron_errors
    def __init__(
        self,
        *,
        engine: str | None = None,
        group: ProcessGroup | None = None,
        options: Options | None = None,
        allow: Allowed = (),
    ) -> None:
        super().__init__()
        self._group = group
        self._options = (options or options_from_environment()).with_changes(engine=engine)
        self._allow = tuple(allow)

    @property
    def can_handle_sharded_objects(self) -> bool:
        """ShardedObjects are read too."""
        return True

    @raises_megatron_errors
    def load(self, sharded_state_dict: StateDict, checkpoint_dir: str | Path) -> StateDict:
        """Read every ShardedTensor and ShardedObject of the state dict.

        Collective over the group.

        Returns:
            A state dict of the same structure. A ShardedTensor whose data has the stored dtype is
            filled in place and gives that tensor; without data it gives a new CPU tensor. Other
            dtypes give a new tensor of the stored dtype on the data's device; of the
            ShardedTensor's dtype where FullyParallelLoadStrategyWrapper calls.

        Raises:
            ShapeMismatchError: another shape is stored, and ``allow_shape_mismatch`` is not set.
            StorageError: an array, chunk or object is missing or damaged.
            PeerError: the same, on another rank; the message names rank, key and file.
        """
        num_meetings = num_expected_meetings(depth=3)
        deliver = self._deliver_cast if is_exchanged(depth=3) else self._deliver
        root = Path(checkpoint_dir).absolute()
        comm = open_communicator(
            self._group, timeout_s=self._options.timeout_s, purpose=f"load from {root}"
        )
        loaded, report = load_sharded(
            sharded_state_dict, self._opener(root), comm, self._options, self._allowed, deliver
        )
        logger.info("rank %s: load from %s: %s", comm.global_rank(comm.rank), root, report)
        for _ in range(num_meetings - 1):
            agree(comm, lambda: None)
        return loaded

    def load_in_group(
        self,
        sharded_state_dict: StateDict,
        checkpoint_dir: Path,
        comm: Communicator,
        options: Options,
    ) -> tuple[StateDict, BroadcastReport]:
        """Like ``load``, by a group of ranks: each reads a share, and sends it to the others.

        Collective over the group. Errors as in ``load``.

        Args:
            sharded_state_dict: what this rank wants; the others may want the same, or other parts.
            checkpoint_dir: the checkpoint.
            comm: the group.
            options: in place of the strategy's own.
        """
        return load_sharded_in_group(
            sharded_state_dict,
            lambda: Format1Checkpoint(checkpoint_dir, options),
            comm,
            options,
            self._allowed,
            self._deliver,
        )

    def load_alone(self, sharded_state_dict: StateDict, checkpoint_dir: Path) -> StateDict:
        """Like ``load``, by this rank without any other. Rank-local."""
        loaded, _ = load_sharded(
            sharded_state_dict,
            self._opener(checkpoint_dir),
            SoloCommunicator(),
            self._options,
            self._allowed,
            self._deliver,
        )
        return loaded

    @property
    def options(self) -> Options:
        """How loads are carried out."""
        return self._options

    @raises_megatron_errors
    def load_tensors_metadata(self, checkpoint_dir: str | Path) -> StateDict:
        """A ShardedTensor without data, by key, for each stored array. Rank-local."""
        return stored_metadata(Path(checkpoint_dir).absolute(), with_objects=False)

    @raises_megatron_errors
    def load_sharded_metadata(self, checkpoint_dir: str | Path) -> StateDict:
        """Like ``load_tensors_metadata``, with ShardedObjects by unique key. Rank-local."""
        return stored_metadata(Path(checkpoint_dir).absolute(), with_objects=True)

    @raises_megatron_errors
    def remove_sharded_tensors(self, checkpoint_dir: str | Path, key_prefix: str) -> None:
        """Remove the arrays and objects whose key starts with a prefix. One rank calls it."""
        remove_arrays(Path(checkpoint_dir).absolute(), key_prefix)

    @raises_megatron_errors
    def check_backend_compatibility(self, loaded_backend: str) -> None:
        """Raise IncompatibleVersionError unless the backend is ``"zarr"``."""
        require_format1(loaded_backend, VERSION)

    @raises_megatron_errors
    def check_version_compatibility(self, loaded_version: int) -> None:
        """Raise IncompatibleVersionError unless the version is 1."""
        require_format1(BACKEND, loaded_version)

    def _opener(self, root: Path) -> Callable[[], StoredCheckpoint]:
        return lambda: Format1Checkpoint(root, self._options)

    def _deliver(self, tensor: Any, loaded: torch.Tensor) -> torch.Tensor:  # noqa: ARG002 - a hook
        return loaded

    def _deliver_cast(self, tensor: Any, loaded: torch.Tensor) -> torch.Tensor:
        return self._deliver(tensor, loaded).to(tensor.dtype)

    def _allowed(self) -> Allowed:
        return [*default_allowed(), *self._allow]


def require_format1(backend: str, version: int) -> None:
    """Raise unless this is the format that these strategies know.

    Raises:
        IncompatibleVersionError: it is another.
    """
    if (backend, version) != (BACKEND, VERSION):
        raise IncompatibleVersionError(
            f"expected backend ('{BACKEND}', {VERSION}), found ({backend!r}, {version})"
        )


@raises_megatron_errors
def register_default_zarr_strategies() -> None:
    """Make ``("zarr", 1)`` savable: here, and in Megatron-Core's registry. Idempotent."""
    register_defaults([(StrategyAction.SAVE_SHARDED, BACKEND, VERSION, ZarrSaveShardedStrategy)])


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
