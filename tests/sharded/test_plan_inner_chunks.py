"""Plans whose chunks are made of inner chunks: one writer per file, whatever the sizes."""

from __future__ import annotations

import math
from bisect import bisect_right

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_ckpt_strategies.core.array import ArraySpec, DType, Region
from dist_ckpt_strategies.core.chunk_grids import MAX_NBYTES, MAX_OBJECT_NBYTES, ChunkLayout
from dist_ckpt_strategies.core.inner_grid import InnerGrid
from dist_ckpt_strategies.sharded.plan import SavePlan, build_manifest_plan, build_save_plan
from tests.support.boxes import Split, splits, times_covered

some_splits = st.booleans().flatmap(lambda regular: splits(regular=regular))


def planned(
    split: Split, chunk_layout: ChunkLayout = ChunkLayout.INNER
) -> tuple[ArraySpec, SavePlan]:
    plan = build_save_plan(split.requests(num_ranks=8), chunk_layout=chunk_layout)
    return plan.creations[0].array, plan


def require_one_writer_per_file(split: Split, array: ArraySpec, plan: SavePlan) -> None:
    touched = [list(write.region.cells(array.chunk_shape)) for write in plan.writes]
    assert [len(indices) for indices in touched] == [1] * array.num_chunks
    assert {tuple(*indices) for indices in touched} == set(array.chunk_indices())
    for write, (index,) in zip(plan.writes, touched, strict=True):
        assert InnerGrid.of(array, index).region == write.region
        assert sum(shard_slice.region.numel for shard_slice in write.slices) == write.region.numel
    assert array.inner_shape is not None
    divides = zip(array.chunk_shape, array.inner_shape, strict=True)
    assert all(chunk % inner == 0 for chunk, inner in divides)
    assert math.prod(array.inner_shape) * array.dtype.itemsize <= MAX_NBYTES


@given(some_splits)
def test_every_file_has_one_writer_and_whole_inner_chunks(split: Split) -> None:
    array, plan = planned(split)

    require_one_writer_per_file(split, array, plan)
    assert (times_covered(split.shape, [write.region for write in plan.writes]) == 1).all()


def rows_of(sizes: list[int], *others: int) -> Split:
    """An array cut along its first dim; the n-th part is on rank n."""
    starts = [sum(sizes[:n]) for n in range(len(sizes))]
    zeros = (0,) * len(others)
    parts = [Region((a, *zeros), (n, *others)) for a, n in zip(starts, sizes, strict=True)]
    return Split((sum(sizes), *others), tuple(enumerate(parts)))


@pytest.mark.parametrize(
    ("split", "max_moved"),
    [
        pytest.param(rows_of([15_485_863] * 4), 0.02, id="primes in one dim"),
        pytest.param(rows_of([25_129] * 2, 4096), 0.0, id="a vocabulary of an odd size"),
        pytest.param(rows_of([50_257], 1024), 0.0, id="a whole vocabulary of a prime size"),
        pytest.param(rows_of([1009] * 4, 8, 1009), 0.0, id="primes around a small dim"),
        pytest.param(rows_of([7919] * 3, 7919), 0.0, id="one dim may be cut anywhere"),
        pytest.param(rows_of([9_000_000, 12_345_677, 77]), 0.2, id="parts of any size"),
        pytest.param(rows_of([4096] * 8, 4096), 0.0, id="powers of two"),
    ],
)
def test_odd_sizes_move_little_and_only_where_nothing_divides(
    split: Split, max_moved: float
) -> None:
    array, plan = planned(split)

    require_one_writer_per_file(split, array, plan)
    moved = sum(w.nbytes_of(m) for w in plan.writes for m in w.moves)
    assert moved <= max_moved * array.nbytes


@given(
    st.lists(st.text(max_size=4), min_size=1, max_size=30), st.integers(1, 9), st.integers(1, 4000)
)
def test_every_key_is_listed_in_one_part_and_parts_have_owners(
    keys: list[str], num_ranks: int, max_nbytes: int
) -> None:
    arrays = [ArraySpec(key, (4, 4), DType.INT8, (2, 2), inner_shape=(2, 2)) for key in keys]

    plan = build_manifest_plan(arrays, keys, num_ranks, max_nbytes)

    assert list(plan.firsts) == sorted(set(plan.firsts))
    assert 1 <= len(plan.firsts) == len(plan.owners) <= num_ranks
    assert all(0 <= owner < num_ranks for owner in plan.owners)
    assert len(set(plan.owners)) == len(plan.owners)
    for key in keys:
        number = bisect_right(plan.firsts, key) - 1
        assert plan.firsts[number] <= key
        assert number + 1 == len(plan.firsts) or key < plan.firsts[number + 1]


def test_a_shard_above_the_size_of_an_object_becomes_several_that_its_holder_writes() -> None:
    rows = 3 * MAX_OBJECT_NBYTES >> 20
    regions = [Region((n * rows, 0), (rows, 1 << 18)) for n in range(2)]
    split = Split((2 * rows, 1 << 18), tuple(enumerate(regions)))

    array, plan = planned(split, ChunkLayout.BOUNDED)

    assert len(plan.writes) == array.num_chunks == 6
    assert array.chunk_nbytes <= MAX_OBJECT_NBYTES
    assert not any(write.moves for write in plan.writes)
    assert all(write.is_whole_shard for write in plan.writes)
    assert [write.writer for write in plan.writes] == [0, 0, 0, 1, 1, 1]
    whole, _ = planned(split, ChunkLayout.INNER)
    assert whole.num_chunks == 2


@given(splits(regular=False))
def test_bounded_plans_of_small_arrays_are_those_of_files(split: Split) -> None:
    assert planned(split, ChunkLayout.BOUNDED) == planned(split, ChunkLayout.INNER)
