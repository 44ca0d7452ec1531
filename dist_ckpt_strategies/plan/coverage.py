"""Prove that shards make up an array: every element once, none twice, none outside."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dist_ckpt_strategies.errors import CoverageError, DuplicateWriterError
from dist_ckpt_strategies.spec.region import Extent, Region


@dataclass(frozen=True, slots=True, order=True)
class Holding:
    """A region of one array and the rank that holds its main replica."""

    region: Region
    rank: int


def require_partition(
    key: str, shape: Extent, holdings: Sequence[Holding], copies: Iterable[Holding] = ()
) -> None:
    """Raise unless the (non-empty) holdings cover the array exactly once.

    Disjoint boxes inside the array that add up to its number of elements leave no gap, so the
    proof is: inside, disjoint, and the sum.

    Args:
        key: of the array.
        shape: of the array, in elements.
        holdings: the main replicas.
        copies: the other replicas, to say who holds what the main ones leave out.

    Raises:
        CoverageError: elements are missing, or a region reaches outside the array.
        DuplicateWriterError: two holdings share an element.
    """
    whole = Region.whole(shape)
    for holding in holdings:
        if not whole.contains(holding.region):
            raise CoverageError(
                f"{key}: rank {holding.rank} holds {holding.region}, outside the array's "
                f"shape {shape}",
                key=key,
            )
    overlap = _first_overlap(holdings)
    if overlap is not None:
        one, other = overlap
        raise DuplicateWriterError(
            f"{key}: {one.region} on rank {one.rank} and {other.region} on rank {other.rank} "
            "are both main replicas and overlap; give one of them another replica_id",
            key=key,
        )
    held = sum(holding.region.numel for holding in holdings)
    if held != math.prod(shape):
        gap = _first_gap(whole, holdings)
        raise CoverageError(
            f"{key}: main replicas cover {held} of {math.prod(shape)} elements of shape {shape}; "
            f"first element not covered: {gap}, {_held_by(gap, copies)}",
            key=key,
        )


def _first_overlap(holdings: Sequence[Holding]) -> tuple[Holding, Holding] | None:
    """Two holdings that share an element; sweeps along the dim that separates them best."""
    ndim = holdings[0].region.ndim if holdings else 0
    if ndim == 0:
        return (holdings[0], holdings[1]) if len(holdings) > 1 else None
    dim = max(range(ndim), key=lambda d: len({h.region.offset[d] for h in holdings}))
    open_boxes: list[Holding] = []
    for holding in sorted(holdings, key=lambda h: (h.region.offset[dim], h)):
        start = holding.region.offset[dim]
        open_boxes = [h for h in open_boxes if h.region.end[dim] > start]
        for other in open_boxes:
            if holding.region.intersect(other.region) is not None:
                return other, holding
        open_boxes.append(holding)
    return None


def _first_gap(whole: Region, holdings: Sequence[Holding]) -> Extent:
    """Lowest corner of what is left of ``whole`` once every holding is cut away."""
    rest = [whole]
    for holding in sorted(holdings):
        rest = [piece for box in rest for piece in _cut(box, holding.region)]
    return min(box.offset for box in rest)


def _held_by(element: Extent, copies: Iterable[Holding]) -> str:
    """Who has a copy of the element, in words."""
    box = Region(element, (1,) * len(element))
    ranks = sorted({copy.rank for copy in copies if copy.region.contains(box)})
    if not ranks:
        return "which no rank holds"
    spoken = ", ".join(map(str, ranks))
    return f"which only copies hold (rank {spoken}); one of them needs replica_id 0"


def _cut(box: Region, hole: Region) -> list[Region]:
    """The parts of ``box`` outside ``hole``, as disjoint boxes."""
    common = box.intersect(hole)
    if common is None:
        return [box]
    parts = []
    low, high = list(box.offset), list(box.end)
    for dim in range(box.ndim):
        for start, stop in ((low[dim], common.offset[dim]), (common.end[dim], high[dim])):
            if start < stop:
                offset = (*low[:dim], start, *low[dim + 1 :])
                end = (*high[:dim], stop, *high[dim + 1 :])
                shape = tuple(e - a for a, e in zip(offset, end, strict=True))
                parts.append(Region(offset, shape))
        low[dim], high[dim] = common.offset[dim], common.end[dim]
    return parts
