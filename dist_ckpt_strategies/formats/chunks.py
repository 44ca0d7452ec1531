"""The bytes of one chunk, of either format: assembled for a file or an object, and read back."""

from __future__ import annotations

import math
import operator
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import google_crc32c
import numpy as np
import numpy.typing as npt
import xxhash

from dist_ckpt_strategies.core.array import ArraySpec, DType, Region, Shape
from dist_ckpt_strategies.core.inner_grid import RUN_NBYTES, ChunkSpans, InnerGrid, Run
from dist_ckpt_strategies.errors import CorruptCheckpointError, IncompleteCheckpointError
from dist_ckpt_strategies.formats.manifest import ChunkRecord
from dist_ckpt_strategies.storage.file_systems import (
    BLOCK_NBYTES,
    Bytes,
    stop_direct,
    write_buffered,
)
from dist_ckpt_strategies.storage.files import file_errors
from dist_ckpt_strategies.storage.io_pool import MAX_SLICE_NBYTES
from dist_ckpt_strategies.storage.store import HostArray

Blocks = Iterable[tuple[Region, HostArray]]
"""The elements of a chunk in the order of its file: regions of the array, and their elements, with
any strides. In format 1 a region may reach past the array's edge, where its elements end."""

Digests = Mapping[tuple[str, Shape], list[int]]
"""Of each chunk, by key and index: of its inner chunks, then of its index."""

_NO_BUFFER: Bytes = np.empty(0, np.uint8)
_MAX_COPY_NBYTES = 4 << 20
_ABSENT = 2**64 - 1
_CRC = struct.Struct("<I")
_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe would wait for its writer

_BITS: Mapping[int, npt.DTypeLike] = MappingProxyType(
    {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
)


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
        grid: its inner chunks.
        path: of its file, as its user calls it.
        record: what the manifest says about it; None to read without a look at digests.
    """

    array: ArraySpec
    index: Shape
    grid: InnerGrid
    path: str
    record: ChunkRecord | None

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
            expected = record.digests[number]
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
        for run in part.runs():
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
    is_row = all(n == 1 for n in run.shape[1:]) or all(i == 1 for i in grid.inner_shape[:-1])
    if not is_row or grid.stored_nbytes != grid.raw_nbytes:
        return None
    covered = grid.region_of(run.offset, run.shape)
    if covered.shape != _whole_shape(grid, run) or not region.contains(covered):
        return None
    part = at_region(elements, covered.within(region))
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


def encode_run(
    grid: InnerGrid, run: Run, dtype: DType, source: HostArray, target: Bytes
) -> list[int]:
    """Put the inner chunks of a run together; the digest of each.

    Args:
        grid: of the chunk.
        run: which inner chunks.
        dtype: element type.
        source: the elements of the chunk's region, with any strides.
        target: ``run.num_chunks * grid.stored_nbytes`` bytes, which are overwritten.
    """
    chunks = target.reshape(run.num_chunks, grid.stored_nbytes)
    covered = grid.region_of(run.offset, run.shape)
    part = at_region(source, covered.within(grid.region))
    elements = _elements(chunks, grid, run, dtype)
    if covered.shape == _whole_shape(grid, run):
        np.copyto(elements, _split(bits_of(part), grid))
    else:
        elements[...] = 0
        for offset, chunk in _each(run, elements):
            own = grid.region_of(offset)
            held = at_region(source, own.within(grid.region))
            np.copyto(at_region(chunk, Region.whole(own.shape)), bits_of(held))
    return digests_of(chunks)


def decode_run(
    grid: InnerGrid, run: Run, dtype: DType, content: Bytes, region: Region, target: HostArray
) -> None:
    """Copy the elements that a run shares with ``region`` to their place.

    Args:
        grid: of the chunk.
        run: which inner chunks.
        dtype: element type.
        content: their bytes.
        region: what ``target`` holds.
        target: has the region's shape, and any strides.
    """
    chunks = content.reshape(run.num_chunks, grid.stored_nbytes)
    elements = _elements(chunks, grid, run, dtype)
    covered = grid.region_of(run.offset, run.shape)
    if covered.shape == _whole_shape(grid, run) and region.contains(covered):
        part = at_region(target, covered.within(region))
        np.copyto(_split(bits_of(part), grid), elements)
        return
    for offset, chunk in _each(run, elements):
        own = grid.region_of(offset)
        common = own.intersect(region)
        if common is not None:
            part = at_region(target, common.within(region))
            np.copyto(bits_of(part), at_region(chunk, common.within(own)))


def at_region(elements: HostArray, region: Region) -> HostArray:
    """A view of a region; of an array without dims too, where plain indexing would copy."""
    place: Any = (..., *region.slices())
    view: HostArray = elements[place]
    return view


def digests_of(chunks: Bytes) -> list[int]:
    """The digest of each row."""
    digest = xxhash.xxh3_64_intdigest
    return [digest(chunk.data) for chunk in chunks]


def encode_index(grid: InnerGrid) -> bytes:
    """The index at the end of the file: offset and size of each inner chunk, and a CRC32C."""
    entries = np.full((*grid.slot_counts, 2), _ABSENT, "<u8")
    held = entries[Region.whole(grid.counts).slices()]
    numbers = np.arange(grid.num_chunks, dtype="<u8").reshape(grid.counts)
    held[..., 0] = numbers * grid.stored_nbytes
    held[..., 1] = grid.stored_nbytes
    content = entries.tobytes()
    return content + _CRC.pack(google_crc32c.value(content))


def _elements(chunks: Bytes, grid: InnerGrid, run: Run, dtype: DType) -> HostArray:
    """The elements of the inner chunks: dims of the run, then those of an inner chunk."""
    raw = chunks[:, : grid.raw_nbytes].view(_BITS.get(dtype.itemsize, dtype.numpy))
    return raw.reshape((*run.shape, *grid.inner_shape))


def _whole_shape(grid: InnerGrid, run: Run) -> Shape:
    return tuple(map(operator.mul, run.shape, grid.inner_shape))


def _split(part: HostArray, grid: InnerGrid) -> HostArray:
    """A view with each dim cut in two: which inner chunk, and where in it; the former first."""
    counts = tuple(map(operator.floordiv, part.shape, grid.inner_shape))
    pairs = [size for pair in zip(counts, grid.inner_shape, strict=True) for size in pair]
    dims = range(2 * part.ndim)
    return part.reshape(pairs).transpose(*dims[::2], *dims[1::2])  # splitting dims never copies


def _each(run: Run, elements: HostArray) -> Iterator[tuple[Shape, HostArray]]:
    """The inner chunks of a run, each with its place in the chunk's grid."""
    for at in np.ndindex(*run.shape):
        yield tuple(map(operator.add, run.offset, at)), elements[(*at, ...)]


def bits_of(elements: HostArray) -> HostArray:
    """The same memory as whole numbers: copies keep every bit, and need no code for the dtype."""
    return elements.view(_BITS.get(elements.itemsize, elements.dtype))
