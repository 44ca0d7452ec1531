"""Checkpoints of any format, as a conversion or a comparison reads them: region by region."""

import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from dist_ckpt_strategies.config import Options
from dist_ckpt_strategies.core.array import COMMON_OBJECT, DType, ObjectId, Region, Shape
from dist_ckpt_strategies.errors import IncompatibleVersionError, IncompleteCheckpointError
from dist_ckpt_strategies.formats.checkpoints import (
    Format1Checkpoint,
    Format2Checkpoint,
    StoredCheckpoint,
)
from dist_ckpt_strategies.formats.locations import Location, OpenedSave, read_marker, require_path
from dist_ckpt_strategies.formats.objects import (
    Allowed,
    dump_loadable,
    plain_value,
    require_archive,
)
from dist_ckpt_strategies.storage.files import COMMON_NAME, Directory
from dist_ckpt_strategies.storage.store import ArrayRead, HostArray
from dist_ckpt_strategies.tools.plan_convert import Format, SourceArray


class CheckpointReader(ABC):
    """A finished checkpoint at an absolute place. Any thread may read.

    ``arrays`` are sorted by key; ``layout`` has the parallel sizes of the job that saved, as far as
    they are recorded. After the reads, ``save`` tells whether they were all of one save.
    """

    arrays: Sequence[SourceArray]
    layout: Mapping[str, int] = MappingProxyType({})

    def __init__(self, root: Location, own_format: Format) -> None:
        self.root, self.format, self.save = root, own_format, OpenedSave(root)

    @abstractmethod
    def read(self, key: str, region: Region, target: HostArray) -> None:
        """Fill ``target``, which is in C order and of the region's shape.

        What the format has digests of is verified. Raises a StorageError if elements are missing or
        damaged, or cannot be read.
        """

    @abstractmethod
    def object_content(self, object_id: ObjectId) -> bytes:
        """One shard of an object, for ``load_content``; errors as in ``read``."""

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


class ZarrReader(CheckpointReader):
    """A checkpoint of format ("zarr", 1) or ("zarr", 2), through the reader that loads use."""

    def __init__(self, root: Location, checkpoint: StoredCheckpoint, timeout_s: float) -> None:
        is_format2 = isinstance(checkpoint, Format2Checkpoint)
        super().__init__(root, Format.ZARR2 if is_format2 else Format.ZARR1)
        self._checkpoint, self._timeout_s, self.save = checkpoint, timeout_s, checkpoint.save
        self._reader = checkpoint.array_reader()
        self._specs = checkpoint.find(checkpoint.keys())
        self.arrays = tuple(
            SourceArray(a.key, a.shape, a.dtype, a.chunk_shape, granularity=a.inner_shape)
            for a in self._specs.values()
        )
        if isinstance(checkpoint, Format2Checkpoint):
            self.layout = checkpoint.manifest.layout

    def read(self, key: str, region: Region, target: HostArray) -> None:
        """See CheckpointReader. Arrays of format 1 have no digests."""
        read = ArrayRead(self._specs[key], region, target)
        self._reader.begin_reads([read]).wait(self._timeout_s)

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
        if isinstance(self._checkpoint, Format2Checkpoint):
            return self._checkpoint.common_content()
        return super()._common_file()


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
    if backend == ("zarr", 2):
        return ZarrReader(root, Format2Checkpoint(root, options), options.timeout_s)
    expected = "('zarr', 2), the only one that is read from an object store"
    if isinstance(root, Path):
        expected = "('zarr', 1), ('zarr', 2) or ('torch_dist', 1)"
        if backend == ("zarr", 1):
            return ZarrReader(root, Format1Checkpoint(root, options), options.timeout_s)
        if backend == ("torch_dist", 1):
            from dist_ckpt_strategies.tools.torch_dist import TorchDistReader  # noqa: PLC0415

            return TorchDistReader(root, allow)
    raise IncompatibleVersionError(f"{root}: format {backend}; expected {expected}")
