"""The bytes of one chunk, of either format: assembled for a file or an object, and read back."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import xxhash

from dist_ckpt_strategies.core.array import ArraySpec
from dist_ckpt_strategies.core.inner_grid import ChunkSpans, InnerGrid, Run
from dist_ckpt_strategies.core.region import Region, Shape
from dist_ckpt_strategies.errors import CorruptCheckpointError, IncompleteCheckpointError
from dist_ckpt_strategies.formats.manifest import ChunkRecord
from dist_ckpt_strategies.formats.zarr3 import (
    at_region,
    bits_of,
    digests_of,
    encode_index,
    encode_run,
    is_in_place,
)
from dist_ckpt_strategies.storage.direct_io import (
    BLOCK_NBYTES,
    Bytes,
    stop_direct,
    write_buffered,
)
from dist_ckpt_strategies.storage.files import file_errors
from dist_ckpt_strategies.storage.store import HostArray
from dist_ckpt_strategies.storage.time_limit import MAX_SLICE_NBYTES

Blocks = Iterable[tuple[Region, HostArray]]
"""The elements of a chunk in the order of its file: regions of the array, and their elements, with
any strides. In format 1 a region may reach past the array's edge, where its elements end."""

RUN_NBYTES = 2 << 20
"""Inner chunks are handled this many bytes at a time: they stay in the processor's cache."""

_NO_BUFFER: Bytes = np.empty(0, np.uint8)
_MAX_COPY_NBYTES = 4 << 20
_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe would wait for its writer


def missing_chunk(array: ArraySpec, path: str) -> IncompleteCheckpointError:
    """The error for a chunk that should be there and is not."""
    return IncompleteCheckpointError(
        f"{array.key}: chunk file {path} is missing; the save was cut short, or the file was "
        "removed afterwards (`dist-ckpt verify` lists all of them)",
        key=array.key,
        path=path,
    )


def damaged_chunk(array: ArraySpec, path: str, what: str) -> CorruptCheckpointError:
    """The error for a chunk file that is not as it was written."""
    text = f"{array.key}: chunk file {path} {what}"
    return CorruptCheckpointError(text, key=array.key, path=path)


def require_size(array: ArraySpec, path: str, found: int, expected: int) -> None:
    """Raise CorruptCheckpointError unless a chunk file has the size that it has to have."""
    if found != expected:
        raise damaged_chunk(array, path, f"has {found} bytes, expected {expected}")


@contextmanager
def opened_chunk(array: ArraySpec, path: str, nbytes: int | None) -> Iterator[int]:
    """The file of a chunk, open for reading; errors name it.

    Args:
        array: the array.
        path: of the file.
        nbytes: the size that it has to have; None for any.

    Raises:
        IncompleteCheckpointError: it is missing.
        CorruptCheckpointError: it has another size.
        StorageError: it cannot be read.
    """
    with file_errors(array.key, path):
        try:
            handle = os.open(path, _READ)
        except FileNotFoundError:
            raise missing_chunk(array, path) from None
        try:
            if nbytes is not None:
                require_size(array, path, os.fstat(handle).st_size, nbytes)
            yield handle
        finally:
            os.close(handle)


@dataclass(frozen=True, slots=True)
class InnerChunks:
    """A chunk of format 2 that is read.

    Attributes:
        array: the array.
        index: of the chunk.
        path: of its file, as its user calls it.
        record: what the manifest says about it; None to read without a look at digests.
    """

    array: ArraySpec
    index: Shape
    path: str
    record: ChunkRecord | None

    @property
    def grid(self) -> InnerGrid:
        """Its inner chunks."""
        return InnerGrid.of(self.array, self.index)

    def verify(self, run: Run, content: Bytes) -> None:
        """Raise unless the inner chunks of a run have the digests that the manifest lists.

        Raises:
            CorruptCheckpointError: one has another; names array, chunk, file, writer and digests.
        """
        record = self.record
        if record is None:
            return
        digests = digests_of(content.reshape(run.num_chunks, -1))
        for number, found in enumerate(digests, run.first):
            expected = record.digest(number)
            if found != expected:
                raise damaged_chunk(
                    self.array,
                    self.path,
                    f"(chunk {self.index}, written by rank {record.writer}) is damaged: inner "
                    f"chunk {number} has digest {found:016x}, expected {expected:016x}",
                )


class FileSink:
    """Takes the bytes of a file one after the other.

    Args:
        handle: of the file, switched to direct transfers where ``is_direct``.
        buffer: aligned; None where only ``write`` is called, and not ``is_direct``.
        is_direct: whether they go past the page cache, but for the end that fills no block.

    Attributes:
        copies: whether ``write`` copies: then ``space`` is the better place to put bytes in.
    """

    def __init__(
        self, handle: int, buffer: Bytes | None = None, *, is_direct: bool = False
    ) -> None:
        self._handle, self._is_direct = handle, is_direct
        self._buffer = _NO_BUFFER if buffer is None else buffer
        self._held = 0
        self.copies = is_direct

    def space(self, nbytes: int) -> Bytes:
        """Memory for the next bytes; ``add`` takes them."""
        return self._buffer[self._held : self._held + nbytes]

    def add(self, nbytes: int) -> None:
        """Take the bytes that were put into ``space``."""
        held = self._held + nbytes
        rest = held % BLOCK_NBYTES if self._is_direct else 0
        write_buffered(self._handle, self._buffer[: held - rest])
        self._buffer[:rest] = self._buffer[held - rest : held]
        self._held = rest

    def write(self, content: Bytes) -> None:
        """Take the next bytes."""
        if not self._is_direct:
            write_buffered(self._handle, content)
            return
        step = self._buffer.size - BLOCK_NBYTES
        for start in range(0, content.size, step):
            part = content[start : start + step]
            self.space(part.size)[...] = part
            self.add(part.size)

    def finish(self) -> None:
        """Write the end."""
        if self._is_direct:
            stop_direct(self._handle)
            write_buffered(self._handle, self._buffer[: self._held])


