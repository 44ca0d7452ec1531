"""Read elements of stored blocks; every byte of a pack is compared with its digest.

A read takes whole ranges. Where a range belongs to the elements wanted as it is, it goes into their
memory; others go through memory of a few MiB for each thread. Ten thousand blocks are planned as
columns, without an object for each of them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from threading import Lock

import numpy as np
from xxhash import xxh3_64_intdigest

from dist_ckpt_strategies.core.array import Region, Shape, flat_index, runs
from dist_ckpt_strategies.core.blocks import Column
from dist_ckpt_strategies.errors import CorruptCheckpointError, StorageError
from dist_ckpt_strategies.formats.pack import (
    RANGE_NBYTES,
    Digests,
    StoredBytes,
    num_ranges,
    opened_table,
    table_nbytes,
)
from dist_ckpt_strategies.formats.pack_write import PackRecord, file_of
from dist_ckpt_strategies.storage.bucket import Place
from dist_ckpt_strategies.storage.io_pool import Job, raise_if_cancelled
from dist_ckpt_strategies.storage.store import Bytes, HostArray

READ_NBYTES = 4 << 20
"""Bytes that a thread reads of a file before it opens the next."""

_MAX_BUFFERS = 1000
"""Of one call; the system takes 1024."""

DigestTables = dict[PackRecord, Digests]


@dataclass(frozen=True, slots=True)
class BlockReads:
    """Elements of stored blocks, to be brought into memory; a row is a box in a block.

    Attributes:
        packs: the packs by number; or names of files without digests that hold one block alone.
        place: where the block is: three columns, see ``BlockTable``.
        extent: shape of the block, a column for each dim; 1 in columns that it lacks.
        offset: first element of the box in the block.
        shape: of the box.
        targets: memory of the box's shape, of the stored type; it may be strided.
        keys: for messages.
    """

    packs: Mapping[int, PackRecord | str]
    place: Column
    extent: Column
    offset: Column
    shape: Column
    targets: Sequence[HostArray]
    keys: Sequence[str]

    def box(self, row: int) -> tuple[Shape, Region]:
        """The shape of the block, and what is wanted of it."""
        ndim = self.targets[row].ndim
        extent, *box = (column[row, :ndim] for column in (self.extent, self.offset, self.shape))
        return tuple(extent.tolist()), Region(*(tuple(part.tolist()) for part in box))


_Span = tuple[int, int, int, int, int, int]
"""Ranges of one block that follow each other: row of BlockReads; number of the pack; first byte in
the pack, after its header; first byte in the block; how many; first byte in the target's memory, or
-1: they go through a buffer. In the order of the packs."""


def read_jobs(
    store: Place,
    reads: BlockReads,
    tables: DigestTables,
    max_nbytes: int = READ_NBYTES,
    *,
    verify: bool = True,
) -> list[Job]:
    """Jobs that bring elements of blocks into memory. Rank-local; itself does not touch storage.

    ``tables`` are digests that were read before; new ones are added. One call reads ``max_nbytes``,
    and a thread has a buffer of that size. With ``verify`` all that is read is compared.

    Raises, as the jobs:
        CorruptCheckpointError: a range is not what was written; names key, file, bytes and rank.
        IncompleteCheckpointError: a pack is missing.
    """
    max_nbytes = max(max_nbytes, RANGE_NBYTES)
    spans = _spans(reads, max_nbytes)
    locks, local = {number: Lock() for number in reads.packs}, threading.local()

    def table_of(number: int, key: str) -> Digests | None:  # read by the first that needs it
        pack = reads.packs[number]
        if not verify or isinstance(pack, str):
            return None
        with locks[number]:
            if pack not in tables:
                read_table(store, pack, tables, key)
        return tables[pack]

    jobs = []
    for batch in _batches(spans, max_nbytes):
        row, pack, *_ = batch[0]
        path = store.path(_file(reads.packs[pack]))
        run = partial(_read_batch, store, reads, batch, table_of, local)
        jobs.append(Job(reads.keys[row], path, run))
    return jobs


def read_content(
    store: Place, pack: PackRecord, stored: StoredBytes, key: str, tables: DigestTables
) -> bytes:
    """Bytes of a pack that are no array, compared with their digests. Blocks on storage.

    ``tables``: of digests that were read before; new ones are added.

    Raises:
        CorruptCheckpointError, IncompleteCheckpointError: as ``read_jobs``.
    """
    end = pack.data_start + stored.byte_offset + stored.nbytes
    if end > pack.nbytes or stored.first_range + num_ranges(stored.nbytes) > pack.num_ranges:
        path = store.path(file_of(pack.name))
        text = f"{key}: {path} has no {stored}; the index that says so is damaged"
        raise CorruptCheckpointError(text, key=key, path=path)
    content, extent = np.empty(stored.nbytes, np.uint8), np.array([[stored.nbytes]])
    place = np.array([[0, stored.byte_offset, stored.first_range]])
    reads = BlockReads({0: pack}, place, extent, 0 * extent, extent, [content], [key])
    for job in read_jobs(store, reads, tables, stored.nbytes):  # one at most
        job.run()
    return content.tobytes()


def _file(pack: PackRecord | str) -> str:
    return pack if isinstance(pack, str) else file_of(pack.name)


def read_table(store: Place, pack: PackRecord, tables: DigestTables, key: str) -> None:
    """Add a pack's digests to those that were read; an error names ``key``."""
    content, name = np.empty(table_nbytes(pack.num_ranges), np.uint8), file_of(pack.name)
    with _named(lambda: key, pack):
        store.read_into(name, pack.nbytes - content.size, [content])
        tables[pack] = opened_table(content.tobytes(), pack.digest, store.path(name))


