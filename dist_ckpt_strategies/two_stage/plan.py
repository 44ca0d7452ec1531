"""Decide which rank of a group reads which region of which array, and which ranks receive it.

A region that one rank alone requests is not in the plan: that rank reads it alone. Every other
distinct region is read by one of its requesters, large ones in slices by several of them. Regions
that overlap without being equal are read separately.
"""

import heapq
import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from dist_ckpt_strategies.core.array import ArraySpec, Region, Shape, groups
from dist_ckpt_strategies.formats.pack import RANGE_NBYTES

MAX_SLICE_NBYTES = 64 << 20
"""A slice is no larger, unless it is a single chunk that is read whole anyway."""

MIN_SLICE_NBYTES = RANGE_NBYTES
"""Regions are not cut into smaller slices: each costs a read of a whole range, and a message."""

MAX_PACKED_NBYTES = 16 << 20
"""Small slices travel together, up to this: a message of 64 KiB takes gloo as long as 1 MiB."""

MAX_SMALL_NBYTES = 1 << 20
"""Slices below this are copied into a message with others; larger ones are sent without a copy."""

_MIN_SHARED_NBYTES = 1 << 20
"""Slices are no smaller than this if a round cannot hold one of every rank."""

_SLICES_PER_RANK = 24
"""Enough slices to balance reads within a few percent."""

_MIN_ROUNDS = 6
"""At least this many, so that reading one round overlaps with sending another."""

ROUNDS_IN_FLIGHT = 3
"""Rounds that take memory at a time: one that is being sent, and those that are being read."""

_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class Slice:
    """A region of a numbered array, in its coordinates, or a part of one, that is read at once."""

    array: int
    region: Region
    nbytes: int


