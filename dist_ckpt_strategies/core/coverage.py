"""Proof that the blocks of the main replicas make up their arrays, every element once.

Disjoint blocks inside an array that add up to its number of elements leave no gap.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dist_ckpt_strategies.core.array import Shape
from dist_ckpt_strategies.core.blocks import BlockTable, Column, padded, shared_boxes
from dist_ckpt_strategies.errors import CoverageError, some_of

_MAX_SIZE = np.iinfo(np.int64).max
_MAX_LISTED = 16
_EXACT = float(1 << 53)
"""Smaller whole numbers are exact as floats, and so are their sums."""

Copies = tuple[tuple[int, ...], BlockTable]
"""Replicas that are not main: the global ranks that hold all of them, and the blocks."""


def require_coverage(table: BlockTable, ranks: Column, copies: Sequence[Copies] = ()) -> None:
    """Raise unless the blocks cover every array of the table and of the copies exactly once.

    Blocks without elements count for nothing; arrays without elements need no block. The error is
    about the first key at fault in sorted order, whatever the order of the rows.

    Args:
        table: blocks of the main replicas of all ranks.
        ranks: global rank that holds each block.
        copies: the other replicas, to say who holds what the main ones leave out.

    Raises:
        CoverageError: elements are missing, two blocks share one, or a block reaches outside.
    """
    rows = np.flatnonzero((table.extent != 0).all(axis=1))
    rows = rows[np.argsort(table.array[rows], kind="stable")]
    edges = np.searchsorted(table.array[rows], np.arange(len(table.keys) + 1)).tolist()
    unproved = {
        table.keys[n]: (table.facts[n].shape, rows[edges[n] : edges[n + 1]])
        for n in _unproved(table, rows)
    }
    keys = set(table.keys)
    for _, copied in copies:
        for key, facts in zip(copied.keys, copied.facts, strict=True):
            if key not in keys:
                unproved.setdefault(key, (facts.shape, rows[:0]))
    for key in sorted(unproved):
        _require_partition(key, *unproved[key], table, ranks, copies)


def _unproved(table: BlockTable, rows: Column) -> list[int]:
    """The arrays that are wrong, or too large for exact numbers; ``rows``: blocks with elements."""
    # 1 where an array lacks a dim; absurd sizes are cut to int64.
    shapes = [tuple([min(n, _MAX_SIZE) for n in facts.shape]) for facts in table.facts]
    sizes = padded(shapes, table.origin.shape[1], 1)
    num_arrays = len(sizes)
    array, origin, extent = table.array[rows], table.origin[rows], table.extent[rows]
    is_wrong = np.zeros(num_arrays, np.bool_)
    is_outside = (origin < 0) | (extent < 0) | (extent > sizes[array] - origin)
    is_wrong[array[is_outside.any(axis=1)]] = True
    num_elements = sizes.prod(axis=1, dtype=np.float64)
    held = np.bincount(array, extent.prod(axis=1, dtype=np.float64), num_arrays)
    is_wrong |= (held != num_elements) | (num_elements >= _EXACT)
    left = np.flatnonzero(~is_wrong[array])
    blocks = array[left], origin[left], (origin + extent)[left]
    for one, other, *_ in shared_boxes(blocks, blocks):
        is_wrong[blocks[0][one[one != other]]] = True
    return np.flatnonzero(is_wrong).tolist()


def _require_partition(
    key: str, shape: Shape, rows: Column, table: BlockTable, ranks: Column, copies: Sequence[Copies]
) -> None:
    """Raise unless the blocks of one array are a partition of it, and say what is wrong."""
    ndim = len(shape)
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
    blocks = np.zeros(len(rows), np.int64), low, low + extent
    for one, other, *_ in shared_boxes(blocks, blocks):
        differ = np.flatnonzero(one < other)
        if len(differ):
            row, second = rows[one[differ[0]]], rows[other[differ[0]]]
            raise CoverageError(
                f"{key}: {table.region(row)} on rank {ranks[row]} and {table.region(second)} on "
                f"rank {ranks[second]} are both main replicas and overlap; give one of them "
                "another replica_id",
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
    """The ranks that hold the element, in words."""
    ranks: set[int] = set()
    for holders, table in copies:
        if key not in table.keys or table.facts[table.keys.index(key)].shape != shape:
            continue
        rows = table.array == table.keys.index(key)
        low, extent = table.origin[rows, : len(shape)], table.extent[rows, : len(shape)]
        if ((low <= element) & (np.subtract(element, low) < extent)).all(axis=1).any():
            ranks.update(holders)
    if not ranks:
        return "which no rank holds"
    listed = some_of(list(map(str, sorted(ranks))), _MAX_LISTED)
    return f"which only copies hold (rank {listed}); one of them needs replica_id 0"
