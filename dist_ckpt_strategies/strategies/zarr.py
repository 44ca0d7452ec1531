"""The Zarr backend, formats ("zarr", 1) and ("zarr", 2): save and load strategies.

Names that Megatron-Core 0.15 gave to strategies are importable from here.
"""

from pathlib import Path
from typing import Any, ClassVar

from dist_ckpt_strategies.comm.base import Communicator
from dist_ckpt_strategies.comm.process_group import ProcessGroup
from dist_ckpt_strategies.config import Options
from dist_ckpt_strategies.errors import StrategyError
from dist_ckpt_strategies.formats.checkpoint_writer import CheckpointWriter
from dist_ckpt_strategies.formats.checkpoints import (
    Format1Checkpoint,
    Format2Checkpoint,
    StoredCheckpoint,
    has_manifest,
)
from dist_ckpt_strategies.formats.locations import (
    PACKS,
    Location,
    OpenedSave,
    holds_packs,
    located,
    require_path,
)
from dist_ckpt_strategies.formats.objects import Allowed, dump_loadable, object_ids, remove_object
from dist_ckpt_strategies.formats.zarr2 import array_keys, remove_array
from dist_ckpt_strategies.megatron.shards import StateDict, metadata_object, metadata_tensor
from dist_ckpt_strategies.megatron.types import (
    AsyncSaveShardedStrategy,
    LoadShardedStrategy,
    hash_folders,
    raises_megatron_errors,
    split_common_object,
)
from dist_ckpt_strategies.sharded.async_request import LocalSaveRequest
from dist_ckpt_strategies.sharded.async_save import SaveCache, begin_in_background
from dist_ckpt_strategies.sharded.load import ShardedLoad, destination, load_sharded
from dist_ckpt_strategies.sharded.save import CommonState, ShardedSave, begun_save
from dist_ckpt_strategies.storage.bucket import Bucket
from dist_ckpt_strategies.storage.files import require_directory
from dist_ckpt_strategies.storage.io_pool import OPENING, WORK, run_with_limit, time_limit
from dist_ckpt_strategies.strategies.common import packs_to_load, save_to_load
from dist_ckpt_strategies.strategies.registry import (
    Configured,
    register_default_zarr_strategies,
    require_own,
)

__all__ = [
    "EitherFormatLoadShardedStrategy",
    "Format2LoadShardedStrategy",
    "Format2SaveShardedStrategy",
    "ZarrLoadShardedStrategy",
    "ZarrSaveShardedStrategy",
    "register_default_zarr_strategies",
]

BACKEND = "zarr"