class MemorySink:
    """Takes the bytes of an object one after the other, as FileSink does those of a file."""

    copies = True

    def __init__(self, nbytes: int) -> None:
        self.content: Bytes = np.empty(nbytes, np.uint8)
        self._held = 0

    def space(self, nbytes: int) -> Bytes:
        """Memory for the next bytes; ``add`` takes them."""
        return self.content[self._held : self._held + nbytes]

    def add(self, nbytes: int) -> None:
        """Take the bytes that were put into ``space``."""
        self._held += nbytes

    def write(self, content: Bytes) -> None:
        """Take the next bytes."""
        self.space(content.size)[...] = content
        self.add(content.size)


def encode_chunk(
    array: ArraySpec, index: Shape, blocks: Blocks, sink: FileSink | MemorySink
) -> list[int]:
    """Give a sink all bytes of a chunk; the digests of its inner chunks, then of its index."""
    if array.inner_shape is None:
        for region, elements in blocks:
            for block in _in_order(bits_of(elements), region.shape):
                sink.write(block.reshape(-1).view(np.uint8))
        return []
    grid = InnerGrid.of(array, index)
    digests: list[int] = []
    for region, elements in blocks:
        counts = tuple(-(-n // i) for n, i in zip(region.shape, grid.inner_shape, strict=True))
        part = grid._replace(region=region, counts=counts)
        for run in part.all(runs_at_a_time(part)):
            memory = None if sink.copies else memory_of(part, run, part.region, elements)
            if memory is None:
                memory = sink.space(run.num_chunks * grid.stored_nbytes)
                digests += encode_run(part, run, array.dtype, elements, memory)
                sink.add(memory.size)
            else:
                digests += digests_of(memory.reshape(run.num_chunks, -1))
                sink.write(memory)
    entries = np.frombuffer(encode_index(grid), np.uint8)
    sink.write(entries)
    return [*digests, xxhash.xxh3_64_intdigest(entries.data)]


def _in_order(elements: HostArray, shape: Shape) -> Iterator[HostArray]:
    """Elements in C order, padded with zeros to a shape; copies are a few MiB at a time."""
    if elements.shape == shape and elements.flags.c_contiguous:
        yield elements
        return
    row_nbytes = math.prod(shape[1:]) * elements.itemsize
    if row_nbytes > _MAX_COPY_NBYTES:
        nothing = np.empty((0,) * (elements.ndim - 1), elements.dtype)
        for number in range(shape[0]):
            row = elements[number] if number < len(elements) else nothing
            yield from _in_order(row, shape[1:])
        return
    step = _MAX_COPY_NBYTES // row_nbytes
    for start in range(0, shape[0], step):
        part = elements[start : start + step]
        block = np.zeros((min(step, shape[0] - start), *shape[1:]), elements.dtype)
        block[Region.whole(part.shape).slices()] = part
        yield block


def runs_at_a_time(grid: InnerGrid) -> int:
    """Inner chunks to handle at a time."""
    return max(1, RUN_NBYTES // grid.stored_nbytes)


def needed_nbytes(grid: InnerGrid) -> int:
    """Of a buffer for a run, and a block at each end of it."""
    return max(RUN_NBYTES, grid.stored_nbytes) + 2 * BLOCK_NBYTES


def memory_of(grid: InnerGrid, run: Run, region: Region, elements: HostArray) -> Bytes | None:
    """The memory of a run's elements, where its bytes are those of the run in the file.

    Args:
        grid: of the chunk.
        run: which inner chunks.
        region: of the array, what ``elements`` holds.
        elements: of any strides.
    """
    if not is_in_place(grid, run, region):
        return None
    part = at_region(elements, grid.region_of(run.offset, run.shape).within(region))
    return part.reshape(-1).view(np.uint8) if part.flags.c_contiguous else None


def span_shares(spans: ChunkSpans, memory: Bytes) -> Iterator[tuple[tuple[int, Bytes], ...]]:
    """The spans of a raw chunk, each with the memory that it fills, in jobs of some MiB."""
    if memory.size <= MAX_SLICE_NBYTES and memory.size == spans.span_nbytes:
        yield ((spans.offsets[0][0], memory),)
        return
    share: list[tuple[int, Bytes]] = []
    held = 0
    for in_file, in_target in spans.offsets:
        for start in range(0, spans.span_nbytes, MAX_SLICE_NBYTES):
            size = min(MAX_SLICE_NBYTES, spans.span_nbytes - start)
            share.append((in_file + start, memory[in_target + start : in_target + start + size]))
            held += size
            if held >= MAX_SLICE_NBYTES:
                yield tuple(share)
                share, held = [], 0
    if share:
        yield tuple(share)
