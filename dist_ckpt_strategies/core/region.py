"""A region of elements inside a global array."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

Shape = tuple[int, ...]


class Region(NamedTuple):
    """Half-open region ``[offset, offset + shape)``, in elements of the global array."""

    offset: Shape
    shape: Shape

    @classmethod
    def whole(cls, shape: Shape) -> Region:
        """The region that covers an array of that shape."""
        return cls((0,) * len(shape), shape)

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.shape)

    @property
    def numel(self) -> int:
        """Elements in the region; 1 for a scalar."""
        return math.prod(self.shape)

    @property
    def end(self) -> Shape:
        """First element past the region, in each dim."""
        return tuple(map(operator.add, self.offset, self.shape))

    def intersect(self, other: Region) -> Region | None:
        """The common region, or None where the two share no element."""
        low = tuple(map(max, self.offset, other.offset))
        shape = tuple(map(operator.sub, map(min, self.end, other.end), low))
        return Region(low, shape) if min(shape, default=1) > 0 else None

    def contains(self, other: Region) -> bool:
        """Whether no element of ``other`` lies outside."""
        return all(
            a <= b and f <= e
            for a, b, e, f in zip(self.offset, other.offset, self.end, other.end, strict=True)
        )

    def without(self, other: Region) -> Iterator[Region]:
        """Regions that together are this one less ``other``; no two of them share an element."""
        hole = self.intersect(other)
        if hole is None:
            yield self
            return
        low, high = list(self.offset), list(self.end)
        for dim in range(self.ndim):
            for start, stop in ((low[dim], hole.offset[dim]), (hole.end[dim], high[dim])):
                if start < stop:
                    offset = (*low[:dim], start, *low[dim + 1 :])
                    end = (*high[:dim], stop, *high[dim + 1 :])
                    yield Region(offset, tuple(map(operator.sub, end, offset)))
            low[dim], high[dim] = hole.offset[dim], hole.end[dim]

    def cells(self, cell: Shape) -> Iterator[Shape]:
        """Indices, in C order, of the cells of a regular grid that share an element with it."""
        if self.numel == 0:
            return iter(())
        spans = zip(self.offset, self.end, cell, strict=True)
        return product(*[range(a // c, (e - 1) // c + 1) for a, e, c in spans])

    def within(self, frame: Region) -> Region:
        """The same region, in coordinates relative to ``frame``."""
        return Region(tuple(map(operator.sub, self.offset, frame.offset)), self.shape)

    def slices(self) -> tuple[slice, ...]:
        """Indexing form of the region."""
        return tuple(slice(a, a + n) for a, n in zip(self.offset, self.shape, strict=True))

    def __str__(self) -> str:
        """Python indexing form, for messages: ``[0:4, 8:16]``."""
        return "[" + ", ".join(f"{s.start}:{s.stop}" for s in self.slices()) + "]"
