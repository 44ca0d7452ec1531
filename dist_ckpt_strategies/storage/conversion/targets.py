"""What a conversion writes to, unit by unit."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Protocol

import numpy as np
import numpy.typing as npt

from dist_ckpt_strategies.config import Options
from dist_ckpt_strategies.plan.convert import ConvertPlan
from dist_ckpt_strategies.spec.conversion import Part, Unit
from dist_ckpt_strategies.spec.dtype import DType
from dist_ckpt_strategies.spec.marker import CheckpointMarker
from dist_ckpt_strategies.spec.object import ObjectId
from dist_ckpt_strategies.spec.region import Extent, Region
from dist_ckpt_strategies.storage.base import HostArray
from dist_ckpt_strategies.storage.conversion.journal import Record
from dist_ckpt_strategies.storage.disk.file_access import permitted_access
from dist_ckpt_strategies.storage.disk.files import create_anew, file_errors, sync_path
from dist_ckpt_strategies.storage.disk.whole_flush import whole_flush
from dist_ckpt_strategies.storage.disk.writeback import begin_writeback

Bytes = npt.NDArray[np.uint8]

ReadBox = Callable[[str, Region, HostArray], None]
"""Fills memory with a box of the source's array of a key."""


@dataclass(frozen=True, slots=True)
class Contents:
    """What goes into the target beside the arrays.

    Attributes:
        objects: every shard, as ``Source.object_content`` gives it; one at a time in memory.
        common: the file of the common state.
        layout: parallel sizes of the job that saved, as far as they are known.
        versions: of the packages that take part, by name.
    """

    objects: Iterable[tuple[ObjectId, bytes]]
    common: bytes
    layout: Mapping[str, int]
    versions: Mapping[str, str]


class Target(Protocol):
    """A place that a checkpoint is converted into. ``write`` is called from several threads."""

    @property
    def marker(self) -> CheckpointMarker | None:
        """What will make the checkpoint visible; None where ``finish`` does."""
        ...

    def begin(self, plan: ConvertPlan) -> None:
        """Write the descriptions of arrays; those that are there are replaced."""
        ...

    def write(self, unit: Unit, read: ReadBox) -> Record:
        """Write a unit whole; what ``finish`` has to know of it, of JSON types."""
        ...

    def is_there(self, unit: Unit, record: Record) -> bool:
        """Whether what was written is still there, by its size."""
        ...

    def finish(self, plan: ConvertPlan, records: Mapping[int, Record], contents: Contents) -> None:
        """Write all the rest, durably; the units are durable already."""
        ...


class Memory(threading.local):
    """For each thread a buffer that is used again: memory that was never touched is slow."""

    def __init__(self) -> None:
        self._buffers: dict[str, Bytes] = {}

    def get(self, name: str, nbytes: int) -> Bytes:
        """So many bytes of this thread's buffer of that name, with any content."""
        held = self._buffers.get(name)
        if held is None or held.size < nbytes:
            self._buffers.pop(name, None)
            held = self._buffers[name] = np.empty(nbytes, np.uint8)
        return held[:nbytes]

    def array(self, shape: Extent, dtype: DType, name: str = "elements") -> HostArray:
        """This thread's buffer of that name, as an array in C order."""
        nbytes = Region.whole(shape).numel * dtype.itemsize
        return self.get(name, nbytes).view(dtype.numpy).reshape(shape)


def read_part(part: Part, box: Region, read: ReadBox, memory: Memory) -> HostArray:
    """The elements of a box of a part; zeros where it reaches past the array's edge."""
    found = memory.array(box.shape, part.array.dtype)
    inside = box.intersect(Region.whole(part.array.shape))
    if inside == box:
        read(part.source, box, found)
        return found
    found.reshape(-1).view(np.uint8).fill(0)
    if inside is not None:
        held = np.empty(inside.shape, part.array.dtype.numpy)
        read(part.source, inside, held)
        bits = np.dtype((np.void, part.array.dtype.itemsize))
        found.view(bits)[inside.within(box).slices()] = held.view(bits)
    return found


class Flushing(Protocol):
    """Makes what was written durable."""

    def run(self, names: Iterable[str]) -> None:
        """Return once the files of these names, and the names themselves, are durable."""
        ...


class StoreFlush:
    """What an object store has acknowledged is durable; see Flushing."""

    def run(self, names: Iterable[str]) -> None:
        """See Flushing."""


class Flush:
    """Makes what was written durable: file by file, or all at once where that is cheaper.

    Args:
        root: the target's directory; nothing is written to it before this is made.
        options: whether the whole file system may be flushed.
    """

    def __init__(self, root: Path, options: Options) -> None:
        access = permitted_access(root, options)
        self._whole = whole_flush(root) if access.is_flushed_whole else None
        self._root = root

    @property
    def is_each(self) -> bool:
        """Whether every file has to be flushed by its writer."""
        return self._whole is None

    def run(self, names: Iterable[str]) -> None:
        """Return once the files of these names, and the names themselves, are durable."""
        if self._whole is not None:
            self._whole.run()
            return
        above = {str(parent) for name in names for parent in PurePosixPath(name).parents}
        for directory in sorted(above):
            path = f"{self._root}/{directory}"
            with file_errors(None, path):
                sync_path(path)


@contextmanager
def new_file(path: str, key: str | None, *, is_flushed: bool) -> Iterator[int]:
    """A file that is made anew, open for writing; errors name it.

    One that its writer does not flush is on its way to the disk when this ends.
    """
    with file_errors(key, path):
        handle = create_anew(path)
        try:
            yield handle
            if is_flushed:
                os.fsync(handle)
            else:
                begin_writeback(handle)
        finally:
            os.close(handle)


def has_size(path: str, nbytes: int) -> bool:
    """Whether there is a file of that size."""
    try:
        return os.stat(path).st_size == nbytes  # noqa: PTH116
    except OSError:
        return False


def key_of(unit: Unit) -> str | None:
    """The key that messages about a unit name."""
    return unit.parts[0].array.key if unit.parts else None
