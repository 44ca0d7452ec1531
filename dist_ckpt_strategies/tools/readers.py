"""Checkpoints of any format, as a conversion or a comparison reads them: region by region."""

import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from dist_ckpt_strategies.config import Options
from dist_ckpt_strategies.core.array import (
    COMMON_OBJECT,
    ArraySpec,
    DType,
    ObjectId,
    Region,
    Shape,
)
from dist_ckpt_strategies.core.chunk_grids import ShardPlacement
from dist_ckpt_strategies.errors import IncompatibleVersionError, IncompleteCheckpointError
from dist_ckpt_strategies.formats.checkpoints import (
    Format1Checkpoint,
    Format2Checkpoint,
    StoredCheckpoint,
)
from dist_ckpt_strategies.formats.locations import PACKS, Location, read_marker, require_path
from dist_ckpt_strategies.formats.objects import (
    Allowed,
    dump_loadable,
    plain_value,
    require_archive,
)
from dist_ckpt_strategies.formats.pack_checkpoint import PackCheckpoint
from dist_ckpt_strategies.storage.files import COMMON_NAME, Directory
from dist_ckpt_strategies.storage.store import ArrayRead, ArrayReader, HostArray
from dist_ckpt_strategies.tools.plan_convert import Format, SourceArray

RegionRead = tuple[str, Region, HostArray]
"""The key of an array, a region of it, and memory of the region's shape, which may be strided."""


class CheckpointReader(ABC):
    """A finished checkpoint at an absolute place. Any thread may read.

    After the reads, ``save`` tells whether they were all of one save.

    Attributes:
        root: the place.
        format: of the checkpoint.
        identity: tells it from other saves, where anything does.
        layout: the parallel sizes of the job that saved, as far as they are recorded.
        features: of packs.
    """

    layout: Mapping[str, int] = MappingProxyType({})
    features: tuple[str, ...] = ()

    def __init__(self, root: Location, own_format: Format, save: Any, identity: str) -> None:
        self.root, self.format, self.save, self.identity = root, own_format, save, identity

    @abstractmethod
    def keys(self) -> Iterable[str]:
        """The keys of all arrays."""

    @abstractmethod
    def find(self, keys: Iterable[str]) -> list[SourceArray]:
        """The arrays of these keys, sorted. ArrayNotFoundError names a missing one."""

    @abstractmethod
    def read(self, reads: Sequence[RegionRead]) -> None:
        """Fill memory with regions of arrays that ``find`` has given.

        What the format has digests of is verified. Raises a StorageError if elements are missing or
        damaged, or cannot be read.
        """

    @abstractmethod
    def object_content(self, object_id: ObjectId) -> bytes:
        """One shard of an object, for ``load_content``; errors as in ``read``."""

    @cached_property
    def arrays(self) -> Sequence[SourceArray]:
        """All arrays, sorted by key."""
        return tuple(self.find(self.keys()))

    @cached_property
    def objects(self) -> Sequence[ObjectId]:
        """All shards of objects, sorted; not one that stands for the file of the common state."""
        found = sorted(self._stored_objects())
        if COMMON_OBJECT in found:
            try:
                self._common_file()
            except IncompleteCheckpointError:
                found.remove(COMMON_OBJECT)
        return tuple(found)

    def common_content(self) -> bytes:
        """The file of the common state, or what it would hold where an object has it instead.

        Megatron-Core 0.19 and later keep the common state among the objects. Raises
        IncompleteCheckpointError if there is neither, CorruptCheckpointError if it is damaged.
        """
        try:
            content = self._common_file()
        except IncompleteCheckpointError:
            if COMMON_OBJECT not in self._stored_objects():
                raise
        else:
            require_archive(content, f"{self.root}/{COMMON_NAME}", "common state")
            return content
        content = self.object_content(COMMON_OBJECT)
        plain = plain_value(content)
        if plain is None:
            return content
        return dump_loadable(plain.value, name=COMMON_OBJECT.unique_key, allow=())

    @abstractmethod
    def _stored_objects(self) -> Sequence[ObjectId]:
        """All shards of objects, in any order."""

    def _common_file(self) -> bytes:
        return Directory(require_path(self.root, f"format {self.format}")).read(COMMON_NAME)


