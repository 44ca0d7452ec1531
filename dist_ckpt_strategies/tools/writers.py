"""What a conversion writes to: formats ("zarr", 1) and ("zarr", 3), and files of safetensors."""

import json
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np

from dist_ckpt_strategies.config import Options
from dist_ckpt_strategies.core.array import ArraySpec, DType, ObjectId, Region, Shape
from dist_ckpt_strategies.formats.commit import (
    Staged,
    commit_staged,
    discard,
    require_own_place,
    staging_of,
)
from dist_ckpt_strategies.formats.locations import CheckpointMarker, Location
from dist_ckpt_strategies.formats.objects import OBJECT_SUFFIX, Allowed
from dist_ckpt_strategies.formats.zarr2 import METADATA_NAME, metadata_content
from dist_ckpt_strategies.storage.files import (
    COMMON_NAME,
    LOCK_NAME,
    Directory,
    file_errors,
    make_directories,
    sync_path,
    write_buffered,
)
from dist_ckpt_strategies.storage.io_pool import Job, Transfer
from dist_ckpt_strategies.storage.store import Bytes, HostArray
from dist_ckpt_strategies.tools import zarr3
from dist_ckpt_strategies.tools.opened import OpenedCheckpoint, RegionRead
from dist_ckpt_strategies.tools.plan_convert import (
    SAFETENSORS_DTYPES,
    ConvertPlan,
    FileTask,
    Format,
    WriteItem,
    contiguous_runs,
)
from dist_ckpt_strategies.tools.safetensors import INDEX_NAME

Read = Callable[[Sequence[RegionRead]], None]
"""Reads regions of the source; see ``OpenedCheckpoint.read_into``."""

_NUM_METADATA_THREADS = 16
_MAX_OBJECTS_NBYTES = 64 << 20
_WORD_NBYTES = 8
"""Bytes of the size before a header of safetensors, and what the header is padded to."""


class Memory(threading.local):
    """For each thread buffers that are used again: memory that was never touched is slow."""

    def __init__(self) -> None:
        self._buffers: dict[str, Bytes] = {}

    def array(self, shape: Shape, dtype: DType, name: str = "") -> HostArray:
        """This thread's buffer of that name, as an array in C order, with any content."""
        nbytes = math.prod(shape) * dtype.itemsize
        held = self._buffers.get(name)
        if held is None or held.size < nbytes:
            self._buffers.pop(name, None)
            held = self._buffers[name] = np.empty(nbytes, np.uint8)
        array: HostArray = held[:nbytes].view(dtype.numpy).reshape(shape)
        return array


class TargetWriter(ABC):
    """Writes a converted checkpoint, on one rank or several; all threads of these may ``write``.

    Each thread has ``block_nbytes`` of elements in memory at once.
    """

    def __init__(self, root: Location, plan: ConvertPlan, block_nbytes: int) -> None:
        self.root, self.plan, self._block_nbytes = root, plan, block_nbytes
        self._memory = Memory()

    def _block(self, item: WriteItem, region: Region, read: Read) -> HostArray:
        """Elements of a region, in memory of this thread, until it is called again."""
        elements = self._memory.array(region.shape, item.array.dtype)
        read([(item.source.key, region, elements)])
        return elements

    @abstractmethod
    def begin(self) -> str:
        """Make a place for the files, on the first rank; the id of the save."""

    @abstractmethod
    def open(self, save_id: str, arrays: Sequence[ArraySpec]) -> None:
        """Write to the place of that id, and describe arrays."""

    @abstractmethod
    def write(self, task: FileTask, read: Read) -> Any:
        """Write the elements of a task; gives what ``finish`` has to know of it, of JSON types."""

    def flush(self, tasks: Sequence[FileTask]) -> None:
        """Make the files of this rank's tasks durable, where ``write`` has not."""
        del tasks

    @abstractmethod
    def finish(self, records: Mapping[int, Any], source: OpenedCheckpoint, common: bytes) -> None:
        """Write all the rest, on the first rank; ``common`` is the file of the common state.

        ``records`` are what ``write`` gave, on all ranks, by number of the task.
        """

    @abstractmethod
    def commit(self) -> None:
        """Make all of it visible, on the first rank."""

    def abandon(self) -> None:  # noqa: B027 - most leave it to the next conversion
        """Remove what this rank has written of a conversion that failed before the commit."""


class StagedWriter(TargetWriter):
    """Writes to a staging directory, from where a commit moves the files; see TargetWriter.

    What a conversion that fails leaves there, the next one to the same target removes.
    """

    def __init__(
        self,
        root: Location,
        plan: ConvertPlan,
        block_nbytes: int,
        options: Options,
        allow: Allowed = (),
    ) -> None:
        super().__init__(root, plan, block_nbytes)
        self._allow = allow
        assert isinstance(root, Path)  # noqa: S101 - only packs go elsewhere
        self._path, self._options, self._save_id = root, options, ""

    @property
    def files(self) -> Directory:
        """The files of the place, where that is a directory."""
        return staging_of(self._path, self._save_id)

    def begin(self) -> str:
        """See TargetWriter."""
        self._save_id = uuid4().hex
        with file_errors(None, self._path):
            make_directories(self.files.root)
            for path in self._path.iterdir():  # there is nothing else: see ``_require_free``
                if path != self.files.root and path.is_dir():
                    discard(path)
        return self._save_id

    def open(self, save_id: str, arrays: Sequence[ArraySpec]) -> None:
        """See TargetWriter."""
        del arrays
        self._save_id = save_id
        with file_errors(None, self._path):
            make_directories(self.files.root)

    def commit(self) -> None:
        """See TargetWriter."""
        backend, version = self.plan.target.backend
        marker = CheckpointMarker(backend, version).to_json() if backend else None
        staged = Staged(self._path, self._save_id, self.plan.keys)
        commit_staged(staged, marker, overwrite=False, fence=require_own_place)


