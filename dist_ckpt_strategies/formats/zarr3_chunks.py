"""Chunk files of format 2 on a file system: written in one go, read and verified run by run."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt
import xxhash

from dist_ckpt_strategies.core.array import ArraySpec
from dist_ckpt_strategies.core.inner_grid import InnerGrid, Run
from dist_ckpt_strategies.core.region import Region, Shape
from dist_ckpt_strategies.errors import CorruptCheckpointError
from dist_ckpt_strategies.formats.manifest import ChunkRecord
from dist_ckpt_strategies.formats.raw_chunks import missing_chunk
from dist_ckpt_strategies.formats.zarr3 import (
    at_box,
    decode_run,
    digests_of,
    encode_index,
    encode_run,
    is_in_place,
)
from dist_ckpt_strategies.storage.base import HostArray
from dist_ckpt_strategies.storage.direct_io import (
    BLOCK_NBYTES,
    MIN_DIRECT_NBYTES,
    BounceBuffers,
    pread_into,
    read_aligned,
    start_direct,
    stop_direct,
    write_buffered,
)
from dist_ckpt_strategies.storage.file_systems import is_cached
from dist_ckpt_strategies.storage.files import create_new, file_errors
from dist_ckpt_strategies.storage.time_limit import raise_if_cancelled

Bytes = npt.NDArray[np.uint8]

ChunkBlocks = Iterable[tuple[InnerGrid, HostArray]]
"""The elements of a chunk in the order of its inner chunks: some of these, and their elements."""

RUN_NBYTES = 2 << 20
"""Inner chunks are handled this many bytes at a time: they stay in the processor's cache."""

BUFFER_NBYTES = 6 << 20
"""Size for a run or the largest inner chunk that a plan makes, and what is not aligned yet."""

_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe would wait for its writer


