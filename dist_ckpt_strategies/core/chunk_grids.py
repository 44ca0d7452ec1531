"""Prove that shards make up an array, and choose its chunks and inner chunks."""

import math
import operator
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import product
from typing import NamedTuple

from dist_ckpt_strategies.core.array import Region, Shape
from dist_ckpt_strategies.errors import CoverageError, DuplicateWriterError


class ChunkLayout(Enum):
    """What the file of a chunk is made of."""

    WHOLE = "whole"
    INNER = "inner chunks"
    BOUNDED = "inner chunks, few enough for one request"


@dataclass(frozen=True, slots=True, order=True)
class ShardPlacement:
    """A region of one array and the rank that holds its main replica."""

    region: Region
    rank: int


def require_partition(
    key: str,
    shape: Shape,
    placements: Sequence[ShardPlacement],
    copies: Iterable[ShardPlacement] = (),
) -> None:
    """Raise unless the (non-empty) placements cover the array exactly once.

    Disjoint regions inside the array that add up to its number of elements leave no gap, so the
    proof is: inside, disjoint, and the sum.

    Args:
        key: of the array.
        shape: of the array, in elements.
        placements: the main replicas.
        copies: the other replicas, to say who holds what the main ones leave out.

    Raises:
        CoverageError: elements are missing, or a region reaches outside the array.
        DuplicateWriterError: two placements share an element.
    """
    whole = Region.whole(shape)
    for placement in placements:
        if not whole.contains(placement.region):
            raise CoverageError(
                f"{key}: rank {placement.rank} holds {placement.region}, outside the array's "
                f"shape {shape}",
                key=key,
            ).at_rank(placement.rank)
    overlap = _first_overlap(placements)
    if overlap is not None:
        one, other = overlap
        raise DuplicateWriterError(
            f"{key}: {one.region} on rank {one.rank} and {other.region} on rank {other.rank} "
            "are both main replicas and overlap; give one of them another replica_id",
            key=key,
        )
    held = sum(placement.region.numel for placement in placements)
    if held != math.prod(shape):
        rest = [whole]
        for placement in sorted(placements):
            rest = [left for region in rest for left in region.without(placement.region)]
        gap = min(region.offset for region in rest)
        raise CoverageError(
            f"{key}: main replicas cover {held} of {math.prod(shape)} elements of shape {shape}; "
            f"first element not covered: {gap}, {_held_by(gap, copies)}",
            key=key,
        )


def _first_overlap(
    placements: Sequence[ShardPlacement],
) -> tuple[ShardPlacement, ShardPlacement] | None:
    """Two placements that share an element; sweeps along the dim that separates them best."""
    ndim = placements[0].region.ndim if placements else 0
    if ndim == 0:
        return (placements[0], placements[1]) if len(placements) > 1 else None
    dim = max(range(ndim), key=lambda d: len({h.region.offset[d] for h in placements}))
    overlapping: list[ShardPlacement] = []
    for placement in sorted(placements, key=lambda h: (h.region.offset[dim], h)):
        start = placement.region.offset[dim]
        overlapping = [h for h in overlapping if h.region.end[dim] > start]
        for other in overlapping:
            if placement.region.intersect(other.region) is not None:
                return other, placement
        overlapping.append(placement)
    return None


def _held_by(element: Shape, copies: Iterable[ShardPlacement]) -> str:
    """Who has a copy of the element, in words."""
    region = Region(element, (1,) * len(element))
    ranks = sorted({copy.rank for copy in copies if copy.region.contains(region)})
    if not ranks:
        return "which no rank holds"
    listed = ", ".join(map(str, ranks))
    return f"which only copies hold (rank {listed}); one of them needs replica_id 0"


MAX_ASSEMBLED_NBYTES = 256 << 20
"""A chunk that is assembled from slices needs a buffer of its size on its writer."""

MAX_OBJECT_NBYTES = 64 << 20
"""What goes to an object store in one request, which is lost as a whole where it fails."""

FILE_COST_NBYTES = 256 << 10
"""One more file weighs as much as moving this many bytes between ranks."""

_MAX_CANDIDATES = 64
_MAX_MORE_PARTS = 16