@contextmanager
def _named(key_of: Callable[[], str], pack: PackRecord | str) -> Iterator[None]:
    """Within the block errors of a file name what is read of it, and who wrote it, if known."""
    try:
        yield
    except StorageError as error:
        if error.key is None:
            error.key = key = key_of()
            by = "" if isinstance(pack, str) else f"; rank {pack.rank} wrote it"
            error.args = (f"{key}: {error.message}{by}",)
        raise


# Plans


def _spans(reads: BlockReads, max_nbytes: int) -> list[_Span]:
    """The spans to read, none larger than ``max_nbytes``.

    Where the elements wanted follow each other in the block, and in memory, all but the first and
    the last range go straight there.
    """
    itemsize = np.array([target.dtype.itemsize for target in reads.targets], np.int64)
    strides = np.repeat(itemsize[:, None], reads.extent.shape[1], 1)  # bytes from index to index
    strides[:, :-1] *= reads.extent[:, :0:-1].cumprod(1)[:, ::-1]
    first = (reads.offset * strides).sum(1)
    stop = ((reads.offset + reads.shape - 1) * strides).sum(1) + itemsize
    total = reads.extent.prod(1) * itemsize
    nbytes = reads.shape.prod(1) * itemsize
    is_in_order = np.array([target.flags.c_contiguous for target in reads.targets], bool)
    is_flat = is_in_order & (nbytes == stop - first) & (nbytes > 0)
    files = [number for number, pack in reads.packs.items() if isinstance(pack, str)]
    has_digests = ~np.isin(reads.place[:, 0], files)
    parts = []
    for rows, unit in (
        (np.flatnonzero(is_flat & has_digests), RANGE_NBYTES),
        (np.flatnonzero(is_flat & ~has_digests), 1),
    ):
        parts.append(_flat_spans(rows, first[rows], stop[rows], total[rows], max_nbytes, unit))
    strided = np.flatnonzero(~is_flat & (nbytes > 0)).tolist()
    parts += [_strided_spans(reads, row, int(total[row]), max_nbytes) for row in strided]
    row, start, size, into = np.concatenate(parts).T
    pack, at = reads.place[row, 0], reads.place[row, 1] + start
    columns = np.stack([row, pack, at, start, size, into], 1)
    return list(map(tuple, columns[np.lexsort((at, pack))].tolist()))


