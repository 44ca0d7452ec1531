"""Choose the chunk grid of a format 1 array from the shards that will fill it."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import product

from dist_ckpt_strategies.plan.coverage import Holding
from dist_ckpt_strategies.spec.region import Extent, Region

MAX_ASSEMBLED_NBYTES = 256 << 20
"""A chunk put together from pieces needs a buffer of its size on its writer."""

MAX_OBJECT_NBYTES = 64 << 20
"""What goes to an object store in one request, which is lost as a whole where it fails."""

FILE_COST_NBYTES = 256 << 10
"""One more file weighs as much as moving this many bytes between ranks."""

_MAX_CANDIDATES = 64
_MAX_MORE_PARTS = 16


def regular_chunk_shape(shape: Extent, regions: Sequence[Region]) -> Extent | None:
    """The chunk shape under which every region is exactly one chunk, or None.

    The last chunk of a dim may be cut short by the array's edge.
    """
    if not regions:
        return tuple(max(1, n) for n in shape)
    chunk = tuple(max(extents) for extents in zip(*(r.shape for r in regions), strict=True))
    for region in regions:
        for offset, extent, size, dim in zip(
            region.offset, region.shape, chunk, shape, strict=True
        ):
            if offset < 0 or offset % size or extent != min(size, dim - offset):
                return None
    return chunk


def fills_grid(shape: Extent, chunk: Extent, regions: Sequence[Region]) -> bool:
    """Whether regions that are each one chunk of a grid are all of its chunks, once each.

    The proof that shards make up an array, for the regular case: no box is compared with another.
    """
    indices = {tuple(o // c for o, c in zip(r.offset, chunk, strict=True)) for r in regions}
    num_chunks = math.prod(-(-n // c) for n, c in zip(shape, chunk, strict=True))
    return len(indices) == len(regions) == num_chunks


def irregular_chunk_shape(shape: Extent, itemsize: int, holdings: Sequence[Holding]) -> Extent:
    """A chunk shape for shards that lie on no regular grid: few files, little traffic.

    Tries, for each dim, the spacings at which the owner changes, and keeps the combination with
    the lowest cost, bytes moved between ranks plus FILE_COST_NBYTES for each file.

    Args:
        shape: of the array, in elements, none 0.
        itemsize: bytes of one element.
        holdings: main replicas, a partition of the array.
    """
    hulls = _hulls(holdings)
    per_dim = [_candidates(dim, shape[dim], hulls, holdings) for dim in range(len(shape))]
    max_files = 4 * len(holdings) + 64
    best: tuple[int, int, Extent] | None = None
    for number, chunk in enumerate(product(*per_dim)):
        bounded = _bounded(chunk, itemsize)
        num_files = math.prod(-(-n // c) for n, c in zip(shape, bounded, strict=True))
        if number >= _MAX_CANDIDATES or (best is not None and num_files > max_files):
            continue
        moved = _moved_elements(bounded, holdings) * itemsize
        cost = (moved + num_files * FILE_COST_NBYTES, num_files, bounded)
        best = cost if best is None else min(best, cost)
    assert best is not None  # noqa: S101 - each dim has a candidate
    return best[2]


def object_chunk_shape(chunk: Extent, itemsize: int, max_nbytes: int = MAX_OBJECT_NBYTES) -> Extent:
    """A chunk of a shard's shape, cut until it has ``max_nbytes`` at most.

    Outer dims first: the parts of a tensor in C order are in one piece then. Into equal parts
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


def _hulls(holdings: Sequence[Holding]) -> list[Region]:
    """For each rank the box around all it holds."""
    by_rank: dict[int, list[Region]] = defaultdict(list)
    for holding in holdings:
        by_rank[holding.rank].append(holding.region)
    hulls = []
    for regions in by_rank.values():
        low = tuple(map(min, zip(*(r.offset for r in regions), strict=True)))
        high = tuple(map(max, zip(*(r.end for r in regions), strict=True)))
        hulls.append(Region(low, tuple(h - lo for lo, h in zip(low, high, strict=True))))
    return hulls


def _candidates(
    dim: int, extent: int, hulls: Sequence[Region], holdings: Sequence[Holding]
) -> list[int]:
    """Chunk sizes worth trying along one dim, the coarsest first."""
    found = {max(h.shape[dim] for h in hulls)}
    for boxes in (hulls, [h.region for h in holdings]):
        edges = {box.offset[dim] for box in boxes} | {box.end[dim] for box in boxes}
        inner = edges - {0, extent}
        found.add(math.gcd(*inner) if inner else extent)
        found.add(-(-extent // (len(inner) + 1)))
    return sorted(found, reverse=True)


def _bounded(chunk: Extent, itemsize: int) -> Extent:
    """The chunk, cut evenly along its longest dim until it fits the assembly bound."""
    sizes = list(chunk)
    while math.prod(sizes) * itemsize > MAX_ASSEMBLED_NBYTES and max(sizes) > 1:
        dim = sizes.index(max(sizes))
        parts = min(-(-math.prod(sizes) * itemsize // MAX_ASSEMBLED_NBYTES), sizes[dim])
        even = next((p for p in range(parts, min(4 * parts, sizes[dim])) if sizes[dim] % p == 0), 0)
        sizes[dim] = -(-sizes[dim] // (even or parts))
    return tuple(sizes)


def _moved_elements(chunk: Extent, holdings: Sequence[Holding]) -> int:
    """Elements that leave their rank when the largest holder of each chunk writes it."""
    held: dict[Extent, Counter[int]] = defaultdict(Counter)
    for holding in holdings:
        for index, part in chunk_parts(chunk, holding.region):
            held[index][holding.rank] += part.numel
    return sum(count.total() - max(count.values()) for count in held.values())


def chunk_parts(chunk: Extent, region: Region) -> list[tuple[Extent, Region]]:
    """The region cut along the chunk grid: each chunk index it touches, with the common box."""
    if region.numel == 0:
        return []
    spans = (
        range(a // c, (e - 1) // c + 1)
        for a, e, c in zip(region.offset, region.end, chunk, strict=True)
    )
    parts = []
    for index in product(*spans):
        box = Region(tuple(i * c for i, c in zip(index, chunk, strict=True)), chunk)
        common = box.intersect(region)
        assert common is not None  # noqa: S101 - the index was computed from the region
        parts.append((index, common))
    return parts
