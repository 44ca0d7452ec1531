"""Read elements of stored blocks; every byte of a pack is compared with its digest.

A block is a part of a pack, or a whole file that has no digests. A read takes whole ranges. Where a
range belongs to the elements wanted as it is, it goes into their memory; others go through memory
of a few MiB for each thread.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
from xxhash import xxh3_64_intdigest

from dist_ckpt_strategies.core.array import Region, Shape
from dist_ckpt_strategies.errors import CorruptCheckpointError, StorageError
from dist_ckpt_strategies.formats.pack import (
    RANGE_NBYTES,
    Digests,
    num_ranges,
    opened_table,
    table_nbytes,
)
from dist_ckpt_strategies.formats.pack_write import PackRecord, file_of
from dist_ckpt_strategies.storage.bucket import Place
from dist_ckpt_strategies.storage.io_pool import Deadline, Job, Transfer
from dist_ckpt_strategies.storage.store import Bytes, HostArray

READ_NBYTES = 4 << 20
"""What one call reads: it stays in the processor's cache until its digests are taken."""

_MAX_BUFFERS = 1000
"""Of one call; the system takes 1024."""


DigestTables = dict[PackRecord, Digests]


@dataclass(frozen=True, slots=True)
class BlockRead:
    """Elements of a stored block, to be brought into memory.

    Attributes:
        pack: the pack; or the name of a file without digests that holds the block alone.
        byte_offset: of the block, after the pack's header.
        first_range: the first digest of the block in the pack's table.
        shape: of the block.
        box: what to read, in coordinates of the block.
        target: memory of the box's shape, of the stored type; it may be strided.
        key: for messages.
    """

    pack: PackRecord | str
    byte_offset: int
    first_range: int
    shape: Shape
    box: Region
    target: HostArray
    key: str

    @property
    def file(self) -> str:
        """The file that holds the block, below the checkpoint's directory."""
        return self.pack if isinstance(self.pack, str) else file_of(self.pack.name)

    @property
    def file_offset(self) -> int:
        """The first byte of the block in that file."""
        return self.byte_offset + (0 if isinstance(self.pack, str) else self.pack.data_start)

    @property
    def writer(self) -> str:
        """Who wrote the block, for messages; empty where nothing says it."""
        return "" if isinstance(self.pack, str) else f"rank {self.pack.rank}"


@dataclass(frozen=True, slots=True)
class _Span:
    """Ranges of one block that follow each other; they go to ``target``, or through a buffer."""

    read: BlockRead
    start: int
    nbytes: int
    target: Bytes | None


def begin_reads(  # noqa: PLR0913
    store: Place,
    reads: Sequence[BlockRead],
    *,
    num_threads: int,
    deadline: Deadline,
    verify: bool = True,
    tables: DigestTables | None = None,
    max_nbytes: int = READ_NBYTES,
) -> Transfer:
    """Begin to bring elements of blocks into memory. Rank-local; tables of digests are read first.

    Args:
        store: where the packs are.
        reads: what to read.
        num_threads: that read at the same time.
        deadline: for the tables of digests.
        verify: whether to compare what is read with its digests.
        tables: those that were read before; new ones are added.
        max_nbytes: read by one call; a thread has a buffer of that size.

    Raises, as the transfer that is returned:
        CorruptCheckpointError: a range is not what was written; names key, file, bytes and rank.
        IncompleteCheckpointError: a pack is missing.
        StorageTimeoutError: storage did not answer in time.
    """
    tables = {} if tables is None or not verify else tables
    if verify:
        first = {read.pack: read for read in reads if read.pack not in tables}
        jobs = [
            Job(read.key, store.path(read.file), partial(read_table, store, pack, tables, read.key))
            for pack, read in first.items()
            if isinstance(pack, PackRecord)
        ]
        Transfer(jobs, num_threads).wait(deadline.left_s)
    return Transfer(block_jobs(store, reads, tables, max_nbytes), num_threads)


def block_jobs(
    store: Place, reads: Sequence[BlockRead], tables: DigestTables, max_nbytes: int = READ_NBYTES
) -> list[Job]:
    """What brings elements of blocks into memory; see ``begin_reads``.

    What has no table is not verified.
    """
    buffers: deque[Bytes] = deque()
    return [
        Job(read.key, store.path(read.file), partial(_read_spans, store, spans, table, buffers))
        for spans in _batches(reads, max(max_nbytes, RANGE_NBYTES))
        for read in [spans[0].read]
        for table in [None if isinstance(read.pack, str) else tables.get(read.pack)]
    ]


def read_table(store: Place, pack: PackRecord, tables: DigestTables, key: str) -> None:
    """Add a pack's digests to those that were read; an error names ``key``."""
    content, name = np.empty(table_nbytes(pack.num_ranges), np.uint8), file_of(pack.name)
    with _named(key, f"rank {pack.rank}"):
        store.read_into(name, pack.nbytes - content.size, [content])
        tables[pack] = opened_table(content.tobytes(), pack.digest, store.path(name))


@contextmanager
def _named(key: str, writer: str) -> Iterator[None]:
    """Within the block errors of a file name what is read of it, and who wrote it if known."""
    try:
        yield
    except StorageError as error:
        if error.key is None:
            error.key = key
            by = f"; {writer} wrote it" if writer else ""
            error.args = (f"{key}: {error.message}{by}",)
        raise


def _batches(reads: Sequence[BlockRead], max_nbytes: int) -> Iterator[list[_Span]]:
    """Spans that one call reads: they follow each other in one file."""
    batch: list[_Span] = []
    nbytes = end = 0
    for read in sorted(reads, key=lambda read: (read.file, read.byte_offset)):
        for span in _spans(read, max_nbytes):
            start = read.byte_offset + span.start
            if batch and (
                start != end
                or read.pack != batch[0].read.pack
                or nbytes + span.nbytes > max_nbytes
                or len(batch) == _MAX_BUFFERS
            ):
                yield batch
                batch, nbytes = [], 0
            batch.append(span)
            nbytes += span.nbytes
            end = start + span.nbytes
    if batch:
        yield batch