class StoredReader(CheckpointReader):
    """A checkpoint of a format that this package writes, through the reader that loads use."""

    def __init__(
        self,
        root: Location,
        own_format: Format,
        checkpoint: StoredCheckpoint | PackCheckpoint,
        timeout_s: float,
    ) -> None:
        super().__init__(root, own_format, checkpoint.save, checkpoint.identity)
        self._checkpoint, self._timeout_s = checkpoint, timeout_s
        self._specs: dict[str, ArraySpec] = {}
        if isinstance(checkpoint, Format2Checkpoint):
            self.layout = checkpoint.manifest.layout
        if isinstance(checkpoint, PackCheckpoint):
            self.features = checkpoint.features

    @cached_property
    def _reader(self) -> ArrayReader:
        return self._checkpoint.array_reader()

    def keys(self) -> Iterable[str]:
        """See CheckpointReader."""
        return self._checkpoint.keys()

    def find(self, keys: Iterable[str]) -> list[SourceArray]:
        """See CheckpointReader."""
        specs = self._checkpoint.find(keys)
        self._specs |= specs
        return [self._source(spec) for spec in specs.values()]

    def _source(self, spec: ArraySpec) -> SourceArray:
        key, shape, dtype = spec.key, spec.shape, spec.dtype
        if not isinstance(self._checkpoint, PackCheckpoint):
            grid = spec.chunk_shape
            return SourceArray(key, shape, dtype, grid, granularity=spec.inner_shape)
        shards = (ShardPlacement(*block) for block in self._checkpoint.blocks(key))
        return SourceArray(key, shape, dtype, shards=tuple(shards))

    def read(self, reads: Sequence[RegionRead]) -> None:
        """See CheckpointReader. Arrays of format 1 have no digests."""
        found = [ArrayRead(self._specs[key], region, target) for key, region, target in reads]
        self._reader.begin_reads(found).wait(self._timeout_s)

    def object_content(self, object_id: ObjectId) -> bytes:
        """See CheckpointReader."""
        content = self._checkpoint.object_content(object_id)
        if plain_value(content) is None:
            path = self._checkpoint.object_path(object_id)
            require_archive(content, path, object_id.unique_key)
        return content

    def _stored_objects(self) -> Sequence[ObjectId]:
        return tuple(self._checkpoint.object_ids())

    def _common_file(self) -> bytes:
        if isinstance(self._checkpoint, Format1Checkpoint):
            return super()._common_file()
        return self._checkpoint.common_content()


class Memory(threading.local):
    """For each thread buffers that are used again: memory that was never touched is slow."""

    def __init__(self) -> None:
        self._buffers: dict[str, npt.NDArray[np.uint8]] = {}

    def array(self, shape: Shape, dtype: DType, name: str = "") -> HostArray:
        """This thread's buffer of that name, as an array in C order, with any content."""
        nbytes = math.prod(shape) * dtype.itemsize
        held = self._buffers.get(name)
        if held is None or held.size < nbytes:
            self._buffers.pop(name, None)
            held = self._buffers[name] = np.empty(nbytes, np.uint8)
        return held[:nbytes].view(dtype.numpy).reshape(shape)


def open_reader(root: Location, options: Options, allow: Allowed) -> CheckpointReader:
    """The finished checkpoint at an absolute place; ``allow`` is for objects of torch_dist.

    Raises CheckpointNotFoundError or IncompleteCheckpointError if there is none, and
    IncompatibleVersionError if this package does not read its format, or not from there.
    """
    marker = read_marker(root)
    backend, common = marker.sharded_format, marker.common_format
    if common != ("torch", 1):
        raise IncompatibleVersionError(
            f"{root}: common state of format {common}, this package reads ('torch', 1)"
        )
    checkpoint: StoredCheckpoint | PackCheckpoint
    if backend == PACKS.sharded_format:
        checkpoint = PackCheckpoint(root, options)
        return StoredReader(root, Format.PACK, checkpoint, options.timeout_s)
    if backend == ("zarr", 2):
        checkpoint = Format2Checkpoint(root, options)
        return StoredReader(root, Format.ZARR2, checkpoint, options.timeout_s)
    expected = "('safetensors', 1) or ('zarr', 2): others are not read from an object store"
    if isinstance(root, Path):
        expected = "('safetensors', 1), ('zarr', 1), ('zarr', 2) or ('torch_dist', 1)"
        if backend == ("zarr", 1):
            checkpoint = Format1Checkpoint(root, options)
            return StoredReader(root, Format.ZARR1, checkpoint, options.timeout_s)
        if backend == ("torch_dist", 1):
            from dist_ckpt_strategies.tools.torch_dist import TorchDistReader  # noqa: PLC0415

            return TorchDistReader(root, allow)
    raise IncompatibleVersionError(f"{root}: format {backend}; expected {expected}")
