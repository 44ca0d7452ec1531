"""Boxes of arrays that ranks ask for, and tables of many of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from dist_ckpt_strategies.errors import PlanError
from dist_ckpt_strategies.spec.region import Region

Table = npt.NDArray[np.int64]
"""Whole numbers in rows and columns."""

Flags = npt.NDArray[np.bool_]

_NUM_FIXED = 3
"""Columns that every row has: array, element size in bytes, number of dims."""

_INT64 = np.dtype("<i8")


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """A box, not empty, of one of the arrays that some ranks have in common.

    Attributes:
        array: number of the array in the list of those arrays.
        itemsize: bytes of an element.
        region: in coordinates of the array.
    """

    array: int
    itemsize: int
    region: Region

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return self.region.numel * self.itemsize


@dataclass(frozen=True, slots=True, eq=False)
class BoxTable:
    """Boxes in rows, sorted, without repetition; a million of them take about 60 MB.

    Attributes:
        rows: array, element size, number of dims; offset and shape, in elements. Dims that a box
            lacks come last, with offset 0 and extent 1.
    """

    rows: Table

    @classmethod
    def of(cls, boxes: Iterable[Box]) -> Self:
        """The table of these boxes."""
        chosen = list(boxes)
        num_dims = max((box.region.ndim for box in chosen), default=0)
        rows = sorted({_row(box, num_dims) for box in chosen})
        return cls(np.array(rows, np.int64).reshape(len(rows), _NUM_FIXED + 2 * num_dims))

    @property
    def num_dims(self) -> int:
        """Dims that the table has columns for."""
        return int(self.rows.shape[1] - _NUM_FIXED) // 2

    @property
    def offsets(self) -> Table:
        """Offset of each box, in elements."""
        return self.rows[:, _NUM_FIXED : _NUM_FIXED + self.num_dims]

    @property
    def shapes(self) -> Table:
        """Shape of each box, in elements."""
        return self.rows[:, _NUM_FIXED + self.num_dims :]

    @property
    def nbytes(self) -> Table:
        """Bytes of each box's elements."""
        found: Table = np.prod(self.shapes, axis=1, dtype=np.int64) * self.rows[:, 1]
        return found

    def __len__(self) -> int:
        """Number of boxes."""
        return len(self.rows)

    def __iter__(self) -> Iterator[Box]:
        """Every box, in order."""
        return (self._box(row) for row in self.rows.tolist())

    def at(self, numbers: slice | Table | Flags) -> Self:
        """The boxes in these rows, in the order given."""
        return type(self)(self.rows[numbers])

    def with_dims(self, num_dims: int) -> Self:
        """The same boxes with columns for so many dims, at least as many as now."""
        missing = num_dims - self.num_dims
        zeros = np.zeros((len(self), missing), np.int64)
        fixed = self.rows[:, :_NUM_FIXED]
        return type(self)(np.hstack([fixed, self.offsets, zeros, self.shapes, zeros + 1]))

    def to_bytes(self) -> bytes:
        """What ``from_bytes`` takes."""
        return bytes([self.num_dims]) + self.rows.astype(_INT64, copy=False).tobytes()

    @classmethod
    def from_bytes(cls, content: bytes) -> Self:
        """The table that ``to_bytes`` wrote, on another rank.

        Raises:
            PlanError: the bytes are no table.
        """
        num_columns = _NUM_FIXED + 2 * content[0] if content else 0
        if not content or (len(content) - 1) % (num_columns * _INT64.itemsize):
            raise PlanError(f"expected a table of boxes, found {len(content)} bytes")
        rows = np.frombuffer(content, _INT64, offset=1).reshape(-1, num_columns)
        return cls(rows.astype(np.int64, copy=False))

    def _box(self, row: Sequence[int]) -> Box:
        array, itemsize, num_dims, *rest = row
        offset, shape = rest[:num_dims], rest[self.num_dims : self.num_dims + num_dims]
        return Box(array, itemsize, Region(tuple(offset), tuple(shape)))


def concatenated(tables: Sequence[BoxTable]) -> BoxTable:
    """The boxes of all tables, one behind the other: not sorted, and some perhaps repeated."""
    num_dims = max((table.num_dims for table in tables), default=0)
    empty = np.empty((0, _NUM_FIXED + 2 * num_dims), np.int64)
    return BoxTable(np.vstack([empty, *(table.with_dims(num_dims).rows for table in tables)]))


def _row(box: Box, num_dims: int) -> tuple[int, ...]:
    region, missing = box.region, num_dims - box.region.ndim
    fixed = (box.array, box.itemsize, region.ndim)
    return (*fixed, *region.offset, *(0,) * missing, *region.shape, *(1,) * missing)
