"""The Zarr backend, formats ("zarr", 1) and ("zarr", 2): save and load strategies.

Names that Megatron-Core 0.15 gave to strategies and functions are importable from here.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any, ClassVar, Self

import torch

from dist_ckpt_strategies.comm.base import Communicator
from dist_ckpt_strategies.comm.process_group import ProcessGroup
from dist_ckpt_strategies.comm.solo import SoloCommunicator
from dist_ckpt_strategies.comm.torch_communicator import open_communicator
from dist_ckpt_strategies.config import Options, Verify, options_from_environment
from dist_ckpt_strategies.core.array import ArraySpec
from dist_ckpt_strategies.errors import IncompatibleVersionError, StrategyError
from dist_ckpt_strategies.formats.checkpoint_writer import (
    CheckpointWriter,
    Format1Writer,
    Format2Writer,
)
from dist_ckpt_strategies.formats.checkpoints import (
    Format1Checkpoint,
    Format2Checkpoint,
    Share,
    has_manifest,
)
from dist_ckpt_strategies.formats.locations import Location, located, require_path
from dist_ckpt_strategies.formats.objects import Allowed, object_ids, remove_object
from dist_ckpt_strategies.formats.zarr2 import Zarr2Layout
from dist_ckpt_strategies.megatron.allowed import default_allowed
from dist_ckpt_strategies.megatron.bases import AsyncSaveShardedStrategy, LoadShardedStrategy
from dist_ckpt_strategies.megatron.errors import raises_megatron_errors
from dist_ckpt_strategies.megatron.shards import StateDict, metadata_object, metadata_tensor
from dist_ckpt_strategies.sharded.async_request import LocalSaveRequest
from dist_ckpt_strategies.sharded.async_save import begin_in_background
from dist_ckpt_strategies.sharded.load import (
    Conversions,
    LoadInputs,
    conversions,
    destination,
    dtypes_of,
    load_sharded,
)
from dist_ckpt_strategies.sharded.save import SaveInputs, ShardedSave, begun_save
from dist_ckpt_strategies.sharded.save_cache import SaveCache
from dist_ckpt_strategies.storage.base import StoredCheckpoint
from dist_ckpt_strategies.storage.bucket import Bucket
from dist_ckpt_strategies.storage.files import require_directory
from dist_ckpt_strategies.storage.io_pool import limited
from dist_ckpt_strategies.storage.time_limit import time_limit
from dist_ckpt_strategies.strategies.legacy_zarr import (
    flatten_range,
    load_zarr_based_sharded_metadata,
    pad_to_expected_shape,
    postprocess_numpy_array,
)
from dist_ckpt_strategies.strategies.registry import register_default_zarr_strategies

__all__ = [
    "EitherFormatLoadShardedStrategy",
    "Format2LoadShardedStrategy",
    "Format2SaveShardedStrategy",
    "ZarrLoadShardedStrategy",
    "ZarrSaveShardedStrategy",
    "flatten_range",
    "load_zarr_based_sharded_metadata",
    "pad_to_expected_shape",
    "postprocess_numpy_array",
    "register_default_zarr_strategies",
]

BACKEND = "zarr"


class _WithOptions(ABC):
    """Options, and copying with changes."""

    _options: Options

    @property
    def options(self) -> Options:
        """How saves or loads are carried out."""
        return self._options

    def limited(self, timeout_s: float) -> Self:
        """The same strategy with another time limit, in seconds; it shares all that is kept.

        Raises:
            StrategyError: the limit is out of range.
        """
        return self._with_changes(timeout_s=timeout_s)

    def _with_changes(self, **changes: Any) -> Self:
        """The same strategy with some options that are others."""
        other = copy(self)
        other._options = self._options.with_changes(**changes)  # noqa: SLF001 - a copy
        return other


class ZarrSaveShardedStrategy(_WithOptions, AsyncSaveShardedStrategy):  # type: ignore[misc]
    """Save strategy for the Zarr backend.

    ("zarr", 1) is one Zarr v2 array per key, one chunk per shard. ("zarr", 2) is sharded Zarr v3
    arrays and a manifest with the digest of every inner chunk; see docs/format2.md.

    The last plan is kept, and used again if every rank saves the same shards as before; so is the
    memory for asynchronous saves, which run one after the other.

    Args:
        backend: name of the format; ``"zarr"``.
        version: version of the format; 1 or 2.
        engine: ``"tensorstore"`` or ``"zarr"``, for format 1; by default from the environment.
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
        engine: str | None = None,
        group: ProcessGroup | None = None,
        options: Options | None = None,
        allow: Allowed = (),
    ) -> None:
        _require_format(backend, version, (1, 2))
        super().__init__(backend, version)
        self.cache = SaveCache()
        self._group = group
        self._allow = tuple(allow)
        self._options = (options or options_from_environment()).with_changes(engine=engine)

    @property
    def takes_urls(self) -> bool:
        """Whether a checkpoint may be in an object store."""
        return bool(self.version != 1)

    @property
    def format_name(self) -> str:
        """The format, for messages."""
        return f"format {(self.backend, self.version)}"

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
        comm = self.communicator(checkpoint_dir)
        self.save_with(comm, lambda: self.inputs(comm, sharded_state_dict, checkpoint_dir))

    @raises_megatron_errors
    def async_save(
        self,
        sharded_state_dict: StateDict,
        checkpoint_dir: str | Path,
        async_strategy: object = None,  # noqa: ARG002 - later releases of Megatron-Core pass it
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
        comm = self.communicator(checkpoint_dir)
        return self.begin_with(comm, lambda: self.inputs(comm, sharded_state_dict, checkpoint_dir))

    def inputs(
        self,
        comm: Communicator,
        sharded_state_dict: StateDict,
        checkpoint_dir: str | Location,
        *,
        overwrite: bool | None = None,
    ) -> SaveInputs:
        """What this rank brings to a save. Rank-local.

        Args:
            comm: ranks that save together.
            sharded_state_dict: as in ``save``.
            checkpoint_dir: as in ``save``.
            overwrite: None where Megatron-Core's own save has replaced the common state already;
                else an earlier checkpoint stays loadable until this one is durable, and this
                tells whether arrays that belong to no finished checkpoint are replaced.
        """
        writer = self._writer(
            located(checkpoint_dir, self._options),
            comm.global_rank(comm.rank),
            keeps_old=overwrite is not None,
            overwrite=bool(overwrite),
        )
        allow = [*default_allowed(), *self._allow]
        return SaveInputs(sharded_state_dict, writer, self._options, self.cache, allow)

    def save_with(self, comm: Communicator, open_inputs: Callable[[], SaveInputs]) -> None:
        """Save what each rank brings. Collective."""
        with time_limit(self._options.timeout_s):
            _begun(comm, open_inputs).run()

    def begin_with(
        self, comm: Communicator, open_inputs: Callable[[], SaveInputs]
    ) -> LocalSaveRequest:
        """Begin to save what each rank brings, in the background. Collective."""

        def open_when_ready() -> SaveInputs:
            self.cache.get_ready(self._options)
            return open_inputs()

        with time_limit(self._options.timeout_s):
            begun = _begun(comm, open_when_ready)
        return begin_in_background(begun)

    def _writer(
        self, root: Location, global_rank: int, *, keeps_old: bool, overwrite: bool
    ) -> CheckpointWriter:
        if self.version == 1:
            return Format1Writer(root, self._options, keeps_old=keeps_old, overwrite=overwrite)
        return Format2Writer(
            root,
            self._options,
            global_rank=global_rank,
            keeps_old=keeps_old,
            overwrite=overwrite,
        )

    @property
    def has_group(self) -> bool:
        """Whether other ranks than the world save together."""
        return self._group is not None

    def communicator(self, checkpoint_dir: str | Location) -> Communicator:
        """The ranks that save together."""
        return open_communicator(
            self._group,
            timeout_s=self._options.timeout_s,
            purpose="save",
            detail=f"to {checkpoint_dir}",
        )


class Format2SaveShardedStrategy(ZarrSaveShardedStrategy):
    """ZarrSaveShardedStrategy for ("zarr", 2)."""

    def __init__(self, backend: str = BACKEND, version: int = 2, **kwargs: Any) -> None:
        super().__init__(backend, version, **kwargs)


def _begun(comm: Communicator, open_inputs: Callable[[], SaveInputs]) -> ShardedSave:
    begun = begun_save(comm, open_inputs)
    assert begun is not None  # noqa: S101 - every rank brings something
    return begun


class ZarrLoadShardedStrategy(_WithOptions, LoadShardedStrategy):  # type: ignore[misc]
    """Load strategy for ("zarr", 1), for checkpoints old and new.

    Args:
        engine: ``"tensorstore"`` or ``"zarr"``, for format 1; by default from the environment.
        verify: ``"read"`` (the default), ``"full"`` or ``"off"``, for format 2; see Options.
        group: ranks that load together; the world by default.
        options: timeouts and memory bounds; by default from the environment.
        allow: further classes that ShardedObjects may be unpickled to.
    """

    versions: ClassVar[tuple[int, ...]] = (1,)
    """Of the formats that it reads."""

    @raises_megatron_errors
    def __init__(
        self,
        *,
        engine: str | None = None,
        verify: str | None = None,
        group: ProcessGroup | None = None,
        options: Options | None = None,
        allow: Allowed = (),
    ) -> None:
        super().__init__()
        chosen = options or options_from_environment()
        self._group = group
        self._options = chosen.with_changes(engine=engine, verify=verify)
        self._allow = tuple(allow)

    @property
    def takes_urls(self) -> bool:
        """Whether a checkpoint may be in an object store."""
        return 2 in self.versions  # noqa: PLR2004 - the format's own number

    @property
    def format_name(self) -> str:
        """The format, for messages."""
        return f"format {(BACKEND, self.versions[-1])}"

    def verifying(self, verify: str) -> Self:
        """The same strategy with another choice of ``verify``.

        Raises:
            StrategyError: no such choice, or it reads format 1 only, which keeps no digests.
        """
        if not self.takes_urls:
            raise StrategyError(
                f"verify={verify!r}: digests are kept by format ('zarr', 2), which "
                f"{type(self).__name__} does not read"
            )
        return self._with_changes(verify=verify)

    @property
    def can_handle_sharded_objects(self) -> bool:
        """ShardedObjects are read too."""
        return True

    def with_strict_dtype(self) -> Self:
        """The same strategy with the option ``strict_dtype`` set."""
        return self._with_changes(strict_dtype=True)

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
        comm = open_communicator(
            self._group,
            timeout_s=self._options.timeout_s,
            purpose="load",
            detail=f"from {checkpoint_dir}",
        )
        with time_limit(self._options.timeout_s):
            return load_sharded(comm, lambda: self.inputs(comm, sharded_state_dict, checkpoint_dir))

    def inputs(
        self, comm: Communicator, sharded_state_dict: StateDict, checkpoint_dir: str | Location
    ) -> LoadInputs:
        """What this rank brings to a load by the ranks of ``comm``. Rank-local."""
        share = Share(comm.rank, comm.size)
        root = located(checkpoint_dir, self._options)
        return LoadInputs(
            sharded_state_dict,
            self.open_checkpoint(root, self._options, share),
            checkpoint_dir,
            self._options,
            self.allowed,
            self._destination,
        )

    @property
    def has_group(self) -> bool:
        """Whether other ranks than the world load together."""
        return self._group is not None

    def tensors_to_fill(
        self, tensors: Sequence[Any], stored: Mapping[str, ArraySpec], options: Options
    ) -> tuple[list[torch.Tensor], Conversions]:
        """For ShardedTensors, the tensors that a load fills and what it converts. Rank-local.

        Errors as in ``load``.
        """
        converted = conversions(tensors, dtypes_of(stored), is_strict=options.strict_dtype)
        return [self._destination(tensor) for tensor in tensors], converted

    def load_alone(self, sharded_state_dict: StateDict, checkpoint_dir: Location) -> StateDict:
        """Like ``load``, by this rank without any other. Rank-local."""
        comm = SoloCommunicator()
        with time_limit(self._options.timeout_s):
            return load_sharded(comm, lambda: self.inputs(comm, sharded_state_dict, checkpoint_dir))

    @raises_megatron_errors
    def load_tensors_metadata(self, checkpoint_dir: str | Path) -> StateDict:
        """A ShardedTensor without data, by key, for each stored array. Rank-local."""
        root = located(checkpoint_dir, self._options)
        with time_limit(self._options.timeout_s):
            return self._stored_metadata(root, with_objects=False)

    @raises_megatron_errors
    def load_sharded_metadata(self, checkpoint_dir: str | Path) -> StateDict:
        """Like ``load_tensors_metadata``, with ShardedObjects by unique key. Rank-local."""
        root = located(checkpoint_dir, self._options)
        with time_limit(self._options.timeout_s):
            return self._stored_metadata(root, with_objects=True)

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
        _remove_arrays(Path(checkpoint_dir).absolute(), key_prefix)

    @raises_megatron_errors
    def check_backend_compatibility(self, loaded_version: str) -> None:
        """Raise IncompatibleVersionError unless the backend is ``"zarr"``.

        Args:
            loaded_version: the backend's name; Megatron-Core called it so in this class.
        """
        _require_format(loaded_version, self.versions[-1], self.versions)

    @raises_megatron_errors
    def check_version_compatibility(self, loaded_version: int) -> None:
        """Raise IncompatibleVersionError unless it reads that version."""
        _require_format(BACKEND, loaded_version, self.versions)

    def open_checkpoint(self, root: Location, options: Options, share: Share) -> StoredCheckpoint:
        """The checkpoint at a place. Rank-local.

        Args:
            root: its directory, or its place in an object store.
            options: how to read it.
            share: which part of what ranks verify together is this one's.
        """
        if self._is_format1(root):
            return Format1Checkpoint(require_path(root, self.format_name), options)
        checkpoint = Format2Checkpoint(root, options)
        if options.verify is Verify.FULL:
            checkpoint.require_whole(share)
        elif share.rank == 0:
            checkpoint.require_common()
        return checkpoint

    def _stored_metadata(self, root: Location, *, with_objects: bool) -> StateDict:
        if self._is_format1(root):
            path = require_path(root, self.format_name)
            return _metadata_of_format1(path, with_objects=with_objects)
        manifest = Format2Checkpoint(root, self._options).manifest
        found = {record.array.key: metadata_tensor(record.array) for record in manifest.arrays()}
        if with_objects:
            found |= {r.id.unique_key: metadata_object(r.id) for r in manifest.objects()}
        return found

    def _is_format1(self, root: Location) -> bool:
        """Whether the checkpoint is read as format 1; by what lies there, if it reads both."""
        if len(self.versions) == 1:
            return self.versions == (1,)
        return not (isinstance(root, Bucket) or has_manifest(root))

    def _destination(self, tensor: Any) -> torch.Tensor:
        """The tensor that is filled for a ShardedTensor."""
        return destination(tensor)

    def allowed(self) -> Allowed:
        """The classes that ShardedObjects may be unpickled to."""
        return [*default_allowed(), *self._allow]


class Format2LoadShardedStrategy(ZarrLoadShardedStrategy):
    """ZarrLoadShardedStrategy for ("zarr", 2): everything that is read is verified.

    The common state's file is compared with the manifest too, before anything is returned.
    """

    versions = (2,)


class EitherFormatLoadShardedStrategy(ZarrLoadShardedStrategy):
    """ZarrLoadShardedStrategy for ("zarr", 1) and ("zarr", 2), by what lies in the directory."""

    versions = (1, 2)


def _require_format(backend: str, version: int, versions: Sequence[int]) -> None:
    if backend != BACKEND or version not in versions:
        known = " or ".join(str((BACKEND, known)) for known in versions)
        raise IncompatibleVersionError(
            f"expected backend {known}, found ({backend!r}, {version!r})"
        )


@limited
def _metadata_of_format1(root: Path, *, with_objects: bool) -> StateDict:
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


def _remove_arrays(root: Path, key_prefix: str) -> int:
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
