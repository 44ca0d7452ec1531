"""Find the runs of bytes that a box of a raw array shares with the memory it is read into."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from dist_ckpt_strategies.spec.array import ArraySpec
from dist_ckpt_strategies.spec.inner_grid import CRC_NBYTES
from dist_ckpt_strategies.spec.region import Extent, Region

MIN_SPAN_NBYTES = 64 << 10
"""Below this, a system call per run costs more than going through a chunk-wise reader."""


@dataclass(frozen=True, slots=True)
class ChunkSpans:
    """Equal-sized runs of one chunk file: (byte offset in the file, in the target) pairs."""

    index: Extent
    span_nbytes: int
    offsets: tuple[tuple[int, int], ...]


def stored_nbytes(array: ArraySpec, region: Region) -> int:
    """Bytes that leave storage where a box, not empty, is read: inner chunks are read whole.

    So are chunks of format 1 whose runs are too short to be read one by one; of compressed ones
    the bytes that they had before count.
    """
    itemsize = array.dtype.itemsize
    if array.inner_shape is not None:
        nbytes = math.prod(array.inner_shape) * itemsize + CRC_NBYTES * array.has_crc32c
        return nbytes * _num_cells(region, array.inner_shape)
    if raw_spans(array, region) is None:
        return array.chunk_nbytes * _num_cells(region, array.chunk_shape)
    return region.numel * itemsize


def _num_cells(region: Region, cell: Extent) -> int:
    """How many cells of a grid share an element with the region."""
    ends = zip(region.offset, region.end, cell, strict=True)
    return math.prod(-(-end // extent) - start // extent for start, end, extent in ends)


def raw_spans(array: ArraySpec, region: Region) -> tuple[ChunkSpans, ...] | None:
    """The byte runs that fill a C-contiguous target of ``region.shape``, or None.

    None says that the array is not raw, or that the runs are too short to be read one by one.
    """
    if not array.is_raw:
        return None
    whole = array.chunk_at(region)
    if whole is not None:
        return (ChunkSpans(whole, array.chunk_nbytes, ((0, 0),)),)
    found = []
    for index in array.chunks_of(region):
        spans = _chunk_spans(array, index, region)
        if len(spans.offsets) > 1 and spans.span_nbytes < MIN_SPAN_NBYTES:
            return None
        found.append(spans)
    return tuple(found)


def _chunk_spans(array: ArraySpec, index: Extent, region: Region) -> ChunkSpans:
    chunk = array.chunk_region(index)
    part = chunk.intersect(region)
    assert part is not None  # noqa: S101 - chunks_of yields only chunks that overlap
    inner = _contiguous_dims(part, chunk, region)
    outer = part.ndim - inner
    span = math.prod(part.shape[outer:]) * array.dtype.itemsize
    in_chunk = _starts(part.within(chunk), chunk.shape, outer, array.dtype.itemsize)
    in_target = _starts(part.within(region), region.shape, outer, array.dtype.itemsize)
    return ChunkSpans(index, span, tuple(zip(in_chunk, in_target, strict=True)))


def _contiguous_dims(part: Region, chunk: Region, region: Region) -> int:
    """How many trailing dims of ``part`` form one run in both frames."""
    count = 0
    for n, c, r in zip(
        reversed(part.shape), reversed(chunk.shape), reversed(region.shape), strict=True
    ):
        count += 1
        if not n == c == r:
            break
    return count


def _starts(part: Region, frame: Extent, outer: int, itemsize: int) -> Iterator[int]:
    """Byte offset, within ``frame``, of each run of ``part``."""
    strides = [math.prod(frame[d + 1 :]) * itemsize for d in range(len(frame))]
    base = sum(o * s for o, s in zip(part.offset[outer:], strides[outer:], strict=True))
    ranges = (range(o, o + n) for o, n in zip(part.offset[:outer], part.shape[:outer], strict=True))
    for index in product(*ranges):
        yield base + sum(i * s for i, s in zip(index, strides[:outer], strict=True))
