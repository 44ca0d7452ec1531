"""Cut boxes that overlap so that no element belongs to two of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from dist_ckpt_strategies.spec.box import Box, BoxTable
from dist_ckpt_strategies.spec.region import Region

MAX_CUT = 64
"""Where more boxes than this of one array overlap each other they are left as they are: the parts
would be too many, and each costs a read."""

_MAX_COMPARED = 4096


def overlapping_groups(boxes: BoxTable) -> Iterator[slice]:
    """The rows of each array of whose boxes some overlap. The table is sorted, nothing repeated.

    Arrays cut on a regular grid, nearly all there are, are passed over without a look at single
    boxes. Of an array with more than 4,096 boxes on no regular grid this says nothing.
    """
    starts = np.flatnonzero(np.diff(boxes.rows[:, 0], prepend=-1))
    if not len(starts):
        return
    counts = np.diff(starts, append=len(boxes))
    largest = np.maximum.reduceat(boxes.shapes, starts)
    cells = np.repeat(np.maximum(largest, 1), counts, axis=0)
    is_aligned = (boxes.offsets % cells == 0).all(axis=1)
    places = np.hstack([boxes.rows[:, :1], boxes.offsets])
    is_aligned[1:] &= (places[1:] != places[:-1]).any(axis=1)
    on_grid = np.logical_and.reduceat(is_aligned, starts)
    for start, count in zip(starts[~on_grid].tolist(), counts[~on_grid].tolist(), strict=True):
        rows = slice(start, start + count)
        if count <= _MAX_COMPARED and _is_any_shared(boxes.offsets[rows], boxes.shapes[rows]):
            yield rows


def _is_any_shared(offsets: npt.NDArray[np.int64], shapes: npt.NDArray[np.int64]) -> bool:
    """Whether two of the boxes share an element."""
    num_boxes, num_dims = offsets.shape
    shared = np.ones((num_boxes, num_boxes), bool)
    for dim in range(num_dims):
        start, end = offsets[:, dim], offsets[:, dim] + shapes[:, dim]
        shared &= (start[:, None] < end[None, :]) & (start[None, :] < end[:, None])
    return bool(shared.sum() > num_boxes)


def disjoint_parts(boxes: Sequence[Box]) -> list[tuple[Box, tuple[int, ...]]]:
    """Boxes of one array cut into parts, each with the numbers of the boxes that it is a part of.

    The parts cover what the boxes cover, and no two of them share an element.
    """
    parts: list[tuple[Region, tuple[int, ...]]] = []
    for number, box in enumerate(boxes):
        rest, cut = [box.region], []
        for region, holders in parts:
            common = region.intersect(box.region)
            if common is None:
                cut.append((region, holders))
                continue
            cut.append((common, (*holders, number)))
            cut.extend((left, holders) for left in region.without(common))
            rest = [left for piece in rest for left in piece.without(common)]
        parts = cut + [(region, (number,)) for region in rest]
    return [(Box(boxes[0].array, boxes[0].itemsize, region), by) for region, by in sorted(parts)]