class ZarrSaveShardedStrategy(Configured, AsyncSaveShardedStrategy):  # type: ignore[misc]
    """Save strategy for the Zarr backend.

    ("zarr", 1) is one Zarr v2 array per key, one chunk per shard. ("zarr", 2) is sharded Zarr v3
    arrays and a manifest with the digest of every inner chunk; see docs/format2.md.

    The last plan is kept, and used again if every rank saves the same shards as before; so is the
    memory for asynchronous saves, which run one after the other.

    Args:
        backend: name of the format; ``"zarr"``.
        version: version of the format; 1 or 2.
        group: ranks that save together; the world by default.
        options: timeouts and memory bounds; by default from the environment.
        allow: further classes that ShardedObjects may be of; a load has to allow them too.

    Attributes:
        cache: what is kept from one save to the next.

    Source: format 1 is the layout of Megatron-Core <= 0.15.3, which loads what this saves.
    """

    @raises_megatron_errors
    def __init__(
        self,
        backend: str = BACKEND,
        version: int = 1,
        *,
        group: ProcessGroup | None = None,
        options: Options | None = None,
        allow: Allowed = (),
    ) -> None:
        require_own(BACKEND, (1, 2), backend, version)
        super().__init__(backend, version)
        self.cache = SaveCache()
        self._configure(options, allow, group)

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
        self._run(sharded_state_dict, checkpoint_dir, is_async=False)

    @raises_megatron_errors
    def async_save(
        self,
        sharded_state_dict: StateDict,
        checkpoint_dir: str | Path,
        async_strategy: str | None = None,  # noqa: ARG002 - any queue takes the request
    ) -> LocalSaveRequest:
        """Like ``save``, but only the copy of the tensors to host memory is waited for.

        Collective over the group. A save that still runs is waited for first. Takes as much host
        memory as the main replicas, kept for the next save.

        Returns:
            A request for Megatron-Core's queue, persistent or not, or to be waited for. Its
            finalisation is collective, and raises on every rank if the save has failed on any.

        Raises:
            PlanError: main replicas overlap, leave a gap, or cannot be stored.
            StorageError: the directory cannot be prepared.
            PeerError: another rank failed; the message names rank, key and file.
        """
        request = self._run(sharded_state_dict, checkpoint_dir, is_async=True)
        assert request is not None  # noqa: S101 - an asynchronous save returns one
        return request

    def _run(
        self, state: StateDict, checkpoint_dir: str | Path, *, is_async: bool
    ) -> LocalSaveRequest | None:
        """Save; begin to, and return the request, if ``is_async``. Collective over the group."""
        hash_folders()
        comm = self.communicator("save", f"to {checkpoint_dir}")
        with time_limit(self.options.timeout_s, OPENING, then=WORK):
            begun = begun_save(
                comm, lambda: self.open_save(comm, state, checkpoint_dir, is_async=is_async)
            )
            assert begun is not None  # noqa: S101 - every rank has one
            if is_async:
                return begin_in_background(begun)
            begun.run()
        return None

    def open_save(
        self,
        comm: Communicator,
        sharded_state_dict: StateDict,
        checkpoint_dir: str | Location,
        *,
        overwrite: bool | None = None,
        common: CommonState | None = None,
        **more: Any,
    ) -> ShardedSave:
        """A save by the ranks of ``comm`` of which nothing is described yet. Rank-local.

        Args:
            comm: ranks that save together.
            sharded_state_dict: as in ``save``.
            checkpoint_dir: as in ``save``.
            overwrite: None where Megatron-Core's own save calls, which has written the common state
                or has it in the state dict; else an earlier checkpoint stays loadable until this
                one is durable, and this tells whether arrays that belong to no finished checkpoint
                are replaced.
            common: the common state, where the caller knows it.
            more: what ShardedSave takes by name.
        """
        writer = CheckpointWriter(
            self.version,
            located(checkpoint_dir, self.options),
            self.options,
            global_rank=comm.global_ranks[comm.rank],
            keeps_old=overwrite is not None,
            overwrite=bool(overwrite),
        )
        allowed = self.allowed
        if overwrite is None:
            sharded_state_dict, found = split_common_object(sharded_state_dict)
            if found is not None:
                content = None
                if comm.rank == 0:
                    content = dump_loadable(found.data, name=found.key, allow=allowed)
                common = CommonState(None, "", content, None)
        return ShardedSave(
            comm, sharded_state_dict, writer, self.cache, allowed, common=common, **more
        )


class Format2SaveShardedStrategy(ZarrSaveShardedStrategy):
    """ZarrSaveShardedStrategy for ("zarr", 2)."""

    def __init__(self, backend: str = BACKEND, version: int = 2, **kwargs: Any) -> None:
        super().__init__(backend, version, **kwargs)


