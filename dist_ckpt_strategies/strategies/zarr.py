"""The Zarr backend, format ("zarr", 1): save and load strategies.

Names that Megatron-Core 0.15 gave to strategies are importable from here.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from dist_ckpt_strategies.comm.process_group import ProcessGroup
from dist_ckpt_strategies.config import Options
from dist_ckpt_strategies.errors import IncompatibleVersionError
from dist_ckpt_strategies.formats.checkpoints import (
    Format1Checkpoint,
    StoredCheckpoint,
)
from dist_ckpt_strategies.formats.commit import remove_keys, require_own_place, set_marker_aside
from dist_ckpt_strategies.formats.locations import (
    FORMAT2,
    FORMAT2_REFUSED,
    PACKS,
    Location,
    OpenedSave,
    holds_packs,
    located,
    require_path,
)
from dist_ckpt_strategies.formats.objects import Allowed
from dist_ckpt_strategies.formats.zarr_write import require_on_grid
from dist_ckpt_strategies.megatron.shards import StateDict, metadata_object, metadata_tensor
from dist_ckpt_strategies.megatron.types import (
    LoadShardedStrategy,
    raises_megatron_errors,
)
from dist_ckpt_strategies.sharded.chunk_save import chunk_job, finish_chunks, write_chunks
from dist_ckpt_strategies.sharded.load import (
    LoadPlan,
    Validated,
    destination,
    load_sharded,
    plan_load,
)
from dist_ckpt_strategies.sharded.pack_save import Contents, Known, Started
from dist_ckpt_strategies.storage.bucket import Place
from dist_ckpt_strategies.storage.files import Directory, require_directory
from dist_ckpt_strategies.storage.io_pool import (
    ALL,
    OPENING,
    Deadline,
    run_within,
)
from dist_ckpt_strategies.strategies.common import (
    common_read_last,
    open_packs,
    require_own_common,
)
from dist_ckpt_strategies.strategies.own_save import OwnSaveShardedStrategy
from dist_ckpt_strategies.strategies.registry import (
    Configured,
    register_default_zarr_strategies,
    require_own,
)

__all__ = [
    "EitherFormatLoadShardedStrategy",
    "ZarrLoadShardedStrategy",
    "ZarrSaveShardedStrategy",
    "register_default_zarr_strategies",
]

BACKEND, VERSION = "zarr", 1


class ZarrSaveShardedStrategy(OwnSaveShardedStrategy):
    """Save strategy for ("zarr", 1): one Zarr v2 array per key, one chunk per shard.

    All shards of an array have one shape, and lie on a regular grid. Arguments are those of
    OwnSaveShardedStrategy.

    Source: format 1 is the layout of Megatron-Core <= 0.15.3, which loads what this saves.
    """

    own_format = BACKEND, VERSION

    def place(self, checkpoint_dir: Any) -> Directory:
        """See OwnSaveShardedStrategy."""
        return Directory(require_path(located(checkpoint_dir, self.options), "format ('zarr', 1)"))

    def require_storable(self, contents: Contents) -> None:
        """See OwnSaveShardedStrategy."""
        require_on_grid(contents.shards, [name for name, _ in contents.objects])

    def take_over(self, store: Place) -> None:
        """See OwnSaveShardedStrategy. A checkpoint that is there counts no more."""
        if isinstance(store, Directory):
            deadline = Deadline.after(OPENING * self.options.timeout_s)
            run_within(deadline, store, lambda: set_marker_aside(store.root))

    write = staticmethod(write_chunks)
    job = staticmethod(chunk_job)

    def finish(self, started: Started, written: Callable[[], Any], marker: bytes | None) -> Known:
        """See OwnSaveShardedStrategy."""
        return finish_chunks(started, written, marker=marker, fence=require_own_place)


class ZarrLoadShardedStrategy(Configured, LoadShardedStrategy):  # type: ignore[misc]
    """Load strategy for ("zarr", 1), for checkpoints old and new.

    Args:
        verify: ``"read"`` (the default) or ``"off"``, for packs; see Options.
        group: ranks that load together; the world by default.
        options: timeouts and memory bounds; by default from the environment.
        allow: further classes that ShardedObjects may be unpickled to.

    Attributes:
        validated: the shardings that loads have checked.
    """

    backend: ClassVar[str] = BACKEND
    versions: ClassVar[tuple[int, ...]] = (1,)
    """Of the formats that it reads."""

    @raises_megatron_errors
    def __init__(
        self,
        *,
        verify: str | None = None,
        group: ProcessGroup | None = None,
        options: Options | None = None,
        allow: Allowed = (),
    ) -> None:
        super().__init__()
        self.validated: Validated = {}
        self._configure(options, allow, group, verify=verify)

    @raises_megatron_errors
    def load(
        self,
        sharded_state_dict: StateDict,
        checkpoint_dir: str | Path,
        async_strategy: object = None,  # noqa: ARG002 - later releases of Megatron-Core pass it
    ) -> StateDict:
        """Read every ShardedTensor and ShardedObject of the state dict.

        Collective over the group. ``async_strategy`` is what later releases of Megatron-Core pass;
        nothing depends on it.

        Returns:
            A state dict of the same structure. The data of a ShardedTensor is filled in place,
            and is what stands there; without data it is a new CPU tensor of the ShardedTensor's
            dtype. What is stored in another dtype is converted as ``Tensor.copy_`` does, with one
            warning per load, on the group's first rank.

        Raises:
            ShapeMismatchError: another shape is stored, and ``allow_shape_mismatch`` is not set.
            DTypeMismatchError: another dtype is stored, and the option ``strict_dtype`` is set.
                No tensor has been filled.
            StorageError: an array, chunk or object is missing or damaged.
            PeerError: the same, on another rank; the message names rank, key and file.
        """
        return self.load_from(sharded_state_dict, checkpoint_dir)

    def load_from(
        self,
        sharded_state_dict: StateDict,
        checkpoint_dir: str | Location,
        save: OpenedSave | None = None,
    ) -> StateDict:
        """See ``load``; ``save``: see ``open_to_load``."""
        comm = self.communicator("load", f"from {checkpoint_dir}")

        def prepare() -> LoadPlan:
            deadline = Deadline.after(OPENING * self.options.timeout_s)
            root = located(checkpoint_dir, self.options)
            open_ = partial(self.open_to_load, root, self.options, save)
            checkpoint = run_within(deadline, root, open_)
            return self.plan(sharded_state_dict, checkpoint, deadline)

        return load_sharded(comm, prepare, checkpoint_dir, self.options, self.allowed)

    def plan(self, state: StateDict, checkpoint: StoredCheckpoint, deadline: Deadline) -> LoadPlan:
        """See ``plan_load``."""
        is_strict = self.options.strict_dtype
        return plan_load(
            state, checkpoint, self.destination_of, is_strict=is_strict, deadline=deadline
        )

    def open_to_load(self, root: Location, options: Options, save: OpenedSave | None = None) -> Any:
        """The checkpoint at a place, of which the common state was read. Rank-local.

        Args:
            root: its directory, or its place in an object store.
            options: how to read it.
            save: which it was read of; by default what is known of Megatron-Core's ``load``.

        Raises:
            CheckpointChangedError: it was of another save.
        """
        before = save or common_read_last(root)
        checkpoint = self.open_checkpoint(root, options, before or OpenedSave(root))
        if before is None:
            require_own_common(root, checkpoint)
        return checkpoint

    def open_checkpoint(
        self, root: Location, options: Options, save: OpenedSave | None = None
    ) -> Any:
        """The checkpoint at a place. Rank-local.

        Args:
            root: its directory, or its place in an object store.
            options: how to read it.
            save: what a load has opened.
        """
        return Format1Checkpoint(require_path(root, "format ('zarr', 1)"), options, save)

    @raises_megatron_errors
    def load_tensors_metadata(self, checkpoint_dir: str | Path) -> StateDict:
        """A ShardedTensor without data, by key, for each stored array. Rank-local."""
        return self._stored_metadata(checkpoint_dir, with_objects=False)

    @raises_megatron_errors
    def load_sharded_metadata(self, checkpoint_dir: str | Path) -> StateDict:
        """Like ``load_tensors_metadata``, with ShardedObjects by unique key. Rank-local."""
        return self._stored_metadata(checkpoint_dir, with_objects=True)

    def _stored_metadata(self, checkpoint_dir: str | Path, *, with_objects: bool) -> StateDict:
        root, options = located(checkpoint_dir, self.options), self.options
        deadline = Deadline.after(ALL * options.timeout_s)

        def look_up() -> StateDict:
            if isinstance(root, Path):
                require_directory(root)
            checkpoint = self.open_checkpoint(root, options)
            arrays = checkpoint.find(checkpoint.keys())
            found: StateDict = {
                key: metadata_tensor(key, array.shape, array.dtype.value)
                for key, array in arrays.items()
            }
            if with_objects:
                found |= {id_.unique_key: metadata_object(id_) for id_ in checkpoint.object_ids()}
            return found

        return run_within(deadline, root, look_up)

    @raises_megatron_errors
    def remove_sharded_tensors(self, checkpoint_dir: str | Path, key_prefix: str) -> None:
        """Remove the arrays and objects whose key starts with a prefix. One rank calls it."""
        root = Path(checkpoint_dir).absolute()
        require_directory(root)
        remove_keys(root, key_prefix)

    @raises_megatron_errors
    def check_backend_compatibility(self, loaded_version: str) -> None:
        """Raise IncompatibleVersionError unless the backend is ``"zarr"``.

        Args:
            loaded_version: the backend's name; Megatron-Core called it so in this class.
        """
        require_own(self.backend, self.versions, loaded_version, self.versions[-1])

    @raises_megatron_errors
    def check_version_compatibility(self, loaded_version: int) -> None:
        """Raise IncompatibleVersionError unless it reads that version."""
        if (self.backend, loaded_version) == FORMAT2:
            raise IncompatibleVersionError(f"the checkpoint {FORMAT2_REFUSED}")
        require_own(self.backend, self.versions, self.backend, loaded_version)

    destination_of = staticmethod(destination)
    """Gives the tensor that is filled for a ShardedTensor."""


class EitherFormatLoadShardedStrategy(ZarrLoadShardedStrategy):
    """ZarrLoadShardedStrategy for every format of this package, by what lies in the directory."""

    def open_checkpoint(
        self, root: Location, options: Options, save: OpenedSave | None = None
    ) -> Any:
        """See ZarrLoadShardedStrategy."""
        if holds_packs(root):
            return open_packs(root, options, save)
        return super().open_checkpoint(root, options, save)

    @raises_megatron_errors
    def check_backend_compatibility(self, loaded_version: str) -> None:
        """Raise IncompatibleVersionError unless the backend is one of this package's."""
        if loaded_version != PACKS.sharded_backend:
            super().check_backend_compatibility(loaded_version)
