"""The chunk grid of an array that is saved, and which slices of which shards make up each chunk."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from dist_ckpt_strategies.core.array import ArraySpec, DType
from dist_ckpt_strategies.core.chunk_grids import (
    MAX_OBJECT_NBYTES,
    ChunkLayout,
    ShardPlacement,
    chunk_parts,
    cut_chunk,
    fills_grid,
    irregular_chunk_shape,
    object_chunk_shape,
    regular_chunk_shape,
    require_partition,
)
from dist_ckpt_strategies.core.region import Region, Shape


@dataclass(frozen=True, slots=True)
class ChunkSlices:
    """A chunk, and what it is put together from.

    Attributes:
        region: its part of the array.
        slices: regions that cover it, each with the number of the placement that it is a slice of.
    """

    region: Region
    slices: tuple[tuple[int, Region], ...]


@dataclass(frozen=True, slots=True)
class ArrayGrid:
    """How an array is cut into files.

    Attributes:
        chunk_shape: in elements.
        inner_shape: of the inner chunks; None where a chunk is not divided.
        chunks: each chunk's slices, in the order of the grid; None if every shard is a chunk.
    """

    chunk_shape: Shape
    inner_shape: Shape | None
    chunks: tuple[ChunkSlices, ...] | None


_Pattern = tuple[Shape, DType, tuple[tuple[Shape, Shape, int], ...]]
"""Shape and dtype of an array, and offset, shape and holder of each main replica. Holders are
numbered as they come: who they are makes no difference to the grid."""


class ArrayGrids:
    """The grids of many arrays; those that are held alike are looked at once.

    Thousands of groups of ranks cut their optimizer's buffers in the same way, and the same way for
    each kind of state.

    Args:
        chunk_layout: what the file of a chunk is made of.
    """

    def __init__(self, chunk_layout: ChunkLayout) -> None:
        self.chunk_layout = chunk_layout
        self._known: dict[_Pattern, ArrayGrid] = {}

    def of(
        self,
        array: ArraySpec,
        placements: Sequence[ShardPlacement],
        copies: Iterable[ShardPlacement],
    ) -> ArrayGrid:
        """The grid of an array that is known to be held whole.

        Args:
            array: key, shape and dtype; its chunk shape says nothing.
            placements: the main replicas, sorted.
            copies: the other replicas, to say who holds what the main ones leave out.

        Raises:
            CoverageError: elements are missing, or a region reaches outside the array.
            DuplicateWriterError: two placements share an element.
        """
        pattern = _pattern(array, placements)
        if pattern not in self._known:
            self._known[pattern] = _grid_of(array, placements, copies, self.chunk_layout)
        return self._known[pattern]


def _pattern(array: ArraySpec, placements: Sequence[ShardPlacement]) -> _Pattern:
    numbers: dict[int, int] = {}
    parts = tuple(
        (h.region.offset, h.region.shape, numbers.setdefault(h.rank, len(numbers)))
        for h in placements
    )
    return array.shape, array.dtype, parts


def _grid_of(
    array: ArraySpec,
    placements: Sequence[ShardPlacement],
    copies: Iterable[ShardPlacement],
    chunk_layout: ChunkLayout,
) -> ArrayGrid:
    regions = [placement.region for placement in placements]
    chunk = regular_chunk_shape(array.shape, regions)
    if chunk is None or not fills_grid(array.shape, chunk, regions):
        require_partition(array.key, array.shape, placements, list(copies))
    if chunk is not None:
        whole = replace(array, chunk_shape=chunk)
        small = _bounded(whole, chunk_layout)
        if (cut := _cut(small, chunk_layout, is_movable=False)) is not None:
            return _grid(cut, None if small is whole else placements)
        chunk = small.chunk_shape
    else:
        chunk = irregular_chunk_shape(array.shape, array.dtype.itemsize, placements)
    moved = _cut(
        _bounded(replace(array, chunk_shape=chunk), chunk_layout), chunk_layout, is_movable=True
    )
    assert moved is not None  # noqa: S101 - where boundaries may move, every chunk can be cut
    return _grid(moved, placements)


def _bounded(array: ArraySpec, chunk_layout: ChunkLayout) -> ArraySpec:
    """The array with chunks that fit an object; itself where they do."""
    if chunk_layout is not ChunkLayout.BOUNDED or array.chunk_nbytes <= MAX_OBJECT_NBYTES:
        return array
    chunk = object_chunk_shape(array.chunk_shape, array.dtype.itemsize)
    return replace(array, chunk_shape=chunk)


def _cut(array: ArraySpec, chunk_layout: ChunkLayout, *, is_movable: bool) -> ArraySpec | None:
    """The array with inner chunks; None where its chunks have no factors for them."""
    if chunk_layout is ChunkLayout.WHOLE:
        return array
    cut = cut_chunk(array.chunk_shape, array.shape, array.dtype.itemsize, is_movable=is_movable)
    if cut is None:
        return None
    return replace(array, chunk_shape=cut.chunk_shape, inner_shape=cut.inner_shape)


def _grid(array: ArraySpec, placements: Sequence[ShardPlacement] | None) -> ArrayGrid:
    """The grid that the array has; its chunks are put together from the placements, if from any."""
    if placements is None:
        return ArrayGrid(array.chunk_shape, array.inner_shape, None)
    parts: dict[Shape, list[tuple[int, Region]]] = defaultdict(list)
    for number, placement in enumerate(placements):
        for index, part in chunk_parts(array.chunk_shape, placement.region):
            parts[index].append((number, part))
    whole = Region.whole(array.shape)
    chunks = []
    for index in sorted(parts):
        region = array.chunk_region(index).intersect(whole)
        assert region is not None  # noqa: S101 - a chunk of the grid overlaps its array
        chunks.append(ChunkSlices(region, tuple(parts[index])))
    return ArrayGrid(array.chunk_shape, array.inner_shape, tuple(chunks))