class ZarrLoadShardedStrategy(Configured, LoadShardedStrategy):  # type: ignore[misc]
    """Load strategy for ("zarr", 1), for checkpoints old and new.

    Args:
        verify: ``"read"`` (the default) or ``"off"``, for format 2; see Options.
        group: ranks that load together; the world by default.
        options: timeouts and memory bounds; by default from the environment.
        allow: further classes that ShardedObjects may be unpickled to.
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
        comm = self.communicator("load", f"from {checkpoint_dir}")
        with time_limit(self.options.timeout_s, OPENING, then=WORK):
            return load_sharded(
                comm, lambda: self.open_load(comm, sharded_state_dict, checkpoint_dir)
            )

    def open_load(
        self,
        comm: Communicator,
        sharded_state_dict: StateDict,
        checkpoint_dir: str | Location,
        *,
        name: object = None,
        validates: bool = False,
    ) -> ShardedLoad:
        """A load by the ranks of ``comm`` of which nothing is described yet. Rank-local."""
        root = located(checkpoint_dir, self.options)
        return ShardedLoad(
            comm,
            sharded_state_dict,
            self.open_checkpoint(root, self.options, comm),
            name=name or checkpoint_dir,
            options=self.options,
            allow=self.allowed,
            destination_of=self.destination_of,
            validates=validates,
        )

    def open_checkpoint(
        self, root: Location, options: Options, comm: Communicator | None = None
    ) -> StoredCheckpoint:
        """The checkpoint at a place. Rank-local.

        Args:
            root: its directory, or its place in an object store.
            options: how to read it.
            comm: ranks that load together; None: the common state is not compared.
        """
        save = OpenedSave(root) if comm is None else save_to_load(root)
        versions = self.versions
        if len(versions) > 1:  # what lies there says which it is
            versions = (2,) if isinstance(root, Bucket) or has_manifest(root) else (1,)
        if versions == (1,):
            return Format1Checkpoint(require_path(root, "format ('zarr', 1)"), options, save)
        checkpoint = save.read(lambda: Format2Checkpoint(root, options, save))
        if comm is None:
            return checkpoint
        if checkpoint.manifest.common is not None:  # each rank has read a copy that it sees
            save.read(checkpoint.common_content)
        return checkpoint

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
            found: StateDict = {
                key: metadata_tensor(key, array.shape, array.dtype.value)
                for key, array in arrays.items()
            }
            if with_objects:
                found |= {id_.unique_key: metadata_object(id_) for id_ in checkpoint.object_ids()}
            return found

        with time_limit(options.timeout_s):
            return run_with_limit(look_up, root)

    @raises_megatron_errors
    def remove_sharded_tensors(self, checkpoint_dir: str | Path, key_prefix: str) -> None:
        """Remove the arrays and objects whose key starts with a prefix. One rank calls it.

        Raises:
            StrategyError: it reads format 2, whose manifest lists what was saved.
        """
        if self.versions != (1,):
            raise StrategyError(
                f"{checkpoint_dir}: arrays {key_prefix}* cannot be removed from a checkpoint of "
                "format ('zarr', 2); load what is to stay, and save it"
            )
        root = Path(checkpoint_dir).absolute()
        require_directory(root)
        keys = [key for key in array_keys(root) if key.startswith(key_prefix)]
        for key in sorted(keys, key=len, reverse=True):
            remove_array(root, key)
        for name in [name for name in object_ids(root) if name.key.startswith(key_prefix)]:
            remove_object(root, name)

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
        require_own(self.backend, self.versions, self.backend, loaded_version)

    destination_of = staticmethod(destination)
    """Gives the tensor that is filled for a ShardedTensor."""


class Format2LoadShardedStrategy(ZarrLoadShardedStrategy):
    """ZarrLoadShardedStrategy for ("zarr", 2): everything that is read is verified.

    The common state's file is compared with the manifest too, before anything is returned.
    """

    versions = (2,)


class EitherFormatLoadShardedStrategy(ZarrLoadShardedStrategy):
    """ZarrLoadShardedStrategy for every format of this package, by what lies in the directory."""

    versions = (1, 2)

    def open_checkpoint(
        self, root: Location, options: Options, comm: Communicator | None = None
    ) -> Any:
        """See ZarrLoadShardedStrategy."""
        if holds_packs(root):
            return packs_to_load(root, options, comm)
        return super().open_checkpoint(root, options, comm)

    @raises_megatron_errors
    def check_backend_compatibility(self, loaded_version: str) -> None:
        """Raise IncompatibleVersionError unless the backend is one of this package's."""
        if loaded_version != PACKS.sharded_backend:
            super().check_backend_compatibility(loaded_version)
