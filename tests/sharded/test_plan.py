"""A save plan writes every element once, whichever ranks hold it, within its bounds."""

import math
import random
from bisect import bisect_right
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_ckpt_strategies.core.array import ArraySpec, DType, RankShards, Region
from dist_ckpt_strategies.core.chunk_grids import (
    MAX_ASSEMBLED_NBYTES,
    MAX_NBYTES,
    MAX_OBJECT_NBYTES,
    ChunkLayout,
)
from dist_ckpt_strategies.errors import CoverageError, DuplicateWriterError
from dist_ckpt_strategies.sharded.plan import SavePlan, build_manifest_plan, build_save_plan
from tests.support.regions import NUM_RANKS, Split, merged, regions_in, splits, times_covered

some_splits = st.booleans().flatmap(lambda regular: splits(regular=regular))


def requests_of(cases: list[Split]) -> list[RankShards]:
    return merged(*(split.requests(key=f"w{n}") for n, split in enumerate(cases)))


@given(some_splits, st.sampled_from(ChunkLayout))
def test_each_chunk_is_written_once_from_slices_of_the_shards_of_their_holders(
    split: Split, chunk_layout: ChunkLayout
) -> None:
    plan = build_save_plan(split.requests(), chunk_layout=chunk_layout)
    (creation,) = plan.creations

    assert (times_covered(split.shape, [write.region for write in plan.writes]) == 1).all()
    require_one_writer_per_chunk(creation.array, plan)
    assert len(plan.writes) <= 4 * len(split.main) + 64
    main = set(split.main)
    for write in plan.writes:
        slices = [shard_slice.region for shard_slice in write.slices]
        expected = times_covered(split.shape, [write.region])
        assert (times_covered(split.shape, slices) == expected).all()
        for shard_slice in write.slices:
            assert (shard_slice.holder, shard_slice.shard.region) in main
            assert shard_slice.shard.region.contains(shard_slice.region)


def require_one_writer_per_chunk(array: ArraySpec, plan: SavePlan) -> None:
    """Each file has one writer; inner chunks divide it, are small, and reach little too far."""
    touched = [list(write.region.cells(array.chunk_shape)) for write in plan.writes]
    assert [len(indices) for indices in touched] == [1] * array.num_chunks
    assert {tuple(*indices) for indices in touched} == set(array.chunk_indices())
    for write in plan.writes:
        assert sum(shard_slice.region.numel for shard_slice in write.slices) == write.region.numel
    if array.inner_shape is not None:
        for length, chunk, inner in zip(
            array.shape, array.chunk_shape, array.inner_shape, strict=True
        ):
            assert chunk % inner == 0
            assert chunk < max(1, length) + inner
        assert math.prod(array.inner_shape) * array.dtype.itemsize <= MAX_NBYTES


@given(splits(regular=True))
def test_nothing_moves_where_the_shards_lie_on_a_regular_grid(split: Split) -> None:
    plan = build_save_plan(split.requests())

    assert not any(write.moves for write in plan.writes)
    assert plan.rounds == ()
    assert all(write.is_whole_shard for write in plan.writes)
    writers = {write.region: write.writer for write in plan.writes}
    assert writers == {region: rank for rank, region in split.main}


