"""Turn what the ranks of a group ask for into boxes of which each is read once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from dist_ckpt_strategies.plan.disjoint import MAX_CUT, disjoint_parts, overlapping_groups
from dist_ckpt_strategies.plan.spans import raw_spans
from dist_ckpt_strategies.spec.array import ArraySpec
from dist_ckpt_strategies.spec.box import Box, BoxTable, Flags, Table, concatenated
from dist_ckpt_strategies.spec.region import Extent, Region

_LOOSE = 2
"""How far a part may exceed the limit before a further dim is cut."""

Audiences = list[tuple[int, ...]]
"""Sets of ranks that want the same, each sorted."""


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """Boxes to be read, and the ranks that want each.

    Attributes:
        boxes: in rows, sorted.
        audience: for each the number of the ranks that want it, in ``audiences``.
        audiences: sets of ranks.
    """

    boxes: BoxTable
    audience: Table
    audiences: Audiences

    def by_audience(self, small_nbytes: int) -> Pieces:
        """The same, those that the same ranks want one behind the other, small ones first."""
        order = np.lexsort((self.boxes.nbytes >= small_nbytes, self.audience))
        return Pieces(self.boxes.at(order), self.audience[order], self.audiences)


def distinct_pieces(wants: Sequence[BoxTable]) -> Pieces:
    """The boxes that are wanted, each once.

    Ranks with equal tables are looked at once: replicas ask for the same.
    """
    distinct = {id(table): table for table in wants}
    contents = {name: table.to_bytes() for name, table in distinct.items()}
    ranks_with: dict[bytes, list[int]] = defaultdict(list)
    for rank, table in enumerate(wants):
        ranks_with[contents[id(table)]].append(rank)
    groups = list(ranks_with.values())
    tables = [wants[ranks[0]] for ranks in groups]
    every = concatenated(tables)
    group = np.repeat(np.arange(len(tables)), [len(table) for table in tables])
    order = np.lexsort((group, *every.rows.T[::-1]))
    rows, group = every.rows[order], group[order]
    is_new = np.ones(len(rows), bool)
    is_new[1:] = (rows[1:] != rows[:-1]).any(axis=1)
    firsts = np.flatnonzero(is_new)
    counts = np.diff(firsts, append=len(rows))
    audience = group[firsts]
    audiences: dict[tuple[int, ...], int] = {
        tuple(ranks): number for number, ranks in enumerate(groups)
    }
    for number in np.flatnonzero(counts > 1).tolist():
        members = group[firsts[number] : firsts[number] + counts[number]].tolist()
        audience[number] = _numbered(audiences, (rank for m in members for rank in groups[m]))
    return Pieces(BoxTable(rows[firsts]), audience, list(audiences))


def _numbered(audiences: dict[tuple[int, ...], int], ranks: Iterator[int]) -> int:
    return audiences.setdefault(tuple(sorted(set(ranks))), len(audiences))


def disjoint_pieces(pieces: Pieces) -> Pieces:
    """The same elements in boxes of which no two share one."""
    boxes, audience, audiences = pieces.boxes, pieces.audience, pieces.audiences
    kept = np.ones(len(boxes), bool)
    numbers = {ranks: number for number, ranks in enumerate(audiences)}
    parts: list[tuple[Box, int]] = []
    for rows in overlapping_groups(boxes):
        found = list(boxes.at(rows))
        if len(found) > MAX_CUT:
            continue
        kept[rows] = False
        wanting = [audiences[number] for number in audience[rows].tolist()]
        parts.extend(
            (part, _numbered(numbers, (rank for holder in holders for rank in wanting[holder])))
            for part, holders in disjoint_parts(found)
        )
    return _replaced(pieces, kept, parts, list(numbers))


def small_pieces(pieces: Pieces, arrays: Sequence[ArraySpec], limit_nbytes: int) -> Pieces:
    """The same elements in boxes of which none exceeds the limit, where that costs nothing."""
    boxes, audience = pieces.boxes, pieces.audience
    kept = boxes.nbytes <= limit_nbytes
    large = zip(boxes.at(~kept), audience[~kept].tolist(), strict=True)
    parts = [
        (Box(box.array, box.itemsize, region), number)
        for box, number in large
        for region in _slabs(arrays[box.array], box, limit_nbytes)
    ]
    return _replaced(pieces, kept, parts, pieces.audiences)


def _replaced(
    pieces: Pieces, kept: Flags, parts: Sequence[tuple[Box, int]], audiences: Audiences
) -> Pieces:
    """The boxes that are kept, and the parts of the others."""
    if kept.all():
        return pieces
    of = dict(parts)
    cut = BoxTable.of(of)
    every = concatenated([pieces.boxes.at(kept), cut])
    numbers = np.array([of[box] for box in cut], np.int64)
    audience = np.concatenate([pieces.audience[kept], numbers])
    order = np.lexsort(every.rows.T[::-1])
    return Pieces(every.at(order), audience[order], audiences)


def _slabs(array: ArraySpec, box: Box, limit_nbytes: int) -> Iterator[Region]:
    """The box in parts, as far as each of them can be read on its own at no extra cost."""
    if array.inner_shape is not None:
        yield from _of_whole_cells(box.region, array.inner_shape, box.itemsize, limit_nbytes)
        return
    if raw_spans(array, box.region) is not None:
        yield from _of_rows(box.region, box.itemsize, limit_nbytes)
        return
    for part in _of_whole_cells(box.region, array.chunk_shape, box.itemsize, limit_nbytes):
        is_chunk = array.is_raw and array.chunk_at(part) is not None
        is_large = part.numel * box.itemsize > _LOOSE * limit_nbytes
        yield from _of_rows(part, box.itemsize, limit_nbytes) if is_chunk and is_large else (part,)


def _of_rows(region: Region, itemsize: int, limit_nbytes: int) -> Iterator[Region]:
    """The region cut along its first dim; rows far above the limit are cut in turn.

    Each part is one run wherever the region was one, in its file as in the tensor.
    """
    nbytes = region.numel * itemsize
    dim = next((d for d, extent in enumerate(region.shape) if extent > 1), None)
    if dim is None:
        yield region
        return
    for part in _cut(region, dim, 1, -(-nbytes // limit_nbytes)):
        if part.shape[dim] == 1 and part.numel * itemsize > _LOOSE * limit_nbytes:
            yield from _of_rows(part, itemsize, limit_nbytes)
        else:
            yield part


def _of_whole_cells(
    region: Region, cell: Extent, itemsize: int, limit_nbytes: int, dim: int = 0
) -> Iterator[Region]:
    """The region cut where cells of a grid begin, which are read whole: first dims first.

    Parts of several cells stay below the limit, or a little above it where a further dim
    would have to be cut, which takes a copy at the other end.
    """
    nbytes = region.numel * itemsize
    if dim == region.ndim or nbytes <= (_LOOSE if dim else 1) * limit_nbytes:
        yield region
        return
    for part in _cut(region, dim, cell[dim], -(-nbytes // limit_nbytes)):
        yield from _of_whole_cells(part, cell, itemsize, limit_nbytes, dim + 1)


def _cut(region: Region, dim: int, grain: int, num_parts: int) -> Iterator[Region]:
    """The region in so many parts along a dim, or fewer: they end at multiples of the grain."""
    offset, end = region.offset[dim], region.end[dim]
    first, stop = offset // grain, -(-end // grain)
    num_parts = min(num_parts, stop - first)
    for number in range(num_parts):
        low, high = (first + (stop - first) * n // num_parts for n in (number, number + 1))
        start = max(offset, low * grain)
        extent = min(end, high * grain) - start
        yield Region(
            (*region.offset[:dim], start, *region.offset[dim + 1 :]),
            (*region.shape[:dim], extent, *region.shape[dim + 1 :]),
        )
