"""The target of a conversion: common parts of all formats, and format ("zarr", 1).

Of each format there are two functions, one that writes a task, and one that writes the rest.
"""

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np

from dist_ckpt_strategies.core.array import DType, ObjectId, Region, Shape
from dist_ckpt_strategies.formats.commit import commit_staged, discard, staging_of
from dist_ckpt_strategies.formats.locations import CheckpointMarker, Location, place_of
from dist_ckpt_strategies.formats.objects import Allowed
from dist_ckpt_strategies.formats.pack import Digests
from dist_ckpt_strategies.formats.zarr2 import METADATA_NAME, metadata_content, object_name
from dist_ckpt_strategies.storage.files import (
    COMMON_NAME,
    LOCK_NAME,
    Directory,
    file_errors,
    make_directories,
)
from dist_ckpt_strategies.storage.io_pool import Job, Transfer
from dist_ckpt_strategies.storage.store import ArrayRead, Bytes, HostArray
from dist_ckpt_strategies.tools.plan_convert import ConvertPlan, FileTask, Format, WriteItem

Read = Callable[..., None]
"""``OpenedCheckpoint.read_into``, which takes any number of ArrayReads."""

Objects = Iterable[tuple[ObjectId, bytes]]
"""Shards of objects, each read when it is taken."""

_NUM_METADATA_THREADS = 16
_ALIGNMENT = 16


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

    def arrays(self, kinds: Sequence[tuple[Shape, DType]], name: str) -> list[HostArray]:
        """Several arrays, one after the other, in this thread's buffer of that name."""
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in kinds]
        ends = [*accumulate(-(-nbytes // _ALIGNMENT) * _ALIGNMENT for nbytes in sizes)]
        held = self.array((ends[-1],), DType.UINT8, name)
        starts = zip(kinds, sizes, [0, *ends[:-1]], strict=True)
        return [
            held[start : start + nbytes].view(dtype.numpy).reshape(shape)
            for (shape, dtype), nbytes, start in starts
        ]


def bytes_of(elements: HostArray) -> Bytes:
    """The memory of elements in C order."""
    return elements.reshape(-1).view(np.uint8)


@dataclass(frozen=True, slots=True)
class Target:
    """The target of a conversion, on one rank.

    Attributes:
        plan: what is written.
        root: the directory; for packs also a place in an object store.
        save_id: the same on all ranks.
        block_nbytes: of elements that a thread has in memory at once.
        allow: classes that objects may be unpickled to, for torch_dist.
        digests: of blocks of the source, which are compared with them while they are read: packs
            take them over.
        written: files of packs of this rank.
        memory: of each thread.
    """

    plan: ConvertPlan
    root: Location
    save_id: str
    block_nbytes: int
    allow: Allowed = ()
    digests: Mapping[tuple[str, Region], Digests] = field(default_factory=dict)
    written: list[str] = field(default_factory=list)
    memory: Memory = field(default_factory=Memory)

    @property
    def files(self) -> Directory:
        """The staging directory, from which a commit moves the files."""
        assert isinstance(self.root, Path)  # noqa: S101 - only packs go elsewhere
        return staging_of(self.root, self.save_id)

    def block(self, item: WriteItem, region: Region, read: Read) -> HostArray:
        """Elements of a region, in memory of this thread, until it is called again."""
        elements = self.memory.array(region.shape, item.array.dtype)
        read(ArrayRead(item.source, region, elements))
        return elements


Write = Callable[[Target, FileTask, Read], Any]
"""Writes the elements of a task, durably, on any thread; gives what ``Finish`` needs of it."""

Finish = Callable[[Target, Mapping[int, Any], Objects, bytes], Any]
"""Writes all the rest, on the first rank; gives what the commit needs of it.

Its arguments are what ``Write`` gave on all ranks, by number of the task, the objects, and the file
of the common state.
"""


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


def commit_files(target: Target) -> None:
    """Move what is staged into place. On the first rank."""
    backend, version = target.plan.target.backend
    marker = CheckpointMarker(backend, version).to_json() if backend else None
    has_files_of_keys = target.plan.target in {Format.ZARR1, Format.ZARR3}
    keys = target.plan.keys if has_files_of_keys else []
    commit_staged(target.files.root, marker, overwrite=False, keys=keys)
    if not backend:  # the file of the lock is no part of a model
        place_of(target.root).delete([LOCK_NAME])


def write_objects(target: Target, objects: Objects, common: bytes) -> None:
    """Write objects beside the arrays, and the common state, as Zarr checkpoints have them."""
    for object_id, content in objects:
        target.files.write(object_name(object_id), content, key=object_id.key)
    target.files.write(COMMON_NAME, common)


def write_zarr1(target: Target, task: FileTask, read: Read) -> None:
    """See ``Write``: a raw chunk of ("zarr", 1)."""
    (item,) = task.items
    whole = Region.whole(item.array.shape)

    def pieces() -> Iterator[Sequence[Bytes]]:
        for block in item.blocks(target.block_nbytes):
            elements = target.memory.array(block.shape, item.array.dtype)
            held = block.intersect(whole)
            if held != block:  # beyond the array's edge
                bytes_of(elements)[:] = 0
            if held is not None:
                place: Any = (..., *held.within(block).slices())
                read(ArrayRead(item.source, held, elements[place]))
            yield [bytes_of(elements)]

    target.files.write_pieces(task.name, pieces())


def finish_zarr1(target: Target, _: Mapping[int, Any], objects: Objects, common: bytes) -> None:
    """See ``Finish``: the descriptions of arrays, the objects and the common state."""
    files, jobs = target.files, []
    for array in target.plan.arrays:
        content = metadata_content(array.shape, array.chunk_shape, array.dtype)
        name = f"{array.key}/{METADATA_NAME}"
        write = partial(files.write_pieces, name, [[np.frombuffer(content, np.uint8)]])
        jobs.append(Job(array.key, files.path(name), write))
    Transfer(jobs, _NUM_METADATA_THREADS).wait()
    write_objects(target, objects, common)
