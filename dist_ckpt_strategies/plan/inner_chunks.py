"""Cut chunks into inner chunks: small enough to read little too much, large enough to be fast."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dist_ckpt_strategies.spec.region import Extent

MAX_NBYTES = 4 << 20
"""No inner chunk is larger, unless nothing divides the chunk."""

_WANTED_NBYTES = 2 << 20
_LEAST_NBYTES = 128 << 10
_PARTS = 16
"""A small chunk is cut into about this many, so that other layouts find boundaries in it too."""

_FEW_PARTS = 4
"""Every dim has as many first, lest a change of layout along a shorter one should read too much."""

_SMALL_FACTOR = 7
_MATRIX_DIMS = 2


@dataclass(frozen=True, slots=True)
class ChunkCut:
    """A chunk's shape and that of its inner chunks, which divides it. In elements."""

    chunk_shape: Extent
    inner_shape: Extent


def cut_chunk(chunk: Extent, shape: Extent, itemsize: int, *, is_movable: bool) -> ChunkCut | None:
    """Choose inner chunks for a chunk grid.

    Dims before the last two, experts say, are cut first, down to single elements; then the last
    two, into four parts each; then whichever is longer, so that inner chunks become square. A dim
    that the chunk covers whole may be cut anywhere: the chunk is made longer there, past the
    array's edge, which costs padding in the last inner chunk and no bytes else. Other dims can only
    be cut by their factors.

    Args:
        chunk: shape of the chunks, in elements.
        shape: of the array, in elements.
        itemsize: bytes of one element.
        is_movable: the boundaries between chunks may move too, to make factors: every dim may be
            cut anywhere.

    Returns:
        None where the factors of the chunk leave inner chunks larger than MAX_NBYTES and nothing
        is movable.
    """
    held = tuple(min(c, max(1, n)) for c, n in zip(chunk, shape, strict=True))
    is_free = tuple(is_movable or c >= n for c, n in zip(chunk, shape, strict=True))
    total = math.prod(held) * itemsize
    limit = min(_WANTED_NBYTES, max(_LEAST_NBYTES, total // _PARTS))
    counts = _counts(held, is_free, itemsize, limit)
    inner = tuple(-(-h // k) for h, k in zip(held, counts, strict=True))
    if math.prod(inner) * itemsize > MAX_NBYTES and not all(is_free):
        return None
    cut = tuple(i * -(-h // i) for h, i in zip(held, inner, strict=True))
    return ChunkCut(cut, inner)


def _counts(held: Extent, is_free: tuple[bool, ...], itemsize: int, limit: int) -> list[int]:
    """Inner chunks along each dim."""
    counts = [1] * len(held)
    while True:
        inner = [-(-h // k) for h, k in zip(held, counts, strict=True)]
        nbytes = math.prod(inner) * itemsize
        if nbytes <= limit:
            return counts
        options = [
            (dim, factor)
            for dim in range(len(held))
            if (factor := _factor(inner[dim], is_free=is_free[dim])) is not None
            and (factor <= _SMALL_FACTOR or nbytes // factor >= _LEAST_NBYTES // 2)
        ]
        if not options:
            return counts
        dim, factor = min(options, key=lambda option: _order(option, inner, counts))
        counts[dim] *= factor


def _factor(extent: int, *, is_free: bool) -> int | None:
    """The smallest number of parts that a dim can be cut into."""
    if extent == 1:
        return None
    if is_free:
        return 2
    return next((f for f in range(2, math.isqrt(extent) + 1) if extent % f == 0), extent)


def _order(
    option: tuple[int, int], inner: list[int], counts: list[int]
) -> tuple[bool, bool, int, int, int]:
    """Outer dims first, then small factors, then dims in few parts, then the longest dim."""
    dim, factor = option
    is_outer = dim < len(inner) - _MATRIX_DIMS
    few = min(counts[dim], _FEW_PARTS)
    return not is_outer, factor > _SMALL_FACTOR, few, -inner[dim], dim
