"""Load strategies of this package's formats: Megatron-Core's methods over ``sharded``'s functions.

What differs between the formats is in ``safetensors`` and ``zarr``.
"""

from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from dist_ckpt_strategies.comm.base import Message, run_and_gather
from dist_ckpt_strategies.comm.process_group import ProcessGroup
from dist_ckpt_strategies.config import Options
from dist_ckpt_strategies.formats import commit, pack_commit
from dist_ckpt_strategies.formats.base import open_packs
from dist_ckpt_strategies.formats.checkpoints import Format1Checkpoint, StoredCheckpoint
from dist_ckpt_strategies.formats.locations import (
    PACKS,
    Location,
    holds_packs,
    located,
    place_of,
    refuse_format2,
    require_path,
)
from dist_ckpt_strategies.formats.objects import Allowed
from dist_ckpt_strategies.formats.pack_checkpoint import OpenedSave
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
from dist_ckpt_strategies.strategies.common import common_read_last, require_own_common
from dist_ckpt_strategies.strategies.configured import Configured

ZARR, PACK = ("zarr", 1), PACKS.sharded_format


class OwnLoadShardedStrategy(Configured, LoadShardedStrategy):  # type: ignore[misc]
    """Load strategy for every format of this package, by what lies in the directory.

    Args:
        verify: ``"read"`` (the default) or ``"off"``, for packs; see Options.
        group: ranks that load together; the world by default.
        options: timeouts and memory bounds; by default from the environment.
        allow: further classes that ShardedObjects may be unpickled to.

    Attributes:
        validated: the shardings that loads have checked.
    """

    formats: ClassVar[tuple[tuple[str, int], ...]] = (ZARR, PACK)

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

        plans: list[LoadPlan] = []

        def prepare() -> Message:
            deadline = Deadline.after(OPENING * self.options.timeout_s)
            root = located(checkpoint_dir, self.options)
            open_ = partial(self.open_to_load, root, self.options, save)
            checkpoint = run_within(deadline, root, open_)
            arguments = sharded_state_dict, checkpoint, self.options, self.destination_of, deadline
            plans.append(plan_load(*arguments))
            return plans[0].message()

        with no_garbage_collection():
            answers = run_and_gather(comm, prepare)  # 1
            return load_sharded(  # 2
                comm, plans[0], answers, checkpoint_dir, self.options, self.allowed
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
        if self._reads_packs(root, save):
            return open_packs(root, options, save)
        return Format1Checkpoint(require_path(root, f"format {ZARR}"), options, save)

    def _reads_packs(self, root: Location, save: OpenedSave | None = None) -> bool:
        if ZARR not in self.formats or PACK not in self.formats:
            return PACK in self.formats
        if save is not None and save.has_packs:
            return True
        return holds_packs(root) or refuse_format2(root) == PACK  # then its index is lost

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

        return self.within(ALL, root, look_up)

    @raises_megatron_errors
    def remove_sharded_tensors(self, checkpoint_dir: str | Path, key_prefix: str) -> None:
        """Remove the arrays and objects whose key starts with a prefix. One rank calls it.

        Of packs only the index changes: their bytes stay, until ``convert`` leaves them out.
        """
        root = located(checkpoint_dir, self.options)

        def remove() -> None:
            if self._reads_packs(root):
                pack_commit.remove_keys(place_of(root), key_prefix)
                return
            directory = require_path(root, f"format {ZARR}")
            require_directory(directory)
            commit.remove_keys(directory, key_prefix)

        self.within(1.0, root, remove)

    destination_of = staticmethod(destination)
    """Gives the tensor that is filled for a ShardedTensor."""