def _spans(read: BlockRead, max_nbytes: int) -> Iterator[_Span]:
    """What is to be read for a read, ranges in order."""
    itemsize = read.target.dtype.itemsize
    total = math.prod(read.shape) * itemsize
    if 0 in read.box.shape:
        return
    first, last = (_flat(read.shape, at) for at in (read.box.offset, _last(read.box)))
    start, stop = first * itemsize, (last + 1) * itemsize
    target: Bytes | None = None
    if read.box.numel == last + 1 - first and read.target.flags.c_contiguous:
        target = read.target.reshape(-1).view(np.uint8)
    ranges = range(start // RANGE_NBYTES, num_ranges(stop))
    span: tuple[int, int, bool] | None = None
    for number in ranges:
        low, high = number * RANGE_NBYTES, min((number + 1) * RANGE_NBYTES, total)
        is_direct = target is not None and start <= low and high <= stop
        if target is None and not _touches(read, low // itemsize, high // itemsize):
            continue
        if span and span[1] == low and span[2] is is_direct and high - span[0] <= max_nbytes:
            span = span[0], high, is_direct
            continue
        if span:
            yield _span(read, span, target, start)
        span = low, high, is_direct
    if span:
        yield _span(read, span, target, start)


def _span(read: BlockRead, span: tuple[int, int, bool], target: Bytes | None, start: int) -> _Span:
    low, high, is_direct = span
    into = target[low - start : high - start] if is_direct and target is not None else None
    return _Span(read, low, high - low, into)


def _read_spans(
    store: Place, spans: Sequence[_Span], table: Digests | None, buffers: deque[Bytes]
) -> None:
    read = spans[0].read
    with _buffer(buffers, sum(span.nbytes for span in spans if span.target is None)) as memory:
        at, targets = 0, []
        for span in spans:
            if span.target is not None:
                targets.append(span.target)
            else:
                targets.append(memory[at : at + span.nbytes])
                at += span.nbytes
        with _named(read.key, read.writer):
            store.read_into(read.file, read.file_offset + spans[0].start, targets)
        for span, content in zip(spans, targets, strict=True):
            if table is not None:
                _compare(store.path(read.file), span, content, table)
            if span.target is None:
                _copy_out(span, content)


def _compare(path: str, span: _Span, content: Bytes, table: Digests) -> None:
    read = span.read
    number = read.first_range + span.start // RANGE_NBYTES
    for start in range(0, span.nbytes, RANGE_NBYTES):
        piece = content[start : start + RANGE_NBYTES]
        found, expected = xxh3_64_intdigest(piece.data), int(table[number])
        if found != expected:
            begin = read.file_offset + span.start + start
            raise CorruptCheckpointError(
                f"{read.key}: {path}, written by {read.writer}, is damaged: bytes {begin} "
                f"to {begin + piece.size} have digest {found:016x}, expected {expected:016x}",
                key=read.key,
                path=path,
            )
        number += 1


def _copy_out(span: _Span, content: Bytes) -> None:
    """Bring those elements of the ranges that are wanted to where they are wanted."""
    read = span.read
    dtype, box = read.target.dtype, read.box
    elements = content.view(dtype)
    begin = span.start // dtype.itemsize
    for part in runs(read.shape, begin, begin + elements.size):
        common = part.intersect(box)
        if common is None:
            continue
        start = _flat(read.shape, part.offset) - begin
        source = elements[start : start + part.numel].reshape(part.shape)
        read.target[common.within(box).slices()] = source[common.within(part).slices()]


def _touches(read: BlockRead, start: int, stop: int) -> bool:
    return any(part.intersect(read.box) for part in runs(read.shape, start, stop))


def runs(shape: Shape, start: int, stop: int) -> Iterator[Region]:
    """Regions that are, one after the other, elements ``start`` to ``stop`` in C order."""
    if stop <= start:
        return
    if not shape:
        yield Region((), ())
        return
    inner = math.prod(shape[1:])
    first, last = -(-start // inner), stop // inner
    if first > last or (start % inner and first > stop // inner):  # within one row
        yield from _in_row(shape, start // inner, start % inner, stop - start // inner * inner)
        return
    if start % inner:
        yield from _in_row(shape, first - 1, start % inner, inner)
    if first < last:
        zeros = (0,) * (len(shape) - 1)
        yield Region((first, *zeros), (last - first, *shape[1:]))
    if stop % inner:
        yield from _in_row(shape, last, 0, stop % inner)


def _in_row(shape: Shape, row: int, start: int, stop: int) -> Iterator[Region]:
    for part in runs(shape[1:], start, stop):
        yield Region((row, *part.offset), (1, *part.shape))


def _flat(shape: Shape, index: Shape) -> int:
    number = 0
    for size, at in zip(shape, index, strict=True):
        number = number * size + at
    return number


def _last(box: Region) -> Shape:
    return tuple(end - 1 for end in box.end)


@contextmanager
def _buffer(buffers: deque[Bytes], nbytes: int) -> Iterator[Bytes]:
    """Memory that is this thread's alone within the block; what is not in use is used again."""
    if nbytes == 0:
        yield np.empty(0, np.uint8)
        return
    try:
        memory = buffers.pop()
    except IndexError:
        memory = np.empty(nbytes, np.uint8)
    if memory.size < nbytes:
        memory = np.empty(nbytes, np.uint8)
    try:
        yield memory
    finally:
        buffers.append(memory)
