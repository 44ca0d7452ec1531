"""A grid follows from where main replicas lie and which share a rank, and from nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_ckpt_strategies.core.array import ArraySpec, DType
from dist_ckpt_strategies.core.chunk_grids import ChunkLayout, ShardPlacement
from dist_ckpt_strategies.core.region import Region
from dist_ckpt_strategies.errors import CoverageError
from dist_ckpt_strategies.sharded.plan_grids import ArrayGrid, ArrayGrids
from tests.support.boxes import NUM_RANKS, Split, splits, times_covered

some_splits = st.booleans().flatmap(lambda regular: splits(regular=regular))
cuttings = st.sampled_from(ChunkLayout)


def array_of(split: Split, key: str = "w", dtype: DType = DType.FLOAT32) -> ArraySpec:
    return ArraySpec(key, split.shape, dtype, (1,) * len(split.shape))


def placements_of(split: Split, ranks: list[int] | None = None) -> list[ShardPlacement]:
    numbers = ranks or list(range(NUM_RANKS))
    return sorted(ShardPlacement(box, numbers[rank]) for rank, box in split.main)


def fresh(split: Split, chunk_layout: ChunkLayout, ranks: list[int] | None = None) -> ArrayGrid:
    return ArrayGrids(chunk_layout).of(array_of(split), placements_of(split, ranks), ())


@given(some_splits, cuttings, st.permutations([7, 11, 300, 16_383]))
def test_who_the_ranks_are_makes_no_difference(
    split: Split, chunk_layout: ChunkLayout, ranks: list[int]
) -> None:
    assert fresh(split, chunk_layout, ranks) == fresh(split, chunk_layout)


@given(st.lists(some_splits, min_size=1, max_size=4), cuttings)
def test_grids_that_were_worked_out_before_change_nothing(
    cases: list[Split], chunk_layout: ChunkLayout
) -> None:
    shared = ArrayGrids(chunk_layout)
    for number, split in enumerate([*cases, *cases]):
        found = shared.of(array_of(split, f"w{number}"), placements_of(split), ())
        assert found == fresh(split, chunk_layout)


@given(some_splits, cuttings)
def test_the_parts_of_a_chunk_cover_it_and_lie_in_their_holdings(
    split: Split, chunk_layout: ChunkLayout
) -> None:
    placements = placements_of(split)
    for chunk in fresh(split, chunk_layout).chunks or ():
        boxes = [part for _, part in chunk.slices]
        assert (
            times_covered(split.shape, boxes) == times_covered(split.shape, [chunk.region])
        ).all()
        assert all(placements[number].region.contains(part) for number, part in chunk.slices)


def test_it_makes_a_difference_whether_parts_are_on_one_rank_or_on_two() -> None:
    bounds = [(0, 300), (300, 1000), (1000, 1600), (1600, 2000)]
    parts = [Region((low,), (high - low,)) for low, high in bounds]
    alone = Split((2000,), tuple((0, part) for part in parts))
    apart = Split((2000,), tuple((n // 2, part) for n, part in enumerate(parts)))
    grids = ArrayGrids(ChunkLayout.WHOLE)

    assert grids.of(array_of(alone), placements_of(alone), ()).chunk_shape == (2000,)
    assert grids.of(array_of(apart), placements_of(apart), ()).chunk_shape == (1000,)


def test_an_array_with_a_gap_is_refused_however_often_it_comes() -> None:
    holed = Split((4,), ((0, Region((0,), (1,))), (1, Region((2,), (2,)))))
    grids = ArrayGrids(ChunkLayout.WHOLE)
    for _ in range(2):
        with pytest.raises(CoverageError, match="first element not covered"):
            grids.of(array_of(holed), placements_of(holed), ())
