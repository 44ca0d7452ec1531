"""The inner chunks of one chunk: where each lies in the array, and where in the chunk's file."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from dist_ckpt_strategies.core.array import ArraySpec, Region, Shape

INDEX_ENTRY_NBYTES = 16
"""Offset and size of one inner chunk, in the index at the end of the file."""

CRC_NBYTES = 4

RUN_NBYTES = 2 << 20
"""Inner chunks are handled this many bytes at a time: they stay in the processor's cache."""


class Run(NamedTuple):
    """Inner chunks that follow each other in the file and form a region.

    Attributes:
        first: number of the first one, in the order of the file.
        offset: of the first one, in inner chunks.
        shape: how many there are in each dim.
    """

    first: int
    offset: Shape
    shape: Shape
    num_chunks: int


class InnerGrid(NamedTuple):
    """The inner chunks of a chunk that hold elements of the array; in C order in the file.

    Attributes:
        region: the chunk's region, cut at the array's edge.
        inner_shape: of one inner chunk, in elements; those at the edge are padded to it.
        counts: inner chunks in each dim.
        slot_counts: the same for a chunk away from the edge; the file's index has an entry for
            each of those.
        raw_nbytes: bytes of the elements of one.
        stored_nbytes: bytes of one in the file.
        data_nbytes: bytes of the file before its index.
        index_nbytes: bytes of the index, which ends the file.
        is_flat: whether the file has the chunk's elements in C order: only its end may be padded.
    """

    region: Region
    inner_shape: Shape
    counts: Shape
    slot_counts: Shape
    raw_nbytes: int
    stored_nbytes: int
    num_chunks: int
    data_nbytes: int
    index_nbytes: int
    file_nbytes: int
    is_flat: bool

    @staticmethod
    def of(array: ArraySpec, index: Shape) -> InnerGrid:
        """The grid of the chunk at ``index`` of an array that has inner chunks."""
        shapes = (array.shape, array.chunk_shape, array.inner_shape)
        return _grid_at(index, *shapes, array.dtype.itemsize, CRC_NBYTES * array.has_crc32c)

    def region_of(self, offset: Shape, shape: Shape | None = None) -> Region:
        """The array's region of one inner chunk, or of several; cut at the array's edge."""
        whole, inner = self.region, self.inner_shape
        start = tuple(map(operator.add, whole.offset, map(operator.mul, offset, inner)))
        wanted = map(operator.mul, shape, inner) if shape else inner
        return Region(start, tuple(map(min, wanted, map(operator.sub, whole.end, start))))

    def runs(self, region: Region | None = None, max_nbytes: int = RUN_NBYTES) -> Iterator[Run]:
        """The inner chunks that share an element with ``region``, in the order of the file.

        Args:
            region: of the array; None for all.
            max_nbytes: bound on a run, in bytes of the file; a larger inner chunk goes alone.
        """
        low, high = (0,) * len(self.counts), self.counts
        if region is not None and region != self.region:
            common = region.intersect(self.region)
            if common is None:
                return
            part = common.within(self.region)
            low = tuple(map(operator.floordiv, part.offset, self.inner_shape))
            high = tuple(-(-e // i) for e, i in zip(part.end, self.inner_shape, strict=True))
        if not self.counts:
            yield Run(0, (), (), 1)
            return
        max_chunks = max(1, max_nbytes // self.stored_nbytes)
        sizes = tuple(map(operator.sub, high, low))
        # A run is contiguous: dims after the one that it is cut along are taken whole.
        cut, num_chunks = len(sizes) - 1, 1
        while cut and sizes[cut] == self.counts[cut] and num_chunks * sizes[cut] <= max_chunks:
            num_chunks *= sizes[cut]
            cut -= 1
        step = max(1, max_chunks // num_chunks)
        for outer in product(*(range(a, b) for a, b in zip(low[:cut], high[:cut], strict=True))):
            for start in range(low[cut], high[cut], step):
                count = min(step, high[cut] - start)
                offset = (*outer, start, *low[cut + 1 :])
                shape = (*(1,) * cut, count, *sizes[cut + 1 :])
                first = 0
                for at, num in zip(offset, self.counts, strict=True):
                    first = first * num + at
                yield Run(first, offset, shape, count * num_chunks)


@lru_cache(maxsize=1024)
def _grid_at(
    index: Shape, shape: Shape, chunk: Shape, inner: Shape | None, itemsize: int, crc_nbytes: int
) -> InnerGrid:
    """See ``InnerGrid.of``. The arrays of all layers have few grids between them."""
    assert inner is not None  # noqa: S101 - callers pass arrays of format 2
    offset = tuple(map(operator.mul, index, chunk))
    held = tuple(map(min, chunk, map(operator.sub, shape, offset)))
    counts = tuple([-(-h // i) for h, i in zip(held, inner, strict=True)])
    slot_counts = tuple(map(operator.floordiv, chunk, inner))
    raw = math.prod(inner) * itemsize
    num_chunks = math.prod(counts)
    data_nbytes = num_chunks * (raw + crc_nbytes)
    index_nbytes = math.prod(slot_counts) * INDEX_ENTRY_NBYTES + CRC_NBYTES
    cut = next((dim for dim, size in enumerate(inner) if size > 1), max(0, len(inner) - 1))
    is_padded = counts != tuple(map(operator.floordiv, held, inner))
    is_flat = inner[cut + 1 :] == held[cut + 1 :] and not (is_padded and math.prod(held[:cut]) > 1)
    return InnerGrid(
        region=Region(offset, held),
        inner_shape=inner,
        counts=counts,
        slot_counts=slot_counts,
        raw_nbytes=raw,
        stored_nbytes=raw + crc_nbytes,
        num_chunks=num_chunks,
        data_nbytes=data_nbytes,
        index_nbytes=index_nbytes,
        file_nbytes=data_nbytes + index_nbytes,
        is_flat=is_flat and not crc_nbytes,
    )
