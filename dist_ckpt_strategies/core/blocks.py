"""Blocks of arrays as columns: what the first rank needs to know of every shard that is stored.

A row is a block, one shard as it was saved. Half a million rows are compared and written down
without an object for each of them.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Self

import numpy as np
import numpy.typing as npt

from dist_ckpt_strategies.core.array import DType, ObjectId, Region, Shape

Column = npt.NDArray[np.int64]

OBJECT = "object"
OBJECT_SUFFIX = "\ud800"
"""No key of an array ends like that: it cannot be encoded, and so not be stored."""

_LENGTH = struct.Struct("<QQQ")


@dataclass(frozen=True, slots=True)
class ArrayFacts:
    """An array's dtype, by torch's name, and shape; all its shards must agree on them."""

    dtype: str
    shape: Shape

    def __str__(self) -> str:
        """For messages: ``(4, 8) of float32``."""
        return f"{self.shape} of {self.dtype}"


@dataclass(frozen=True, slots=True)
class BlockTable:
    """Blocks as columns, in any order.

    Attributes:
        keys: of the arrays.
        facts: of the arrays, in the same order.
        array: which array a block is of, an index of ``keys``.
        origin: first element of the block in the array; as many columns as the array with the most
            dims has, those that another array lacks are 0.
        extent: shape of the block; 1 in columns that the array lacks.
        place: three numbers that say where the block is stored: the pack, the first byte after
            the pack's header, and the first digest in the pack's table.
    """

    keys: tuple[str, ...]
    facts: tuple[ArrayFacts, ...]
    array: Column
    origin: Column
    extent: Column
    place: Column

    def __len__(self) -> int:
        """Number of blocks."""
        return len(self.array)

    @classmethod
    def of(
        cls,
        arrays: dict[str, ArrayFacts],
        blocks: Sequence[tuple[str, Region]],
        places: Sequence[tuple[int, int, int]],
    ) -> Self:
        """The table of blocks, each by the key of its array and its region."""
        keys = tuple(arrays)
        number = {key: n for n, key in enumerate(keys)}
        width = max((len(facts.shape) for facts in arrays.values()), default=0)
        origin = padded([region.offset for _, region in blocks], width, 0)
        extent = padded([region.shape for _, region in blocks], width, 1)
        array = np.array([number[key] for key, _ in blocks], np.int64)
        place = np.array(places, np.int64).reshape(len(blocks), 3)
        return cls(keys, tuple(arrays.values()), array, origin, extent, place)

    @property
    def nbytes(self) -> Column:
        """Bytes of each block."""
        sizes = np.array([DType(facts.dtype).itemsize for facts in self.facts], np.int64)
        numel: Column = self.extent.prod(axis=1)
        return numel * sizes[self.array]

    def region(self, row: int) -> Region:
        """The region of a block."""
        ndim = len(self.facts[self.array[row]].shape)
        offset, shape = self.origin[row, :ndim].tolist(), self.extent[row, :ndim].tolist()
        return Region(tuple(offset), tuple(shape))

    def rows(self, rows: Column) -> Self:
        """Some of the blocks in the order of their numbers, and their arrays alone."""
        used, first, number = np.unique(self.array[rows], return_index=True, return_inverse=True)
        order = np.argsort(first)
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        arrays = used[order].tolist()
        return type(self)(
            tuple([self.keys[n] for n in arrays]),
            tuple([self.facts[n] for n in arrays]),
            place[number],
            self.origin[rows],
            self.extent[rows],
            self.place[rows],
        )

    def between(self, first: int, last: int) -> Self:
        """The blocks of arrays ``first`` to ``last``; takes no look at the others.

        Rows have to be in the order of their arrays.
        """
        start, stop = np.searchsorted(self.array, [first, last + 1]).tolist()
        arrays, rows = slice(first, last + 1), slice(start, stop)
        return type(self)(
            self.keys[arrays],
            self.facts[arrays],
            self.array[rows] - first,
            self.origin[rows],
            self.extent[rows],
            self.place[rows],
        )

    def to_bytes(self) -> bytes:
        """The table as a message for another rank, or a part of a file."""
        number: dict[ArrayFacts, int] = {}
        of_key = [number.setdefault(facts, len(number)) for facts in self.facts]
        kinds = [(facts.dtype, facts.shape) for facts in number]  # many arrays have equal facts
        head = json.dumps([kinds, of_key, self.keys], separators=(",", ":")).encode()
        columns = (self.array[:, None], self.origin, self.extent, self.place)
        rows = np.concatenate(columns, axis=1).astype("<i8")
        return _LENGTH.pack(len(head), len(self), self.origin.shape[1]) + head + rows.tobytes()

    @classmethod
    def from_bytes(cls, content: bytes) -> Self:
        """The table that ``to_bytes`` made a message of; a ValueError if it is none."""
        try:
            length, num_rows, width = _LENGTH.unpack_from(content)
            body = _LENGTH.size + length
            kinds, of_key, keys = json.loads(content[_LENGTH.size : body])
            rows = np.frombuffer(content, "<i8", offset=body).reshape(num_rows, 4 + 2 * width)
            of_kinds = [ArrayFacts(dtype, tuple(shape)) for dtype, shape in kinds]
            facts = tuple([of_kinds[n] for n, _ in zip(of_key, keys, strict=True)])
            ndim = max((len(of_kind.shape) for of_kind in of_kinds), default=0)
        except (struct.error, LookupError, ValueError, TypeError) as error:
            raise ValueError(f"not a table of blocks: {error}") from error
        if ndim > width or not ((rows[:, 0] >= 0) & (rows[:, 0] < len(keys))).all():
            raise ValueError(
                f"not a table of blocks: one of no array, or of more than {width} dims"
            )
        end = 1 + 2 * width
        return cls(
            tuple(keys),
            facts,
            rows[:, 0],
            rows[:, 1 : 1 + width],
            rows[:, 1 + width : end],
            rows[:, end:],
        )


def merged(tables: Iterable[BlockTable]) -> tuple[BlockTable, Column, list[tuple[str, int, int]]]:
    """The rows of several tables in one, and which table each is from.

    Also the arrays whose facts two tables have differently: key and the numbers of both tables. The
    first one's facts are kept.
    """
    number: dict[str, int] = {}
    facts: list[ArrayFacts] = []
    owner: list[int] = []
    differing: list[tuple[str, int, int]] = []
    parts: list[BlockTable] = []
    arrays: list[Column] = []
    for n, table in enumerate(tables):
        parts.append(table)
        places = []
        for key, of_key in zip(table.keys, table.facts, strict=True):
            at = number.setdefault(key, len(facts))
            if at == len(facts):
                facts.append(of_key)
                owner.append(n)
            elif facts[at] != of_key:
                differing.append((key, owner[at], n))
            places.append(at)
        arrays.append(np.array(places, np.int64)[table.array])
    width = max((part.origin.shape[1] for part in parts), default=0)
    table = BlockTable(
        tuple(number),
        tuple(facts),
        _joined(arrays),
        _joined([widened(part.origin, width, 0) for part in parts], width),
        _joined([widened(part.extent, width, 1) for part in parts], width),
        _joined([part.place for part in parts], 3),
    )
    sources = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    return table, sources, differing


def overlaps(
    table: BlockTable, arrays: Sequence[int], regions: Sequence[Region]
) -> tuple[Column, Column, Column, Column]:
    """Boxes that regions of arrays share with the blocks of a table.

    The numbers of block and region, the first element of the box in the array, and its shape.
    ``arrays`` has the array of each region, an index of ``table.keys``.
    """
    width, array = table.origin.shape[1], np.array(arrays, np.int64)
    low = padded([region.offset for region in regions], width, 0)
    high = low + padded([region.shape for region in regions], width, 1)
    blocks = table.array, table.origin, table.origin + table.extent
    parts = list(shared_boxes(blocks, (array, low, high)))
    rows, of_region, origins, extents = zip(*parts, strict=True) if parts else ([], [], [], [])
    boxes = _joined([*origins], width), _joined([*extents], width)
    return _joined([*rows]), _joined([*of_region]), *boxes


Boxes = tuple[Column, Column, Column]
"""Boxes ``[low, high)`` in arrays: numbers of the arrays, and two tables with a column per dim."""


def shared_boxes(blocks: Boxes, regions: Boxes) -> Iterator[tuple[Column, Column, Column, Column]]:
    """Boxes that blocks and regions of equal arrays share, part by part; see ``overlaps``."""
    (_, block_low, block_high), (_, low, high) = blocks, regions
    for row, region in _meeting(blocks, regions):
        origin = np.maximum(block_low[row], low[region])
        extent = np.minimum(block_high[row], high[region]) - origin
        shared = (extent > 0).all(axis=1)
        yield row[shared], region[shared], origin[shared], extent[shared]


def _meeting(blocks: Boxes, regions: Boxes) -> Iterator[tuple[Column, Column]]:
    """Numbers of blocks and regions that may share an element, part by part.

    They have the same index in all dims in which every box of their array has one element, as in
    the dims of experts, and meet along that of the others in which the boxes are shortest.
    """
    array, start, end = map(np.concatenate, zip(blocks, regions, strict=True))
    num, width, num_arrays = len(blocks[0]), max(1, start.shape[1]), 1 + array.max(initial=-1)
    start, end = widened(start, width, 0), widened(end, width, 1)
    length = np.full((num_arrays, width), np.inf)  # of the boxes of an array, of all its elements
    group = array
    for dim in range(width):
        extent = (end - start)[:, dim]
        is_long = np.bincount(array, extent != 1, num_arrays) > 0
        ends = np.ones(num_arrays)
        np.maximum.at(ends, array, end[:, dim])
        length[is_long, dim] = (np.bincount(array, extent, num_arrays) / ends)[is_long]
        if not is_long.all():
            at = np.where(is_long[array], 0, start[:, dim])
            number = np.unique(at, return_inverse=True)[1]
            group = np.unique(group * len(array) + number, return_inverse=True)[1]
    along = np.arange(len(array)), length.argmin(axis=1)[array]
    places = np.unique(np.concatenate([start[along], end[along]]), return_inverse=True)[1]
    first, last = (group * len(places) + part for part in np.split(places, 2))
    in_order, of_regions = np.argsort(first[:num]), np.argsort(first[num:])
    starts, others = first[:num][in_order], first[num:][of_regions]
    of_region = np.searchsorted(starts, first[num:]), np.searchsorted(starts, last[num:])
    for region, row in _pairs(*of_region):  # blocks that begin within a region
        yield in_order[row], region
    of_block = np.searchsorted(others, first[:num], "right"), np.searchsorted(others, last[:num])
    for row, region in _pairs(*of_block):  # regions that begin within a block, after its origin
        yield row, of_regions[region]


_PAIRS = 1 << 20
"""Compared at once."""


def _pairs(first: Column, stop: Column) -> Iterator[tuple[Column, Column]]:
    """Each number with its partners ``first`` to ``stop``, as two columns, part by part."""
    count = np.maximum(stop - first, 0)
    before = np.concatenate([[0], np.cumsum(count)])
    start = 0
    while start < len(count):
        end = max(start + 1, int(np.searchsorted(before, before[start] + _PAIRS, "right")) - 1)
        number = np.repeat(np.arange(start, end), count[start:end])
        shift = (first - before[:-1])[start:end] + before[start]
        yield number, np.arange(len(number)) + np.repeat(shift, count[start:end])
        start = end


def with_objects(table: BlockTable, objects: Sequence[ObjectId]) -> BlockTable:
    """A table of arrays, and of shards of objects as elements of an array of dtype ``OBJECT``.

    The key of such an array is the object's and ``OBJECT_SUFFIX``; see ``plain_text``.
    """
    ordered = [(f"{name.key}{OBJECT_SUFFIX}", name) for name in sorted(objects)]
    facts = {key: ArrayFacts(OBJECT, name.shape) for key, name in ordered}
    cells = [(key, Region(name.offset, (1,) * len(name.offset))) for key, name in ordered]
    return merged([table, BlockTable.of(facts, cells, [(0, 0, 0)] * len(cells))])[0]


def plain_text(text: str) -> str:
    """A key of such a table, or an error about it, with objects under their own keys."""
    return text.replace(OBJECT_SUFFIX, "")


def padded(rows: Sequence[Shape], width: int, value: int) -> Column:
    """Rows of different lengths as a table."""
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    flat = np.fromiter(chain.from_iterable(rows), np.int64, int(lengths.sum()))
    table = np.full((len(rows), width), value, np.int64)
    table[np.arange(width) < lengths[:, None]] = flat
    return table


def widened(column: Column, width: int, value: int) -> Column:
    """The table with so many columns; further ones have this value."""
    missing = width - column.shape[1]
    return np.pad(column, ((0, 0), (0, missing)), constant_values=value) if missing else column


def _joined(columns: list[Column], width: int | None = None) -> Column:
    if not columns:
        return np.zeros(0 if width is None else (0, width), np.int64)
    return np.concatenate(columns)
