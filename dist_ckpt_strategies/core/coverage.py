"""Proof that the blocks of the main replicas make up their arrays, every element once.

All arrays are proved together by the corners of their blocks. A block of ``k`` dims is a sum of
``2**k`` quadrants that begin at its corners, each added or subtracted: in one dim, ``[2:5]`` is
``[2:] - [5:]``. Quadrants that begin at different elements are linearly independent. So blocks
cover every element of an array once if and only if their signed corners add up to those of the
array itself. To see that, two sorted columns are compared, and never two blocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from dist_ckpt_strategies.core.array import Shape
from dist_ckpt_strategies.core.blocks import BlockTable, Column, pairs
from dist_ckpt_strategies.errors import CoverageError, some_of

_Mask = npt.NDArray[np.bool_]

_MAX_CUT_DIMS = 4
"""Arrays that are cut along more dims have too many corners, and are proved one by one."""

_MAX_CORNERS = 1 << 62
"""Corners of all arrays are numbered in one row of int64."""

_MAX_SIZE = np.iinfo(np.int64).max

_NO_BLOCKS = -1
"""The number of an array that only copies hold."""

_MAX_LISTED = 16


@dataclass(frozen=True, slots=True)
class Copies:
    """Replicas that are not main, and the ranks that hold them.

    Attributes:
        ranks: global ranks; each holds all of the table.
        table: the blocks, not to be stored.
    """

    ranks: tuple[int, ...]
    table: BlockTable


def require_coverage(table: BlockTable, ranks: Column, copies: Sequence[Copies] = ()) -> None:
    """Raise unless the blocks cover every array of the table and of the copies exactly once.

    Blocks without elements count for nothing; arrays without elements need no block. The error is
    about the first key at fault in sorted order, whatever the order of the rows.

    Args:
        table: blocks of the main replicas of all ranks.
        ranks: global rank that holds each block.
        copies: the other replicas, to say who holds what the main ones leave out.

    Raises:
        CoverageError: elements are missing, or a block reaches outside the array.
        CoverageError: two blocks share an element.
    """
    unproved = {table.keys[n]: (table.facts[n].shape, n, table) for n in _unproved(table)}
    known = set(table.keys) if copies else set()
    for copy in copies:
        if not known.issuperset(copy.table.keys):
            for key, facts in zip(copy.table.keys, copy.table.facts, strict=True):
                if key not in known:
                    unproved.setdefault(key, (facts.shape, _NO_BLOCKS, copy.table))
    for key in sorted(unproved):
        _require_partition(key, *unproved[key], ranks, copies)


def _unproved(table: BlockTable) -> list[int]:
    """The arrays that are wrong, or whose proof takes more than their corners."""
    sizes = _sizes(table)
    num_arrays, width = sizes.shape
    is_cut = np.zeros((num_arrays, width), np.bool_)
    is_filled = np.ones(len(table), np.bool_)
    is_inside = np.ones(len(table), np.bool_)
    for dim in range(width):
        origin, extent, size = table.origin[:, dim], table.extent[:, dim], sizes[table.array, dim]
        is_filled &= extent != 0
        is_inside &= (origin >= 0) & (extent >= 0) & (extent <= size - origin)
        is_cut[table.array[extent != size], dim] = True
    num_cut = is_cut.sum(axis=1)
    num_corners = np.where(is_cut | (sizes == _MAX_SIZE), sizes + 1.0, 1.0).prod(axis=1)
    is_wrong = np.zeros(num_arrays, np.bool_)
    is_wrong[table.array[is_filled & ~is_inside]] = True
    is_small = (num_cut <= _MAX_CUT_DIMS) & (num_corners <= _MAX_CORNERS / max(1, num_arrays))
    is_empty = (sizes == 0).any(axis=1)
    is_tried = is_small & ~is_empty & ~is_wrong
    for number in np.unique(num_cut[is_tried]):
        arrays = np.flatnonzero(is_tried & (num_cut == number))
        # The dims that are cut; along the others all blocks are as long as the array.
        dims = np.argsort(~is_cut[arrays], axis=1, kind="stable")[:, :number]
        is_wrong[arrays[_not_partitioned(table, is_filled, sizes, arrays, dims)]] = True
    return np.flatnonzero(is_wrong | ~(is_small | is_empty)).tolist()


def _sizes(table: BlockTable) -> Column:
    """The shapes of the arrays, 1 where an array lacks a dim; absurd sizes are cut to int64."""
    shapes = [facts.shape for facts in table.facts]
    ndims = np.fromiter(map(len, shapes), np.int64, len(shapes))
    sizes = np.ones((len(shapes), table.origin.shape[1]), np.int64)
    try:
        flat = np.fromiter(chain.from_iterable(shapes), np.int64, int(ndims.sum()))
    except OverflowError:
        flat = np.array([min(n, _MAX_SIZE) for shape in shapes for n in shape], np.int64)
    sizes[np.arange(sizes.shape[1]) < ndims[:, None]] = flat
    return sizes


def _not_partitioned(
    table: BlockTable, is_filled: _Mask, sizes: Column, arrays: Column, dims: Column
) -> Column:
    """Which of the arrays have blocks whose corners do not add up to those of the array.

    Args:
        table: the blocks; those of the arrays are inside.
        is_filled: which blocks have elements.
        sizes: the shapes of all arrays of the table.
        arrays: numbers of the arrays.
        dims: along which each of them is cut, equally many.
    """
    place = np.full(len(sizes), -1)
    place[arrays] = np.arange(len(arrays))
    owner = place[table.array]
    rows = np.flatnonzero((owner >= 0) & is_filled)
    owner = owner[rows]
    if dims.shape[1] == 0:
        return np.flatnonzero(np.bincount(owner, minlength=len(arrays)) != 1)

    # A corner's number: its array's first number, and its place in C order. A dim of n elements
    # has n + 1 places, since blocks end at the last.
    lengths = np.take_along_axis(sizes[arrays], dims, axis=1)
    strides = np.ones((len(arrays), dims.shape[1] + 1), np.int64)
    for dim in reversed(range(dims.shape[1])):
        strides[:, dim] = strides[:, dim + 1] * (lengths[:, dim] + 1)
    first = np.cumsum(strides[:, 0]) - strides[:, 0]

    added, taken = first[owner][None], np.empty((0, len(rows)), np.int64)
    taken_whole, added_whole = first[None], np.empty((0, len(arrays)), np.int64)
    for dim in range(dims.shape[1]):
        stride, column = strides[:, dim + 1], dims[owner, dim]
        low = table.origin[rows, column]
        high = (low + table.extent[rows, column]) * stride[owner]
        added, taken = _with_dim(added, taken, low * stride[owner], high)
        end = lengths[:, dim] * stride
        taken_whole, added_whole = _with_dim(taken_whole, added_whole, np.zeros_like(end), end)
    plus = np.concatenate([added, added_whole], axis=None)
    del added
    minus = np.concatenate([taken, taken_whole], axis=None)
    plus.sort()
    minus.sort()
    # Blocks add as many corners as they take, so those of an array stand at the same places.
    wrong = plus[plus != minus]
    return np.unique(np.searchsorted(first, wrong, side="right") - 1)


def _with_dim(added: Column, taken: Column, low: Column, high: Column) -> tuple[Column, Column]:
    """Corners, in one dim more: an end has the opposite sign of an origin."""
    return np.concatenate([added + low, taken + high]), np.concatenate([added + high, taken + low])


def _require_partition(
    key: str, shape: Shape, number: int, table: BlockTable, ranks: Column, copies: Sequence[Copies]
) -> None:
    """Raise unless the blocks of one array are a partition of it, and say what is wrong.

    Disjoint blocks inside the array that add up to its number of elements leave no gap.
    """
    ndim = len(shape)
    rows = np.flatnonzero((table.array == number) & (table.extent != 0).all(axis=1))
    low, extent = table.origin[rows, :ndim], table.extent[rows, :ndim]
    if not len(rows):  # the table's arrays may have fewer dims
        low = extent = np.zeros((0, ndim), np.int64)
    order = np.lexsort((ranks[rows], *extent.T[::-1], *low.T[::-1]))
    rows, low, extent = rows[order], low[order], extent[order]
    sizes = np.array([min(n, _MAX_SIZE) for n in shape], np.int64)
    outside = np.flatnonzero(((low < 0) | (extent < 0) | (extent > sizes - low)).any(axis=1))
    if len(outside):
        row = rows[outside[0]]
        raise CoverageError(
            f"{key}: rank {ranks[row]} holds {table.region(row)}, outside the array's shape "
            f"{shape}",
            key=key,
        ).at_rank(int(ranks[row]))
    overlap = _first_overlap(low, low + extent)
    if overlap is not None:
        row, other = rows[min(overlap)], rows[max(overlap)]
        raise CoverageError(
            f"{key}: {table.region(row)} on rank {ranks[row]} and {table.region(other)} on rank "
            f"{ranks[other]} are both main replicas and overlap; give one of them another "
            "replica_id",
            key=key,
        )
    held = sum(map(math.prod, extent.tolist()))
    if held != math.prod(shape):
        gap = _first_gap(shape, low, low + extent)
        raise CoverageError(
            f"{key}: main replicas cover {held} of {math.prod(shape)} elements of shape {shape}; "
            f"first element not covered: {gap}, {_held_by(key, shape, gap, copies)}",
            key=key,
        )


def _first_overlap(low: Column, high: Column) -> tuple[int, int] | None:
    """Two of the blocks ``[low, high)``, which are sorted by origin, that share an element.

    Along the dim with most origins each is compared with those that begin before it ends.
    """
    doubled = np.flatnonzero((low[1:] == low[:-1]).all(axis=1))
    if len(doubled):
        return int(doubled[0]), int(doubled[0]) + 1
    if len(low) <= 1:
        return None
    dim = max(range(low.shape[1]), key=lambda dim: len(np.unique(low[:, dim])))
    order = np.argsort(low[:, dim], kind="stable")
    low, high = low[order], high[order]
    stop = np.searchsorted(low[:, dim], high[:, dim])
    for one, other in pairs(np.arange(1, len(low) + 1), stop):
        meets = ((low[one] < high[other]) & (low[other] < high[one])).all(axis=1)
        if meets.any():
            first = np.argmax(meets)
            return int(order[one[first]]), int(order[other[first]])
    return None


def _first_gap(shape: Shape, low: Column, high: Column) -> Shape:
    """The first element, in C order, that none of the blocks covers; they do not overlap.

    Goes to the first index whose slice of the array the blocks do not fill, dim by dim.
    """
    gap: list[int] = []
    for dim in range(len(shape)):
        lengths: npt.NDArray[Any] = (high - low)[:, dim + 1 :].astype(object)  # no overflow
        filled = lengths.prod(axis=1)
        places = np.concatenate([[0], low[:, dim], high[:, dim]])
        order = np.argsort(places, kind="stable")
        places = places[order]
        total = np.concatenate([[0], filled, -filled]).astype(object)[order].cumsum()
        is_short = total != math.prod(shape[dim + 1 :])
        is_short[:-1] &= places[1:] != places[:-1]  # the last of equal places has the total
        gap.append(int(places[is_short][0]))
        is_here = (low[:, dim] <= gap[-1]) & (gap[-1] < high[:, dim])
        low, high = low[is_here], high[is_here]
    return tuple(gap)


def _held_by(key: str, shape: Shape, element: Shape, copies: Sequence[Copies]) -> str:
    """Who has a copy of the element, in words."""
    ranks: set[int] = set()
    for copy in copies:
        table = copy.table
        number = table.keys.index(key) if key in table.keys else _NO_BLOCKS
        if number == _NO_BLOCKS or table.facts[number].shape != shape:
            continue
        rows = table.array == number
        low, extent = table.origin[rows, : len(shape)], table.extent[rows, : len(shape)]
        if ((low <= element) & (np.subtract(element, low) < extent)).all(axis=1).any():
            ranks.update(copy.ranks)
    if not ranks:
        return "which no rank holds"
    listed = some_of(list(map(str, sorted(ranks))), _MAX_LISTED)
    return f"which only copies hold (rank {listed}); one of them needs replica_id 0"
