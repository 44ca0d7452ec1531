"""The chunk grid fits the shards where it can, and stays small where it cannot."""

from __future__ import annotations

import math
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from dist_ckpt_strategies.core.array import Region, Shape
from dist_ckpt_strategies.core.chunk_grids import (
    MAX_ASSEMBLED_NBYTES,
    MAX_OBJECT_NBYTES,
    ShardPlacement,
    irregular_chunk_shape,
    object_chunk_shape,
)
from tests.support.regions import Split, splits


def num_files(shape: Shape, chunk: Shape) -> int:
    return math.prod(-(-n // c) for n, c in zip(shape, chunk, strict=True))


def flat(bounds: list[int], owners: list[int]) -> list[ShardPlacement]:
    parts = [Region((a,), (b - a,)) for a, b in pairwise(bounds)]
    return [ShardPlacement(part, rank) for part, rank in zip(parts, owners, strict=True)]


@given(splits().filter(lambda split: split.main), st.sampled_from([1, 2, 4, 8]))
def test_an_irregular_grid_has_chunks_of_at_least_one_element_and_few_files(
    split: Split, itemsize: int
) -> None:
    placements = [ShardPlacement(region, rank) for rank, region in split.main]
    chunk = irregular_chunk_shape(split.shape, itemsize, placements)

    assert all(1 <= c <= n for c, n in zip(chunk, split.shape, strict=True))
    assert num_files(split.shape, chunk) <= 4 * len(placements) + 64


def test_a_flat_buffer_is_cut_where_its_owners_change() -> None:
    placements = flat([0, 300, 700, 1000, 1500, 2000, 2950], [0, 0, 0, 1, 1, 2])
    assert irregular_chunk_shape((2950,), 4, placements) == (1000,)


def test_a_large_chunk_is_cut_until_it_can_be_assembled() -> None:
    size = 3 * (MAX_ASSEMBLED_NBYTES // 4)
    (chunk,) = irregular_chunk_shape((size,), 4, flat([0, 5, size], [0, 1]))
    assert chunk * 4 <= MAX_ASSEMBLED_NBYTES
    assert num_files((size,), (chunk,)) <= 4


@given(st.lists(st.integers(1, 1 << 20), min_size=1, max_size=4), st.sampled_from([1, 2, 4, 16]))
def test_parts_of_a_chunk_fit_an_object_and_are_in_one_piece(
    chunk: list[int], itemsize: int
) -> None:
    found = object_chunk_shape(tuple(chunk), itemsize)

    assert math.prod(found) * itemsize <= MAX_OBJECT_NBYTES
    assert all(1 <= f <= c for f, c in zip(found, chunk, strict=True))
    cut = [dim for dim, (f, c) in enumerate(zip(found, chunk, strict=True)) if f < c]
    assert all(n == 1 for n in found[: max(cut, default=0)])