def _flat_spans(
    rows: Column, first: Column, stop: Column, total: Column, max_nbytes: int, unit: int
) -> Column:
    """Row, first byte, size, and place in memory, for bytes that follow each other.

    ``unit``: the bytes of a range; 1 without digests.
    """
    low, high = first // unit, -(-stop // unit)  # ranges that are touched
    whole_low = -(-first // unit)
    whole_high = np.where(stop == total, high, stop // unit)
    has_whole = whole_low < whole_high
    per_span = max_nbytes // unit
    parts = []

    def add(chosen: Column, begin: Column, end: Column, *, is_direct: bool) -> None:
        count = -(-(end - begin) // per_span)
        which = np.repeat(np.arange(len(begin)), count)
        number = np.arange(len(which)) - np.repeat(np.cumsum(count) - count, count)
        start = (begin[which] + number * per_span) * unit
        limit = np.minimum(end * unit, total[chosen])[which]
        size = np.minimum(start + per_span * unit, limit) - start
        into = start - first[chosen][which] if is_direct else np.full(len(which), -1)
        parts.append(np.stack([rows[chosen][which], start, size, into], 1))

    with_whole = np.flatnonzero(has_whole)
    add(with_whole, whole_low[with_whole], whole_high[with_whole], is_direct=True)
    for chosen, begin, end in (
        (np.flatnonzero(has_whole & (low < whole_low)), low, whole_low),
        (np.flatnonzero(has_whole & (whole_high < high)), whole_high, high),
        (np.flatnonzero(~has_whole), low, high),
    ):
        add(chosen, begin[chosen], end[chosen], is_direct=False)
    return np.concatenate(parts)


def _strided_spans(reads: BlockReads, row: int, total: int, max_nbytes: int) -> Column:
    """The same for a box whose elements lie apart, in the block or in memory: through a buffer."""
    block, box = reads.box(row)
    itemsize = reads.targets[row].dtype.itemsize
    first = flat_index(block, box.offset) * itemsize
    last = flat_index(block, tuple(end - 1 for end in box.end)) * itemsize
    spans: list[list[int]] = []
    for number in range(first // RANGE_NBYTES, num_ranges(last + itemsize)):
        low, high = number * RANGE_NBYTES, min((number + 1) * RANGE_NBYTES, total)
        pieces = runs(block, low // itemsize, high // itemsize)
        if not any(piece.intersect(box) for piece in pieces):
            continue
        if spans and sum(spans[-1][1:3]) == low and high - spans[-1][1] <= max_nbytes:
            spans[-1][2] = high - spans[-1][1]
        else:
            spans.append([row, low, high - low, -1])
    return np.array(spans, np.int64).reshape(-1, 4)


def _batches(spans: Sequence[_Span], max_nbytes: int) -> Iterator[Sequence[_Span]]:
    """Spans that one call reads: they follow each other in one pack."""
    first = nbytes = 0
    end = (-1, -1)
    for number, (_, pack, at, _, size, _) in enumerate(spans):
        is_next = (pack, at) == end and number - first < _MAX_BUFFERS
        if number > first and not (is_next and nbytes + size <= max_nbytes):
            yield spans[first:number]
            first, nbytes = number, 0
        nbytes += size
        end = pack, at + size
    if spans:
        yield spans[first:]


# Reads, on a thread


def _read_batch(
    store: Place,
    reads: BlockReads,
    spans: Sequence[_Span],
    table_of: Callable[[int, str], Digests | None],
    local: threading.local,
) -> None:
    """Read spans, compare each range with its digest, and bring them where they belong.

    A digest is taken as soon as its range is read: it is still in the processor's cache.
    """
    row, number, at, *_ = spans[0]
    pack, key = reads.packs[number], reads.keys[row]
    table = table_of(number, key)
    contents = _memory(reads, spans, local)
    ranges, expected, rows = [], [], []
    for (row, _, _, start, *_), content in zip(spans, contents, strict=True):
        starts = range(0, content.size, RANGE_NBYTES)
        ranges += [content[begin : begin + RANGE_NBYTES] for begin in starts]
        rows += [row] * len(starts)
        if table is not None:
            begin = int(reads.place[row, 2]) + start // RANGE_NBYTES
            expected += table[begin : begin + len(starts)].tolist()
    at += 0 if isinstance(pack, str) else pack.data_start
    done = 0
    with _named(lambda: reads.keys[rows[done]], pack):
        for num_filled in store.read_steps(_file(pack), at, ranges):
            raise_if_cancelled()
            if table is not None and not isinstance(pack, str):
                for number in range(done, num_filled):
                    row, content = rows[number], ranges[number]
                    _compare(store, pack, reads.keys[row], at, content, expected[number])
                    at += content.size
            done = num_filled
    for (row, _, _, start, _, into), content in zip(spans, contents, strict=True):
        if into < 0:
            _copy_out(reads, row, start, content)


def _memory(reads: BlockReads, spans: Sequence[_Span], local: threading.local) -> list[Bytes]:
    """Memory for spans: that of their target, or a part of this thread's buffer."""
    needed = sum(nbytes for *_, nbytes, into in spans if into < 0)
    buffer = getattr(local, "buffer", None)
    if buffer is None or buffer.size < needed:  # memory that was never touched is slow
        buffer = local.buffer = np.empty(needed, np.uint8)
    contents, at = [], 0
    for row, *_, nbytes, into in spans:
        if into >= 0:
            target = reads.targets[row].reshape(-1).view(np.uint8)
            contents.append(target[into : into + nbytes])
        else:
            contents.append(buffer[at : at + nbytes])
            at += nbytes
    return contents


def _compare(
    store: Place, pack: PackRecord, key: str, at: int, content: Bytes, expected: int
) -> None:
    """Raise unless a range that begins at a byte of a pack's file has its digest."""
    digest = xxh3_64_intdigest(content.data)
    if digest != expected:
        path = store.path(file_of(pack.name))
        raise CorruptCheckpointError(
            f"{key}: {path}, written by rank {pack.rank}, is damaged: bytes {at} to "
            f"{at + content.size} have digest {digest:016x}, expected {expected:016x}",
            key=key,
            path=path,
        )


def _copy_out(reads: BlockReads, row: int, start: int, content: Bytes) -> None:
    """Bring those elements of the ranges that are wanted to where they are wanted."""
    target = reads.targets[row]
    block, box = reads.box(row)
    elements = content.view(target.dtype)
    begin = start // target.dtype.itemsize
    for part in runs(block, begin, begin + elements.size):
        common = part.intersect(box)
        if common is None:
            continue
        at = flat_index(block, part.offset) - begin
        source = elements[at : at + part.numel].reshape(part.shape)
        target[common.within(box).slices()] = source[common.within(part).slices()]