class ZarrWriter(StagedWriter):
    """Writes ("zarr", 1) or ("zarr", 3), a raw chunk at a time; see TargetWriter."""

    def open(self, save_id: str, arrays: Sequence[ArraySpec]) -> None:
        """See TargetWriter."""
        super().open(save_id, arrays)
        jobs = []
        for array in arrays:
            content = (zarr3.metadata_content if self._is_v3 else metadata_content)(
                array.shape, array.chunk_shape, array.dtype
            )
            name = f"{array.key}/{zarr3.METADATA_NAME if self._is_v3 else METADATA_NAME}"
            write = partial(self.files.write_pieces, name, [[np.frombuffer(content, np.uint8)]])
            jobs.append(Job(array.key, self.files.path(name), write))
        Transfer(jobs, _NUM_METADATA_THREADS).wait(self._options.timeout_s)

    @property
    def _is_v3(self) -> bool:
        return self.plan.target is Format.ZARR3

    def write(self, task: FileTask, read: Read) -> None:
        """See TargetWriter."""
        (item,) = task.items
        array, whole = item.array, Region.whole(item.array.shape)

        def pieces() -> Iterator[Sequence[Bytes]]:
            for block in item.blocks(self._block_nbytes):
                elements, held = (
                    self._memory.array(block.shape, array.dtype),
                    block.intersect(whole),
                )
                if held != block:
                    bytes_of(elements)[:] = 0
                if held is not None:
                    place: Any = (..., *held.within(block).slices())
                    read([(item.source.key, held, elements[place])])
                yield [bytes_of(elements)]

        self.files.write_pieces(task.name, pieces())

    def finish(self, records: Mapping[int, Any], source: OpenedCheckpoint, common: bytes) -> None:
        """See TargetWriter."""
        del records
        for object_id in self.plan.objects:
            content = source.object_content(object_id)
            self.files.write(f"{object_id.unique_key}{OBJECT_SUFFIX}", content, key=object_id.key)
        self.files.write(COMMON_NAME, common)
        if self._is_v3:
            group = {"zarr_format": 3, "node_type": "group", "attributes": {}}
            self.files.write(zarr3.METADATA_NAME, json.dumps(group).encode())


class SafetensorsWriter(StagedWriter):
    """Writes files of safetensors and their index; see TargetWriter.

    A file is the size of a JSON header, the header, and the elements of each tensor in C order.
    """

    @cached_property
    def _headers(self) -> dict[str, bytes]:
        """The beginning of each file: the size of its description, and the description."""
        files: dict[str, dict[str, Any]] = {}
        for task in self.plan.tasks:
            (item,) = task.items
            files.setdefault(task.name, {"__metadata__": {"format": "pt"}})[task.key] = {
                "dtype": SAFETENSORS_DTYPES[item.array.dtype],
                "shape": item.array.shape,
                "data_offsets": [item.byte_offset, item.byte_offset + item.array.nbytes],
            }
        found = {}
        for name, fields in files.items():
            content = json.dumps(fields, separators=(",", ":")).encode()
            content += b" " * (-len(content) % _WORD_NBYTES)
            found[name] = len(content).to_bytes(_WORD_NBYTES, "little") + content
        return found

    def begin(self) -> str:
        """See TargetWriter. Every file gets its header."""
        save_id = super().begin()
        for name, header in self._headers.items():
            self.files.write(name, header)
        return save_id

    def write(self, task: FileTask, read: Read) -> None:
        """See TargetWriter."""
        path = self.files.path(task.name)
        with file_errors(task.key, path), open(path, "r+b", 0) as file:  # noqa: PTH123
            for item in task.items:
                itemsize, shape = item.array.dtype.itemsize, item.array.shape
                start = len(self._headers[task.name]) + item.byte_offset
                for block in item.blocks(self._block_nbytes):
                    content, done = bytes_of(self._block(item, block, read)), 0
                    for first, count in contiguous_runs(block, shape):
                        run = content[done : done + count * itemsize]
                        file.seek(start + first * itemsize)
                        write_buffered(file.fileno(), run)
                        done += run.size

    def commit(self) -> None:
        """See TargetWriter. The file of the lock is no part of a model."""
        super().commit()
        Directory(self._path).delete([LOCK_NAME])

    def flush(self, tasks: Sequence[FileTask]) -> None:
        """See TargetWriter."""
        for name in sorted({task.name for task in tasks}):
            path = self.files.path(name)
            with file_errors(None, path):
                sync_path(path)

    def finish(self, records: Mapping[int, Any], source: OpenedCheckpoint, common: bytes) -> None:
        """See TargetWriter. By the index the files are known to be complete."""
        del records, source, common
        weights = {task.key: task.name for task in self.plan.tasks}
        index = {
            "metadata": {"total_size": self.plan.nbytes},
            "weight_map": {key: weights[key] for key in sorted(weights)},
        }
        self.files.write(INDEX_NAME, json.dumps(index, indent=2).encode())


def object_batches(
    source: OpenedCheckpoint, objects: Sequence[ObjectId]
) -> Iterator[dict[ObjectId, bytes]]:
    """Objects, 64 MiB of them at a time, or one that is larger; the last batch may be empty."""
    batch: dict[ObjectId, bytes] = {}
    held = 0
    for object_id in objects:
        content = source.object_content(object_id)
        if batch and held + len(content) > _MAX_OBJECTS_NBYTES:
            yield batch
            batch, held = {}, 0
        batch[object_id] = content
        held += len(content)
    yield batch


def bytes_of(elements: HostArray) -> Bytes:
    """The memory of elements in C order."""
    return elements.reshape(-1).view(np.uint8)
