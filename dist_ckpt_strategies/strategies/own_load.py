"""Load strategies of this package's formats: Megatron-Core's methods over ``sharded``'s functions.

What differs between the formats is in ``safetensors`` and ``zarr``.
"""

from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from dist_ckpt_strategies.comm.process_group import ProcessGroup
from dist_ckpt_strategies.config import Options
from dist_ckpt_strategies.errors import IncompatibleVersionError
from dist_ckpt_strategies.formats import commit, pack_remove
from dist_ckpt_strategies.formats.checkpoints import Format1Checkpoint, StoredCheckpoint
from dist_ckpt_strategies.formats.locations import (
    FORMAT2,
    FORMAT2_REFUSED,
    PACKS,
    Location,
    OpenedSave,
    holds_packs,
    located,
    place_of,
    require_path,
)
from dist_ckpt_strategies.formats.objects import Allowed
from dist_ckpt_strategies.megatron.shards import StateDict, metadata_object, metadata_tensor
from dist_ckpt_strategies.megatron.types import LoadShardedStrategy, raises_megatron_errors
from dist_ckpt_strategies.sharded.load import (
    LoadPlan,
    Validated,
    destination,
    load_sharded,
    plan_load,
)
from dist_ckpt_strategies.storage.files import require_directory
from dist_ckpt_strategies.storage.host import no_garbage_collection
from dist_ckpt_strategies.storage.io_pool import ALL, OPENING, Deadline, run_within
from dist_ckpt_strategies.strategies.common import (
    common_read_last,
    open_packs,
    require_own_common,
)
from dist_ckpt_strategies.strategies.configured import Configured, require_own

ZARR, PACK = ("zarr", 1), PACKS.sharded_format


class OwnLoadShardedStrategy(Configured, LoadShardedStrategy):  # type: ignore[misc]
    """Load strategy for formats of this package, for checkpoints old and new.

    Args:
        verify: ``"read"`` (the default) or ``"off"``, for packs; see Options.
        group: ranks that load together; the world by default.
        options: timeouts and memory bounds; by default from the environment.
        allow: further classes that ShardedObjects may be unpickled to.

    Attributes:
        validated: the shardings that loads have checked.
    """

    formats: ClassVar[tuple[tuple[str, int], ...]]
    """That it reads; of several, what lies in the directory says which."""

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
        checkpoint_dir: str | Location,
        async_strategy: object = None,  # noqa: ARG002 - later releases of Megatron-Core pass it
        *,
        save: OpenedSave | None = None,
    ) -> StateDict:
        """Read every ShardedTensor and ShardedObject of the state dict.

        Collective over the group. ``async_strategy`` is what later releases of Megatron-Core pass;
        nothing depends on it. ``save`` is what the common state was read of, if that is known.

        Returns:
            A state dict of the same structure. The data of a ShardedTensor is filled in place,
            and is what stands there; without data it is a new CPU tensor of the ShardedTensor's
            dtype. What is stored in another dtype is converted as ``Tensor.copy_`` does, with one
            warning per load, on the group's first rank.

        Raises:
            PlanError: another shape is stored, and ``allow_shape_mismatch`` is not set; or another
                dtype, and the option ``strict_dtype`` is set. No tensor has been filled.
            StorageError: an array, chunk or object is missing or damaged.
            PeerError: the same, on another rank; the message names rank, key and file.
        """
        comm = self.communicator("load", f"from {checkpoint_dir}")

        def prepare() -> LoadPlan:
            deadline = Deadline.after(OPENING * self.options.timeout_s)
            root = located(checkpoint_dir, self.options)
            open_ = partial(self.open_to_load, root, self.options, save)
            return self.plan(sharded_state_dict, run_within(deadline, root, open_), deadline)

        with no_garbage_collection():
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
    ) -> StoredCheckpoint:
        """The checkpoint at a place; ``save``: what a load has opened. Rank-local."""
        if self._reads_packs(root):
            return open_packs(root, options, save)
        return Format1Checkpoint(require_path(root, f"format {ZARR}"), options, save)

    def _reads_packs(self, root: Location) -> bool:
        return PACK in self.formats and (ZARR not in self.formats or holds_packs(root))

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
            stored: StateDict = {
                key: metadata_tensor(key, array.shape, array.dtype.value)
                for key, array in arrays.items()
            }
            if with_objects:
                stored |= {id_.unique_key: metadata_object(id_) for id_ in checkpoint.object_ids()}
            return stored

        return run_within(deadline, root, look_up)

    @raises_megatron_errors
    def remove_sharded_tensors(self, checkpoint_dir: str | Path, key_prefix: str) -> None:
        """Remove the arrays and objects whose key starts with a prefix. One rank calls it.

        Of packs only the index changes: their bytes stay, until ``convert`` leaves them out.
        """
        root = located(checkpoint_dir, self.options)

        def remove() -> None:
            if self._reads_packs(root):
                pack_remove.remove_keys(place_of(root), key_prefix)
                return
            directory = require_path(root, f"format {ZARR}")
            require_directory(directory)
            commit.remove_keys(directory, key_prefix)

        run_within(Deadline.after(self.options.timeout_s), root, remove)

    @raises_megatron_errors
    def check_backend_compatibility(self, loaded_version: str) -> None:
        """Raise IncompatibleVersionError unless the backend is one that it reads.

        Args:
            loaded_version: the backend's name; Megatron-Core 0.15 called it so in these classes.
        """
        versions = dict(self.formats)
        backend = loaded_version if loaded_version in versions else self.formats[0][0]
        require_own(backend, (versions[backend],), loaded_version, versions[backend])

    @raises_megatron_errors
    def check_version_compatibility(self, loaded_version: int) -> None:
        """Raise IncompatibleVersionError unless it reads that version."""
        backend, version = self.formats[0]
        if (backend, loaded_version) == FORMAT2:
            raise IncompatibleVersionError(f"the checkpoint {FORMAT2_REFUSED}")
        require_own(backend, (version,), backend, loaded_version)

    destination_of = staticmethod(destination)
    """Gives the tensor that is filled for a ShardedTensor."""
