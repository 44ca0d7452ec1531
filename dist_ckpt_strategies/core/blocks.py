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

from dist_ckpt_strategies.core.array import ObjectId, Region, Shape

Column = npt.NDArray[np.int64]

OBJECT = "object"
OBJECT_SUFFIX = "\ud800"
"""No key of an array ends like that: it cannot be encoded, and so not be stored."""

_LENGTH = struct.Struct("<QQQ")


@dataclass(frozen=True, slots=True)
class ArrayFacts:
    """What all shards of an array have to agree on: its dtype by torch's name, and its shape."""

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
            known = [ArrayFacts(dtype, tuple(shape)) for dtype, shape in kinds]
            facts = tuple([known[n] for n, _ in zip(of_key, keys, strict=True)])
        except (struct.error, LookupError, ValueError, TypeError) as error:
            raise ValueError(f"not a table of blocks: {error}") from error
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
        known = []
        for key, of_key in zip(table.keys, table.facts, strict=True):
            at = number.setdefault(key, len(facts))
            if at == len(facts):
                facts.append(of_key)
                owner.append(n)
            elif facts[at] != of_key:
                differing.append((key, owner[at], n))
            known.append(at)
        arrays.append(np.array(known, np.int64)[table.array])
    width = max((part.origin.shape[1] for part in parts), default=0)
    table = BlockTable(
        tuple(number),
        tuple(facts),
        _joined(arrays),
        _joined([_widened(part.origin, width, 0) for part in parts], width),
        _joined([_widened(part.extent, width, 1) for part in parts], width),
        _joined([part.place for part in parts], 3),
    )
    sources = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    return table, sources, differing


@dataclass(frozen=True, slots=True)
class Overlaps:
    """Boxes that blocks and regions have in common, as columns, by region and then by block.

    Attributes:
        row: the number of the block.
        of_region: the number of the region.
        origin: first element of the box in the array.
        extent: its shape.
    """

    row: Column
    of_region: Column
    origin: Column
    extent: Column


def overlaps(table: BlockTable, arrays: Sequence[int], regions: Sequence[Region]) -> Overlaps:
    """What regions of arrays share with the blocks of a table, sorted by array and origin.

    Args:
        table: the blocks.
        arrays: of each region, an index of ``table.keys``.
        regions: in elements of their arrays.
    """
    width, array = table.origin.shape[1], np.array(arrays, np.int64)
    low = padded([region.offset for region in regions], width, 0)
    high = low + padded([region.shape for region in regions], width, 1)
    first, stop = _candidates(table, array, low, high)
    parts: list[tuple[Column, ...]] = []
    for region, row in pairs(first, stop):
        origin = np.maximum(table.origin[row], low[region])
        extent = np.minimum(table.origin[row] + table.extent[row], high[region]) - origin
        shared = (extent > 0).all(axis=1)
        parts.append((row[shared], region[shared], origin[shared], extent[shared]))
    rows, of_region, origins, extents = zip(*parts, strict=True) if parts else ([], [], [], [])
    return Overlaps(
        _joined([*rows]),
        _joined([*of_region]),
        _joined([*origins], width),
        _joined([*extents], width),
    )


_PAIRS = 1 << 20
"""Compared at once."""


def pairs(first: Column, stop: Column) -> Iterator[tuple[Column, Column]]:
    """Each number with its partners ``first`` to ``stop``, as two columns, part by part."""
    count = stop - first
    before = np.concatenate([[0], np.cumsum(count)])
    start = 0
    while start < len(count):
        end = max(start + 1, int(np.searchsorted(before, before[start] + _PAIRS, "right")) - 1)
        number = np.repeat(np.arange(start, end), count[start:end])
        shift = (first - before[:-1])[start:end] + before[start]
        yield number, np.arange(len(number)) + np.repeat(shift, count[start:end])
        start = end


def _candidates(
    table: BlockTable, array: Column, low: Column, high: Column
) -> tuple[Column, Column]:
    """The first row that may share an element with each region, and the first that follows them.

    Blocks are sorted by array and origin. They are searched along the first dim of their array in
    which not all blocks and regions have one element, as in the prepended dims of experts.
    """
    num, width = table.origin.shape
    if not width:
        edges = np.searchsorted(table.array, np.arange(len(table.keys) + 1))
        return edges[array], edges[array + 1]
    is_single = np.ones((len(table.keys), width), bool)
    np.logical_and.at(is_single, table.array, table.extent == 1)
    np.logical_and.at(is_single, array, high - low == 1)
    dims = np.minimum(np.cumprod(is_single, axis=1).sum(axis=1), width - 1)  # of each array
    group = arrays = np.concatenate([table.array, array])
    start = np.concatenate([table.origin, low])
    for dim in range(int(dims.max(initial=0))):
        at = np.where(dims[arrays] > dim, start[:, dim], 0)
        group = np.unique(group * (1 + at.max()) + at, return_inverse=True)[1]
    along = (np.arange(len(arrays)), dims[arrays])
    start, extent = start[along], np.concatenate([table.extent, high - low])[along]
    height = np.zeros(len(table.keys), np.int64)
    np.maximum.at(height, table.array, extent[:num])
    span = 1 + int((start + extent).max(initial=0))
    places = group * span + start
    lowest = np.minimum(start[num:], height[array] - 1)
    first = np.searchsorted(places[:num], places[num:] - lowest, "left")
    stop = np.searchsorted(places[:num], places[num:] + extent[num:], "left")
    return first, np.maximum(first, stop)  # a block or a region may be without elements


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


def _widened(column: Column, width: int, value: int) -> Column:
    missing = width - column.shape[1]
    return np.pad(column, ((0, 0), (0, missing)), constant_values=value) if missing else column


def _joined(columns: list[Column], width: int | None = None) -> Column:
    if not columns:
        return np.zeros(0 if width is None else (0, width), np.int64)
    return np.concatenate(columns)
