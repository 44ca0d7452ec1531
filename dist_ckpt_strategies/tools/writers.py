"""What a conversion writes to: what all formats have in common, and format ("zarr", 1)."""

import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np

from dist_ckpt_strategies.core.array import DType, ObjectId, Region, Shape
from dist_ckpt_strategies.formats.commit import (
    commit_staged,
    discard,
    staging_of,
)
from dist_ckpt_strategies.formats.locations import CheckpointMarker
from dist_ckpt_strategies.formats.zarr2 import METADATA_NAME, metadata_content, object_name
from dist_ckpt_strategies.storage.files import COMMON_NAME, file_errors, make_directories
from dist_ckpt_strategies.storage.io_pool import Job, Transfer
from dist_ckpt_strategies.storage.store import ArrayRead, Bytes, HostArray
from dist_ckpt_strategies.tools.plan_convert import ConvertPlan, FileTask, WriteItem

Read = Callable[..., None]
"""``OpenedCheckpoint.read_into``, which takes any number of ArrayReads."""

Objects = Iterable[tuple[ObjectId, bytes]]
"""Shards of objects, each read when it is taken."""

_NUM_METADATA_THREADS = 16


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


def bytes_of(elements: HostArray) -> Bytes:
    """The memory of elements in C order."""
    return elements.reshape(-1).view(np.uint8)


class TargetWriter(ABC):
    """Writes a converted checkpoint. Any thread of any rank may ``write``.

    Each thread has ``block_nbytes`` of elements in memory at once.
    """

    def __init__(self, plan: ConvertPlan, block_nbytes: int) -> None:
        self.plan, self._block_nbytes = plan, block_nbytes
        self._memory = Memory()

    @abstractmethod
    def write(self, task: FileTask, read: Read) -> Any:
        """Write the elements of a task, durably; what ``finish`` needs of it, of JSON types."""

    @abstractmethod
    def finish(self, records: Mapping[int, Any], objects: Objects, common: bytes) -> Any:
        """Write all the rest, on the first rank; what ``commit`` needs of it.

        ``records`` are what ``write`` gave, on all ranks, by number of the task; ``common`` is the
        file of the common state.
        """

    @abstractmethod
    def commit(self, save: Any) -> None:
        """Make visible what ``finish`` gave, on the first rank."""

    def abandon(self) -> None:  # noqa: B027 - what is staged the next conversion removes
        """Remove what this rank has written of a conversion that failed before the commit."""

    def _block(self, item: WriteItem, region: Region, read: Read) -> HostArray:
        """Elements of a region, in memory of this thread, until it is called again."""
        elements = self._memory.array(region.shape, item.array.dtype)
        read(ArrayRead(item.source, region, elements))
        return elements


def stage(root: Path) -> str:
    """The id of a new staging directory, in place of what a failed conversion has left there."""
    save_id = uuid4().hex
    staging = staging_of(root, save_id).root
    with file_errors(None, root):
        make_directories(staging)
        for path in root.iterdir():  # there is nothing else: see ``convert``
            if path != staging and path.is_dir():
                discard(path)
    return save_id


class StagedWriter(TargetWriter):
    """Writes to a staging directory, from where a commit moves the files; see TargetWriter."""

    def __init__(self, root: Path, save_id: str, plan: ConvertPlan, block_nbytes: int) -> None:
        super().__init__(plan, block_nbytes)
        self._root = root
        self.files = staging_of(root, save_id)

    def commit(self, save: None) -> None:
        """See TargetWriter."""
        del save
        backend, version = self.plan.target.backend
        marker = CheckpointMarker(backend, version).to_json() if backend else None
        commit_staged(self.files.root, marker, overwrite=False, keys=self.plan.keys)

    def _write_objects(self, objects: Objects, common: bytes) -> None:
        """Objects beside the arrays, and the common state, as Zarr checkpoints have them."""
        for object_id, content in objects:
            self.files.write(object_name(object_id), content, key=object_id.key)
        self.files.write(COMMON_NAME, common)


class Zarr1Writer(StagedWriter):
    """Writes ("zarr", 1), a raw chunk at a time; see TargetWriter."""

    def write(self, task: FileTask, read: Read) -> None:
        """See TargetWriter."""
        (item,) = task.items
        whole = Region.whole(item.array.shape)

        def pieces() -> Iterator[Sequence[Bytes]]:
            for block in item.blocks(self._block_nbytes):
                elements = self._memory.array(block.shape, item.array.dtype)
                held = block.intersect(whole)
                if held != block:  # beyond the array's edge
                    bytes_of(elements)[:] = 0
                if held is not None:
                    place: Any = (..., *held.within(block).slices())
                    read(ArrayRead(item.source, held, elements[place]))
                yield [bytes_of(elements)]

        self.files.write_pieces(task.name, pieces())

    def finish(self, records: Mapping[int, Any], objects: Objects, common: bytes) -> None:
        """See TargetWriter."""
        del records
        jobs = []
        for array in self.plan.arrays:
            content = metadata_content(array.shape, array.chunk_shape, array.dtype)
            name = f"{array.key}/{METADATA_NAME}"
            write = partial(self.files.write_pieces, name, [[np.frombuffer(content, np.uint8)]])
            jobs.append(Job(array.key, self.files.path(name), write))
        Transfer(jobs, _NUM_METADATA_THREADS).wait()
        self._write_objects(objects, common)