def find_chunk_shape(
    key: str,
    shape: Shape,
    itemsize: int,
    placements: Sequence[ShardPlacement],
    copies: Iterable[ShardPlacement] = (),
) -> tuple[Shape, bool]:
    """A chunk shape for an array, and whether its chunks are the shards, one each.

    That they are proves that they make up the array, without comparing regions.

    Args:
        key: of the array.
        shape: of the array, in elements.
        itemsize: bytes of one element.
        placements: the main replicas, none empty.
        copies: see require_partition.

    Raises:
        CoverageError, DuplicateWriterError: see require_partition.
    """
    regions = [placement.region for placement in placements]
    sizes = zip(*(region.shape for region in regions), strict=True)
    chunk = tuple(map(max, sizes)) if regions else tuple(max(1, n) for n in shape)
    is_regular = all(
        offset >= 0 and offset % c == 0 and n == min(c, size - offset)  # the edge may cut a chunk
        for region in regions
        for offset, n, c, size in zip(*region, chunk, shape, strict=True)
    )
    if is_regular:
        indices = {tuple(map(operator.floordiv, region.offset, chunk)) for region in regions}
        num_chunks = math.prod(-(-n // c) for n, c in zip(shape, chunk, strict=True))
        if len(indices) == len(regions) == num_chunks:
            return chunk, True
    require_partition(key, shape, placements, copies)
    return irregular_chunk_shape(shape, itemsize, placements), False


def irregular_chunk_shape(
    shape: Shape, itemsize: int, placements: Sequence[ShardPlacement]
) -> Shape:
    """A chunk shape for shards that lie on no regular grid: few files, little traffic.

    Tries, for each dim, the spacings at which the owner changes, and keeps the combination with
    the lowest cost, bytes moved between ranks plus FILE_COST_NBYTES for each file.

    Args:
        shape: of the array, in elements, none 0.
        itemsize: bytes of one element.
        placements: main replicas, a partition of the array.
    """
    hulls = _hulls(placements)
    per_dim = [_candidates(dim, shape[dim], hulls, placements) for dim in range(len(shape))]
    max_files = 4 * len(placements) + 64
    best: tuple[int, int, Shape] | None = None
    for number, chunk in enumerate(product(*per_dim)):
        bounded = _bounded(chunk, itemsize)
        num_files = math.prod(-(-n // c) for n, c in zip(shape, bounded, strict=True))
        if number >= _MAX_CANDIDATES or (best is not None and num_files > max_files):
            continue
        moved = _moved_elements(bounded, placements) * itemsize
        cost = (moved + num_files * FILE_COST_NBYTES, num_files, bounded)
        best = cost if best is None else min(best, cost)
    assert best is not None  # noqa: S101 - each dim has a candidate
    return best[2]


def object_chunk_shape(chunk: Shape, itemsize: int, max_nbytes: int = MAX_OBJECT_NBYTES) -> Shape:
    """A chunk of a shard's shape, cut until it has ``max_nbytes`` at most.

    Outer dims first: the parts of a tensor in C order are contiguous then. Into equal parts
    where a number of parts near the least one allows it, so that no part reaches across shards.
    """
    sizes = list(chunk)
    for dim, size in enumerate(chunk):
        if math.prod(sizes) * itemsize <= max_nbytes:
            break
        fitting = max(1, max_nbytes // (math.prod(sizes[dim + 1 :]) * itemsize))
        least = -(-size // fitting)
        most = min(_MAX_MORE_PARTS * least, size)
        divisors = (n for n in range(least, most + 1) if size % n == 0)
        sizes[dim] = -(-size // next(divisors, least))
    return tuple(sizes)


def _hulls(placements: Sequence[ShardPlacement]) -> list[Region]:
    """For each rank the region around all it holds."""
    by_rank: dict[int, list[Region]] = defaultdict(list)
    for placement in placements:
        by_rank[placement.rank].append(placement.region)
    hulls = []
    for regions in by_rank.values():
        low = tuple(map(min, zip(*(r.offset for r in regions), strict=True)))
        high = tuple(map(max, zip(*(r.end for r in regions), strict=True)))
        hulls.append(Region(low, tuple(h - lo for lo, h in zip(low, high, strict=True))))
    return hulls


def _candidates(
    dim: int, size: int, hulls: Sequence[Region], placements: Sequence[ShardPlacement]
) -> list[int]:
    """Chunk sizes worth trying along one dim, the coarsest first."""
    found = {max(h.shape[dim] for h in hulls)}
    for regions in (hulls, [h.region for h in placements]):
        edges = {r.offset[dim] for r in regions} | {r.end[dim] for r in regions}
        inner = edges - {0, size}
        found.add(math.gcd(*inner) if inner else size)
        found.add(-(-size // (len(inner) + 1)))
    return sorted(found, reverse=True)


def _bounded(chunk: Shape, itemsize: int) -> Shape:
    """The chunk, cut evenly along its longest dim until it fits the assembly bound."""
    sizes = list(chunk)
    while math.prod(sizes) * itemsize > MAX_ASSEMBLED_NBYTES and max(sizes) > 1:
        dim = sizes.index(max(sizes))
        parts = min(-(-math.prod(sizes) * itemsize // MAX_ASSEMBLED_NBYTES), sizes[dim])
        even = next((p for p in range(parts, min(4 * parts, sizes[dim])) if sizes[dim] % p == 0), 0)
        sizes[dim] = -(-sizes[dim] // (even or parts))
    return tuple(sizes)


def _moved_elements(chunk: Shape, placements: Sequence[ShardPlacement]) -> int:
    """Elements that leave their rank when the largest holder of each chunk writes it."""
    held: dict[Shape, Counter[int]] = defaultdict(Counter)
    for placement in placements:
        for index, part in chunk_parts(chunk, placement.region):
            held[index][placement.rank] += part.numel
    return sum(count.total() - max(count.values()) for count in held.values())


def chunk_parts(chunk: Shape, region: Region) -> list[tuple[Shape, Region]]:
    """The region cut along the chunk grid: each chunk index it touches, with the common region."""
    parts = []
    for index in region.cells(chunk):
        common = Region(tuple(map(operator.mul, index, chunk)), chunk).intersect(region)
        assert common is not None  # noqa: S101 - the index was computed from the region
        parts.append((index, common))
    return parts


MAX_NBYTES = 4 << 20
"""No inner chunk is larger, unless nothing divides the chunk."""

_WANTED_NBYTES = 2 << 20
_LEAST_NBYTES = 128 << 10
_PARTS = 16
"""A small chunk is cut into about this many, so that other layouts find boundaries in it too."""

_FEW_PARTS = 4
"""A dimension has as many first, so that a change of layout along it does not read too much."""

_SMALL_FACTOR = 7
_MATRIX_DIMS = 2


class ChunkCut(NamedTuple):
    """A chunk's shape and that of its inner chunks, which divides it. In elements."""

    chunk_shape: Shape
    inner_shape: Shape


def cut_chunk(chunk: Shape, shape: Shape, itemsize: int, *, is_movable: bool) -> ChunkCut | None:
    """Choose inner chunks for a chunk grid; shapes are in elements.

    Dimensions before the last two (experts) are cut first, down to single elements. Of the last
    two, those are cut that the chunks cut already, along which other layouts will cut too: Megatron
    never changes the axis along which a parameter is sharded. Rows stay whole where they can, so
    that an inner chunk is one segment of a tensor's memory, and is written and read without a copy;
    where the last dimension is cut, into four parts, the one before it is cut next. An array that
    no chunk cuts is cut along both: into four parts each, then whichever is longer.

    A dimension that the chunk covers whole may be cut anywhere: the chunk is made longer there,
    past the array's edge, which costs padding in the last inner chunk and no bytes else. Others can
    only be cut by their factors, unless ``is_movable``: the boundaries between chunks move then.

    Returns:
        None where the factors of the chunk leave inner chunks larger than MAX_NBYTES and nothing
        is movable.
    """
    held = tuple(min(c, max(1, n)) for c, n in zip(chunk, shape, strict=True))
    is_free = tuple(is_movable or c >= n for c, n in zip(chunk, shape, strict=True))
    total = math.prod(held) * itemsize
    limit = min(_WANTED_NBYTES, max(_LEAST_NBYTES, total // _PARTS))
    is_cut = tuple(c < n for c, n in zip(chunk, shape, strict=True))
    counts = _counts(held, is_free, is_cut, itemsize, limit)
    inner = tuple(-(-h // k) for h, k in zip(held, counts, strict=True))
    if math.prod(inner) * itemsize > MAX_NBYTES and not all(is_free):
        return None
    cut = tuple(i * -(-h // i) for h, i in zip(held, inner, strict=True))
    return ChunkCut(cut, inner)


def _counts(
    held: Shape, is_free: tuple[bool, ...], is_cut: tuple[bool, ...], itemsize: int, limit: int
) -> list[int]:
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
        dim, factor = min(options, key=lambda option: _order(option, inner, counts, is_cut))
        counts[dim] *= factor


def _factor(size: int, *, is_free: bool) -> int | None:
    """The smallest number of parts that a dim can be cut into."""
    if size == 1:
        return None
    if is_free:
        return 2
    return next((f for f in range(2, math.isqrt(size) + 1) if size % f == 0), size)


def _order(
    option: tuple[int, int], inner: list[int], counts: list[int], is_cut: tuple[bool, ...]
) -> tuple[bool, bool, int, int, int]:
    """What is cut first is the least: outer dims, then by small factors, then see cut_chunk."""
    dim, factor = option
    is_outer = dim < len(inner) - _MATRIX_DIMS
    is_large = factor > _SMALL_FACTOR
    if any(is_cut[-_MATRIX_DIMS:]):
        is_wanted = is_cut[dim] and counts[dim] < _FEW_PARTS
        return not is_outer, is_large, 0 if is_wanted else 1, dim, 0
    few = min(counts[dim], _FEW_PARTS)
    return not is_outer, is_large, few, -inner[dim], dim