@given(st.integers(1, 4), st.integers(1, 400), st.integers(0, 100), st.data())
def test_nothing_moves_where_a_flat_buffer_is_cut_at_rank_boundaries(
    num_ranks: int, per_rank: int, padding: int, data: st.DataObject
) -> None:
    # As Megatron's dp_reshardable: equal parts of a padded buffer, several parameters in each
    # rank's part, and the padding at the end of the last part not stored.
    size = num_ranks * per_rank - min(padding, per_rank - 1)
    ends = {min(rank * per_rank, size) for rank in range(num_ranks + 1)}
    inner = data.draw(st.sets(st.integers(1, size), max_size=8))
    bounds = sorted(ends | inner | {size})
    parts = [(a // per_rank, Region((a,), (b - a,))) for a, b in pairwise(bounds)]
    plan = build_save_plan(Split((size,), tuple(parts)).requests())

    assert not any(write.moves for write in plan.writes)
    assert len(plan.writes) <= max(num_ranks, len(bounds) - 1)


@given(st.lists(some_splits, min_size=1, max_size=3), st.randoms(use_true_random=False))
def test_every_rank_makes_the_same_plan_in_whatever_order_it_learns_the_facts(
    cases: list[Split], order: random.Random
) -> None:
    requests = requests_of(cases)
    shuffled = [RankShards(r.rank, tuple(order.sample(r.shards, len(r.shards)))) for r in requests]
    order.shuffle(shuffled)

    assert build_save_plan(shuffled) == build_save_plan(requests)
    assert hash(build_save_plan(shuffled)) == hash(build_save_plan(requests))


@given(st.lists(splits(), min_size=1, max_size=3), st.integers(1, 5000))
def test_a_round_stays_in_each_ranks_budget_unless_one_chunk_alone_is_larger(
    cases: list[Split], budget: int
) -> None:
    for round_ in build_save_plan(requests_of(cases), max_inflight_bytes=budget).rounds:
        needed, num_chunks = Counter[int](), Counter[int]()
        for write in round_:
            of_chunk = Counter({write.writer: write.nbytes})
            for move in write.moves:
                of_chunk.update({write.writer: write.nbytes_of(move)})
                of_chunk.update({move.holder: write.nbytes_of(move)})
            needed += of_chunk
            num_chunks.update(of_chunk.keys())
        assert all(needed[rank] <= budget or num_chunks[rank] == 1 for rank in needed)


@given(st.lists(splits(regular=False), min_size=1, max_size=4), st.integers(1, 3000))
def test_no_rank_goes_back_to_an_earlier_round(cases: list[Split], budget: int) -> None:
    plan = build_save_plan(requests_of(cases), max_inflight_bytes=budget)
    number_of = {write: n for n, round_ in enumerate(plan.rounds) for write in round_}
    last: Counter[int] = Counter()

    for write in plan.writes:
        if not write.is_whole_shard:
            for rank in {write.writer, *(move.holder for move in write.moves)}:
                assert number_of[write] >= last[rank]
                last[rank] = number_of[write]


@given(some_splits.filter(lambda split: split.main), st.data())
def test_a_gap_is_always_refused_naming_the_key(split: Split, data: st.DataObject) -> None:
    lost = data.draw(st.integers(0, len(split.main) - 1))
    main = split.main[:lost] + split.main[lost + 1 :]
    holed = Split(split.shape, main, (*split.copies, split.main[lost]))

    with pytest.raises(CoverageError, match=r"^layer\.w: ") as caught:
        build_save_plan(holed.requests(key="layer.w"))

    assert caught.value.key == "layer.w"


@given(some_splits.filter(lambda split: split.main), st.data())
def test_an_overlap_is_always_refused_naming_the_key_and_ranks(
    split: Split, data: st.DataObject
) -> None:
    region = data.draw(regions_in(split.shape).filter(lambda region: region.numel))
    rank = data.draw(st.integers(0, NUM_RANKS - 1))
    doubled = Split(split.shape, (*split.main, (rank, region)), split.copies)

    with pytest.raises(DuplicateWriterError, match=r"^layer\.w: ") as caught:
        build_save_plan(doubled.requests(key="layer.w"))

    owners = {owner for owner, held in split.main if held.intersect(region)}
    assert f"rank {rank}" in str(caught.value)
    assert any(f"rank {owner}" in str(caught.value) for owner in owners)


@given(some_splits, st.sampled_from(ChunkLayout), st.permutations([7, 11, 300, 16_383]))
def test_the_grid_does_not_depend_on_the_numbers_of_the_ranks(
    split: Split, chunk_layout: ChunkLayout, ranks: list[int]
) -> None:
    requests = split.requests()
    renamed = [RankShards(ranks[request.rank], request.shards) for request in requests]
    arrays = [build_save_plan(r, chunk_layout=chunk_layout).arrays for r in (requests, renamed)]

    assert arrays[0] == arrays[1]


def rows_of(sizes: list[int], *others: int) -> Split:
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
    plan = build_save_plan(split.requests(num_ranks=8), chunk_layout=ChunkLayout.INNER)
    array = plan.creations[0].array

    require_one_writer_per_chunk(array, plan)
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
    assert 1 <= len(plan.firsts) == len(set(plan.owners)) == len(plan.owners)
    assert set(plan.owners) <= set(range(num_ranks))
    for key in keys:
        number = bisect_right(plan.firsts, key) - 1
        assert plan.firsts[number] <= key
        assert number + 1 == len(plan.firsts) or key < plan.firsts[number + 1]


def test_a_chunk_that_is_assembled_of_slices_is_not_too_large_for_it() -> None:
    split = rows_of([5, 3 * (MAX_ASSEMBLED_NBYTES // 4)])

    (array,) = build_save_plan(split.requests()).arrays

    assert array.chunk_nbytes <= MAX_ASSEMBLED_NBYTES
    assert array.num_chunks <= 4


@pytest.mark.parametrize(("shard", "num_parts"), [((192, 1 << 18), 3), ((3, 5000, 14_336), 15)])
def test_a_shard_above_the_size_of_an_object_becomes_several_that_its_holder_writes(
    shard: tuple[int, ...], num_parts: int
) -> None:
    split = rows_of([shard[0]] * 2, *shard[1:])

    plan = build_save_plan(split.requests(), chunk_layout=ChunkLayout.BOUNDED)
    array = plan.creations[0].array

    assert len(plan.writes) == array.num_chunks == 2 * num_parts
    assert array.chunk_nbytes <= MAX_OBJECT_NBYTES
    assert array.chunk_shape[-1] == array.shape[-1]  # a part is one segment of memory
    assert not any(write.moves for write in plan.writes)
    assert all(write.is_whole_shard for write in plan.writes)
    assert [write.writer for write in plan.writes] == [0] * num_parts + [1] * num_parts