def runs_at_a_time(grid: InnerGrid) -> int:
    """Inner chunks to handle at a time."""
    return max(1, RUN_NBYTES // grid.stored_nbytes)


@dataclass(frozen=True, slots=True)
class ChunkFile:
    """Where a chunk is kept.

    Attributes:
        array: the array.
        index: of the chunk.
        path: of its file.
        grid: its inner chunks.
    """

    array: ArraySpec
    index: Shape
    path: str
    grid: InnerGrid

    @classmethod
    def of(cls, array: ArraySpec, index: Shape, path: str) -> Self:
        """The file of a chunk, with its inner chunks worked out."""
        return cls(array, index, path, InnerGrid.of(array, index))

    @contextmanager
    def opened(self) -> Iterator[int]:
        """The file, open for reading, of the size that it has to have; errors name it.

        Raises:
            IncompleteCheckpointError: it is missing.
            CorruptCheckpointError: it has another size.
            StorageError: it cannot be read.
        """
        with file_errors(self.array.key, self.path):
            try:
                handle = os.open(self.path, _READ)
            except FileNotFoundError:
                raise missing_chunk(self.array, self.path) from None
            try:
                size, expected = os.fstat(handle).st_size, self.grid.file_nbytes
                if size != expected:
                    raise self.damaged(f"has {size} bytes, expected {expected}")
                yield handle
            finally:
                os.close(handle)

    def require(self, record: ChunkRecord, first: int, content: Bytes) -> None:
        """Raise unless inner chunks have the digests that the manifest lists.

        Args:
            record: what it says about this chunk.
            first: number of the first inner chunk.
            content: one in each row.

        Raises:
            CorruptCheckpointError: one has another; names array, chunk, file, writer and digests.
        """
        for number, found in enumerate(digests_of(content), first):
            expected = record.digest(number)
            if found != expected:
                raise self.damaged(
                    f"(chunk {self.index}, written by rank {record.writer}) is damaged: inner "
                    f"chunk {number} has digest {found:016x}, expected {expected:016x}"
                )

    def damaged(self, what: str) -> CorruptCheckpointError:
        """The error for a file that is not as it was written."""
        key = self.array.key
        return CorruptCheckpointError(
            f"{key}: chunk file {self.path} {what}", key=key, path=self.path
        )


@dataclass(frozen=True, slots=True)
class ChunkFileWrite:
    """The whole content of one chunk file.

    Attributes:
        file: where it goes.
        blocks: the elements, with any strides.
        buffers: memory to put inner chunks together in.
        is_direct: whether a large file goes past the page cache.
        is_flushed: whether it is flushed, rather than all files at once by the caller.
    """

    file: ChunkFile
    blocks: ChunkBlocks
    buffers: BounceBuffers
    is_direct: bool
    is_flushed: bool

    def run(self) -> list[int]:
        """Make the file; the digests of its inner chunks and of its index.

        Raises:
            StorageError: it cannot be written, or is there already.
        """
        with file_errors(self.file.array.key, self.file.path):
            handle = create_new(self.file.path)
            try:
                raise_if_cancelled()
                digests = self._write_to(handle)
                if self.is_flushed:
                    os.fsync(handle)
            finally:
                os.close(handle)
        return digests

    def _write_to(self, handle: int) -> list[int]:
        grid, dtype = self.file.grid, self.file.array.dtype
        is_direct = self.is_direct and _is_worth_direct(grid, self.buffers) and start_direct(handle)
        digests: list[int] = []
        with borrowed_for(grid, self.buffers) as buffer:
            waiting = 0
            for part, source, run in runs_of(self.blocks):
                memory = None if is_direct else _as_stored(part, source, run)
                if memory is not None:
                    digests += digests_of(memory.reshape(run.num_chunks, -1))
                    write_buffered(handle, memory)
                    continue
                nbytes = run.num_chunks * grid.stored_nbytes
                target = buffer[waiting : waiting + nbytes]
                digests += encode_run(part, run, dtype, source, target)
                waiting = _write_out(handle, buffer, waiting + nbytes, is_direct=is_direct)
            index = np.frombuffer(encode_index(grid), np.uint8)
            if is_direct:
                stop_direct(handle)
            write_buffered(handle, buffer[:waiting])
            write_buffered(handle, index)
        return [*digests, xxhash.xxh3_64_intdigest(index.data)]


def runs_of(blocks: ChunkBlocks) -> Iterator[tuple[InnerGrid, HostArray, Run]]:
    """Each block with its runs, in the order of the file."""
    return ((*block, run) for block in blocks for run in block[0].all(runs_at_a_time(block[0])))


def _as_stored(grid: InnerGrid, source: HostArray, run: Run) -> Bytes | None:
    """The memory of a run's elements, where it is what the file will hold."""
    if not is_in_place(grid, run, grid.region):
        return None
    return _memory(source, grid.box(run.offset, run.shape).within(grid.region))


def _memory(elements: HostArray, box: Region) -> Bytes | None:
    """The bytes of a box, where they lie in one piece, in C order."""
    part = at_box(elements, box)
    return part.reshape(-1).view(np.uint8) if part.flags.c_contiguous else None


def _write_out(handle: int, buffer: Bytes, held: int, *, is_direct: bool) -> int:
    """Write what the buffer holds, but for what fills no block; how many bytes that is."""
    rest = held % BLOCK_NBYTES if is_direct else 0
    write_buffered(handle, buffer[: held - rest])
    buffer[:rest] = buffer[held - rest : held]
    return rest


def _needed_nbytes(grid: InnerGrid) -> int:
    """Bytes of a run, and a block at each end of it."""
    return max(RUN_NBYTES, grid.stored_nbytes) + 2 * BLOCK_NBYTES


def _is_worth_direct(grid: InnerGrid, buffers: BounceBuffers) -> bool:
    return grid.file_nbytes >= MIN_DIRECT_NBYTES and _needed_nbytes(grid) <= buffers.nbytes


@contextmanager
def borrowed_for(grid: InnerGrid, buffers: BounceBuffers) -> Iterator[Bytes]:
    """Memory to handle one run in; only inner chunks that no plan of ours makes need a new one."""
    if _needed_nbytes(grid) > buffers.nbytes:
        yield np.empty(_needed_nbytes(grid), np.uint8)
        return
    with buffers.borrowed() as buffer:
        yield buffer


@dataclass(frozen=True, slots=True)
class ChunkFileRead:
    """Some runs of a chunk file, and what they fill.

    Attributes:
        file: where it is.
        record: what the manifest says about it; None to read without a look at digests.
        runs: which inner chunks.
        region: of the array, what ``target`` holds.
        target: has the region's shape, and any strides.
        buffers: memory to take inner chunks apart in.
        is_direct: whether a large file that is not cached is read past the page cache.
    """

    file: ChunkFile
    record: ChunkRecord | None
    runs: tuple[Run, ...]
    region: Region
    target: HostArray
    buffers: BounceBuffers
    is_direct: bool

    def run(self) -> None:
        """Read every run whole, verify it, and copy what is wanted to its place.

        Raises:
            IncompleteCheckpointError: the file is missing.
            CorruptCheckpointError: it has another size, or an inner chunk another digest.
            StorageError: it cannot be read.
        """
        grid = self.file.grid
        with self.file.opened() as handle:
            is_direct = (
                self.is_direct
                and _is_worth_direct(grid, self.buffers)
                and not is_cached(handle, grid.file_nbytes)
                and start_direct(handle)
            )
            with borrowed_for(grid, self.buffers) as buffer:
                for run in self.runs:
                    self._read(handle, grid, run, buffer, is_direct=is_direct)

    def _read(
        self, handle: int, grid: InnerGrid, run: Run, buffer: Bytes, *, is_direct: bool
    ) -> None:
        memory = None
        if not is_direct and is_in_place(grid, run, self.region):
            memory = _memory(self.target, grid.box(run.offset, run.shape).within(self.region))
        target = buffer if memory is None else memory
        content = read_run(handle, grid, run, target, is_direct=is_direct)
        raise_if_cancelled()
        if self.record is not None:
            self.file.require(self.record, run.first, content.reshape(run.num_chunks, -1))
        if memory is None:
            decode_run(grid, run, self.file.array.dtype, content, self.region, self.target)


def read_run(handle: int, grid: InnerGrid, run: Run, buffer: Bytes, *, is_direct: bool) -> Bytes:
    """The bytes of a run, in memory of the buffer.

    Raises:
        OSError: the file has become shorter.
    """
    nbytes = run.num_chunks * grid.stored_nbytes
    byte_offset = run.first * grid.stored_nbytes
    if is_direct:
        content = read_aligned(handle, byte_offset, nbytes, buffer)
    else:
        content = buffer[: pread_into(handle, byte_offset, buffer[:nbytes])]
    if content.size != nbytes:
        raise OSError(0, "it ended while it was read")
    return content