@dataclass(frozen=True, slots=True)
class Batch:
    """Slices that one rank reads for the same ranks, and sends in one message.

    One large slice, or several small ones. Ranks are group ranks; the requesters are sorted, and
    the reader is one of them.
    """

    reader: int
    requesters: tuple[int, ...]
    slices: tuple[Slice, ...]

    @property
    def starts(self) -> tuple[int, ...]:
        """Byte offset of each slice within the message: aligned for every dtype."""
        byte_offsets = [0]
        for each in self.slices[:-1]:
            byte_offsets.append(-(-(byte_offsets[-1] + each.nbytes) // _ALIGNMENT) * _ALIGNMENT)
        return tuple(byte_offsets)

    @property
    def nbytes(self) -> int:
        """Bytes of the message."""
        return self.starts[-1] + self.slices[-1].nbytes

    @property
    def content_nbytes(self) -> int:
        """Bytes of the slices, without those between them."""
        return sum(each.nbytes for each in self.slices)


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """The reads of a group of ranks, the same on every rank of it.

    Attributes:
        rounds: batches that are read together, then sent together.
        shared: array and region of all that is read in the rounds; ranks read the rest alone.
        page_caches: for each rank the name of the page cache that it shares with others, or None.
            Ranks with equal names read a batch after its reader instead of receiving it.
    """

    rounds: tuple[tuple[Batch, ...], ...]
    shared: frozenset[tuple[int, Region]]
    page_caches: tuple[Hashable | None, ...]

    def rounds_of(self, rank: int) -> list[list[Batch]]:
        """The batches that one rank reads or requests, round by round."""
        return [[b for b in batches if rank in b.requesters] for batches in self.rounds]

    def receivers(self, batch: Batch) -> list[int]:
        """The ranks that a batch is sent to: not those that share its reader's page cache."""
        caches, cache = self.page_caches, self.page_caches[batch.reader]
        return [
            rank
            for rank in batch.requesters
            if rank != batch.reader and (cache is None or caches[rank] != cache)
        ]


def encode_regions(regions: Iterable[tuple[int, Region]]) -> str:
    """The request of one rank: array and region, one in each line, sorted."""
    rows = sorted({(array, *region.offset, *region.shape) for array, region in regions})
    return "\n".join(" ".join(map(str, row)) for row in rows)


def build_group_plan(
    requests: Sequence[str],
    arrays: Sequence[ArraySpec],
    page_caches: Sequence[Hashable | None],
    *,
    max_inflight_bytes: int,
) -> GroupPlan:
    """Give every region that several ranks request one reader, balanced by bytes.

    ``requests`` come from ``encode_regions``, one for each rank of the group; the numbers in them
    are those of ``arrays``. For ``page_caches`` see GroupPlan. ``max_inflight_bytes`` bounds, per
    rank, the bytes of the rounds under way at a time; a single larger slice has a round of its own.
    """
    wanted = _shared_regions(requests)
    total = sum(_nbytes(arrays[array], region) for array, region in wanted)
    round_nbytes = max_inflight_bytes // ROUNDS_IN_FLIGHT
    limit = max(MIN_SLICE_NBYTES, total // len(requests) // _SLICES_PER_RANK)
    at_once = max(_MIN_SHARED_NBYTES, round_nbytes // len(requests))
    limit = min(limit, MAX_SLICE_NBYTES, at_once)
    packs: list[tuple[tuple[int, ...], tuple[Slice, ...]]] = []
    small: dict[tuple[int, ...], list[Slice]] = defaultdict(list)
    for (array, region), ranks in wanted.items():
        for part in _cut(arrays[array], region, limit):
            each = Slice(array, part, _nbytes(arrays[array], part))
            if each.nbytes >= MAX_SMALL_NBYTES:
                packs.append((ranks, (each,)))
            else:
                small[ranks].append(each)
    most = min(limit, MAX_PACKED_NBYTES)
    packs += [
        (ranks, tuple(together))
        for ranks, slices in small.items()
        for together in groups(slices, most, lambda each: each.nbytes + _ALIGNMENT)
    ]
    batches = _with_readers(packs, len(requests))
    rounds = _in_rounds(batches, min(round_nbytes, -(-total // _MIN_ROUNDS)))
    return GroupPlan(rounds, frozenset(wanted), tuple(page_caches))


def _shared_regions(requests: Sequence[str]) -> dict[tuple[int, Region], tuple[int, ...]]:
    """The regions that several ranks request, sorted, with these ranks.

    Equal requests of replicas are examined once. Lines are compared as text: of a million regions
    most are requested by one rank alone, and need not be parsed.
    """
    ranks_with: dict[str, list[int]] = defaultdict(list)
    for rank, request in enumerate(requests):
        ranks_with[request].append(rank)
    groups = list(ranks_with.values())
    groups_with: dict[str, tuple[int, ...]] = {}
    for number, request in enumerate(ranks_with):
        alone = (number,)
        for line in request.splitlines():
            before = groups_with.get(line)
            groups_with[line] = alone if before is None else (*before, number)
    ranks_of: dict[tuple[int, ...], tuple[int, ...]] = {}
    receivers = {}
    for line, numbers in groups_with.items():
        if numbers not in ranks_of:
            ranks_of[numbers] = tuple(sorted(rank for n in numbers for rank in groups[n]))
        if len(ranks_of[numbers]) > 1:
            array, *bounds = map(int, line.split())
            middle = len(bounds) // 2
            region = Region(tuple(bounds[:middle]), tuple(bounds[middle:]))
            receivers[array, region] = ranks_of[numbers]
    return dict(sorted(receivers.items()))


def _nbytes(array: ArraySpec, region: Region) -> int:
    return region.numel * array.dtype.itemsize


def _cut(array: ArraySpec, region: Region, limit_nbytes: int) -> Iterator[Region]:
    """The region in slices that can each be read on its own at no extra cost."""
    if _nbytes(array, region) <= limit_nbytes:
        return iter((region,))
    cell = array.chunk_shape
    if array.is_raw:
        row_nbytes = math.prod(region.shape[1:]) * array.dtype.itemsize
        num_rows = RANGE_NBYTES // math.gcd(RANGE_NBYTES, row_nbytes)  # whole ranges of packs
        cell = (num_rows if num_rows * row_nbytes <= limit_nbytes else 1, *(1,) * (region.ndim - 1))
    return _in_cells(region, cell, array.dtype.itemsize, limit_nbytes, 0)


def _in_cells(
    region: Region, cell: Shape, itemsize: int, limit_nbytes: int, dim: int
) -> Iterator[Region]:
    """The region cut where cells of a grid begin, outermost dim first.

    A further dim is cut only where a slice of one cell's height is far above the limit.
    """
    nbytes = region.numel * itemsize
    if dim == region.ndim:
        yield region
        return
    offset, end, height = region.offset[dim], region.end[dim], cell[dim]
    first, stop = offset // height, -(-end // height)
    num_parts = min(-(-nbytes // limit_nbytes), stop - first)
    for number in range(num_parts):
        low, high = (first + (stop - first) * n // num_parts for n in (number, number + 1))
        start = max(offset, low * height)
        part = Region(
            (*region.offset[:dim], start, *region.offset[dim + 1 :]),
            (*region.shape[:dim], min(end, high * height) - start, *region.shape[dim + 1 :]),
        )
        is_small = part.numel * itemsize <= (2 * limit_nbytes if num_parts > 1 else limit_nbytes)
        if is_small:
            yield part
        else:
            yield from _in_cells(part, cell, itemsize, limit_nbytes, dim + 1)


def _with_readers(
    packs: Sequence[tuple[tuple[int, ...], tuple[Slice, ...]]], num_ranks: int
) -> list[Batch]:
    """Largest first, each to the requester with the fewest bytes so far (LPT)."""
    sizes = [sum(each.nbytes for each in slices) for _, slices in packs]
    load = [0] * num_ranks
    queues: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    readers = [0] * len(packs)
    for number in sorted(range(len(packs)), key=lambda n: (-sizes[n], n)):
        ranks = packs[number][0]
        queue = queues.setdefault(ranks, [(0, rank) for rank in ranks])
        while queue[0][0] != load[queue[0][1]]:  # stale: it got more from another queue
            heapq.heapreplace(queue, (load[queue[0][1]], queue[0][1]))
        readers[number] = queue[0][1]
        load[readers[number]] += sizes[number]
        heapq.heapreplace(queue, (load[readers[number]], readers[number]))
    return [
        Batch(reader, ranks, slices) for reader, (ranks, slices) in zip(readers, packs, strict=True)
    ]


def _in_rounds(batches: Sequence[Batch], limit_nbytes: int) -> tuple[tuple[Batch, ...], ...]:
    """The batches in rounds within the limit, round-robin over readers, each in file order.

    All bytes of a round count, as if every rank received all of them.
    """
    turns: dict[int, int] = defaultdict(int)
    order = []
    for number, batch in enumerate(batches):
        order.append((turns[batch.reader], batch.reader, number))
        turns[batch.reader] += 1
    ordered = (batches[number] for *_, number in sorted(order))
    return tuple(map(tuple, groups(ordered, limit_nbytes)))
