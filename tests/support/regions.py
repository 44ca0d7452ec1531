"""Hypothesis strategies for arrays cut into regions that ranks hold."""

import math
from collections import defaultdict
from dataclasses import dataclass
from itertools import product

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from dist_ckpt_strategies.core.array import DType, Region, Shape, ShardId, ShardSpec

NUM_RANKS = 4


@dataclass(frozen=True)
class Split:
    """An array, and which rank holds which region of it."""

    shape: Shape  # of the array, in elements
    # rank and region of each main replica; together they are the array.
    main: tuple[tuple[int, Region], ...]
    # rank and region of further replicas and of empty shards.
    copies: tuple[tuple[int, Region], ...] = ()

    def held(self, num_ranks: int = NUM_RANKS) -> list[tuple[ShardSpec, ...]]:
        """What each rank brings to a save."""
        held: dict[int, list[ShardSpec]] = defaultdict(list)
        for regions, is_main in ((self.main, True), (self.copies, False)):
            for rank, region in regions:
                held[rank].append(spec_of(region, self.shape, is_main=is_main))
        return [tuple(held[rank]) for rank in range(num_ranks)]


def spec_of(region: Region, shape: Shape, *, key: str = "w", is_main: bool = True) -> ShardSpec:
    """A shard's description in one line."""
    return ShardSpec(ShardId(key, region), shape, DType.FLOAT32, is_main, may_mismatch=False)


def shapes(max_ndim: int = 4, max_size: int = 12) -> st.SearchStrategy[Shape]:
    """Shapes of arrays, scalars and zero-size dims among them."""
    return st.lists(st.integers(0, max_size), max_size=max_ndim).map(tuple)


@st.composite
def regions_in(draw: st.DrawFn, shape: Shape) -> Region:
    """A region inside an array, now and then an empty one."""
    offset, length = [], []
    for size in shape:
        start = draw(st.integers(0, size))
        offset.append(start)
        length.append(draw(st.integers(0, size - start)))
    return Region(tuple(offset), tuple(length))


@st.composite
def irregular_regions(draw: st.DrawFn, shape: Shape) -> list[Region]:
    """The array cut at random, again and again."""
    regions = [Region.whole(shape)] if math.prod(shape) else []
    for _ in range(draw(st.integers(0, 7)) if regions else 0):
        region = regions.pop(draw(st.integers(0, len(regions) - 1)))
        dims = [dim for dim, size in enumerate(region.shape) if size > 1]
        if not dims:
            regions.append(region)
            continue
        dim = draw(st.sampled_from(dims))
        regions.extend(cut(region, dim, draw(st.integers(1, region.shape[dim] - 1))))
    return regions


@st.composite
def grid_regions(draw: st.DrawFn, shape: Shape) -> list[Region]:
    """The chunks of a regular grid, the last of a dim cut short."""
    chunk = [draw(st.integers(max(1, -(-size // 4)), max(1, size))) for size in shape]
    spans = [range(0, size, step) for size, step in zip(shape, chunk, strict=True)]
    corners = product(*spans) if math.prod(shape) else ()
    return [
        Region(
            corner,
            tuple(min(c, n - at) for at, c, n in zip(corner, chunk, shape, strict=True)),
        )
        for corner in corners
    ]


@st.composite
def splits(draw: st.DrawFn, *, regular: bool = False) -> Split:
    """An array whose main replicas are spread over the ranks, with copies and empty shards."""
    shape = draw(shapes())
    regions = draw(grid_regions(shape) if regular else irregular_regions(shape))
    ranks = st.integers(0, NUM_RANKS - 1)
    main = tuple((draw(ranks), region) for region in regions)
    copied = draw(st.lists(st.sampled_from(regions), max_size=3)) if regions else []
    empty = Region((0,) * len(shape), (0,) * len(shape))
    copies = [(draw(ranks), region) for region in copied]
    if shape and (not regions or draw(st.booleans())):
        copies.append((draw(ranks), empty))
    return Split(shape, main, tuple(copies))


def cut(region: Region, dim: int, at: int) -> tuple[Region, Region]:
    """The region as two, the first ``at`` elements long along ``dim``."""
    first = (*region.shape[:dim], at, *region.shape[dim + 1 :])
    rest = (*region.shape[:dim], region.shape[dim] - at, *region.shape[dim + 1 :])
    offset = (*region.offset[:dim], region.offset[dim] + at, *region.offset[dim + 1 :])
    return Region(region.offset, first), Region(offset, rest)


def times_covered(shape: Shape, regions: list[Region]) -> npt.NDArray[np.int_]:
    """How many of the regions hold each element, counted one by one."""
    count = np.zeros(shape, np.int_)
    for region in regions:
        count[region.slices()] += 1
    return count
