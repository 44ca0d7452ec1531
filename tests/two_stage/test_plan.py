"""What several ranks request is read once, evenly, and goes to those that request it."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_ckpt_strategies.core.array import ArraySpec, DType, Region
from dist_ckpt_strategies.formats.pack import RANGE_NBYTES
from dist_ckpt_strategies.two_stage.plan import Batch, GroupPlan, build_group_plan, encode_regions
from tests.support.regions import regions_in

BUDGET = 512 << 20

Want = tuple[int, Region]
Case = tuple[list[ArraySpec], list[list[Want]]]


@st.composite
def some_arrays(draw: st.DrawFn) -> list[ArraySpec]:
    """A few arrays, from a scalar to megabytes, raw or not."""
    arrays = []
    for number in range(draw(st.integers(1, 6))):
        shape = draw(st.lists(st.sampled_from([1, 2, 3, 7, 64, 1000]), max_size=3).map(tuple))
        chunk = tuple(draw(st.integers(1, length)) for length in shape)
        dtype = draw(st.sampled_from([DType.FLOAT32, DType.BFLOAT16, DType.BOOL]))
        arrays.append(ArraySpec(f"a{number}", shape, dtype, chunk, is_raw=draw(st.booleans())))
    return arrays


@st.composite
def some_wants(draw: st.DrawFn) -> Case:
    """Regions of the arrays, equal, overlapping or not, requested by any of several ranks."""
    arrays = draw(some_arrays())
    regions = []
    for _ in range(draw(st.integers(0, 8))):
        number = draw(st.integers(0, len(arrays) - 1))
        region = draw(regions_in(arrays[number].shape).filter(lambda region: region.numel))
        regions.append((number, region))
    ranks = range(draw(st.integers(1, 8)))
    some = st.lists(st.sampled_from(regions), max_size=6) if regions else st.just([])
    return arrays, [draw(some) for _ in ranks]


def gpt(num_ranks: int) -> Case:
    """Every rank requests all of a model: many small vectors, some matrices, a large embedding."""
    # Norm, QKV and both of the MLP.
    layer: list[tuple[int, ...]] = [(1024,), (3072, 1024), (4096, 1024), (1024, 4096)]
    shapes = enumerate([(32_000, 1024), *layer * 24])
    arrays = [ArraySpec(f"w{number}", shape, DType.FLOAT32, shape) for number, shape in shapes]
    return everywhere(arrays, num_ranks)


def everywhere(arrays: list[ArraySpec], num_ranks: int) -> Case:
    regions = [(number, Region.whole(array.shape)) for number, array in enumerate(arrays)]
    return arrays, [list(regions) for _ in range(num_ranks)]


def planned(
    case: Case, *, caches: Sequence[str | None] | None = None, max_inflight_bytes: int = BUDGET
) -> GroupPlan:
    arrays, wants = case
    return build_group_plan(
        [encode_regions(regions) for regions in wants],
        arrays,
        caches or [None] * len(wants),
        max_inflight_bytes=max_inflight_bytes,
    )


def batches_of(plan: GroupPlan) -> list[Batch]:
    return [batch for batches in plan.rounds for batch in batches]


@given(some_wants(), st.lists(st.sampled_from(["a", "b", None]), min_size=8, max_size=8))
def test_ranks_that_share_the_readers_page_cache_receive_nothing(
    case: Case, hosts: list[str | None]
) -> None:
    caches = hosts[: len(case[1])]
    plan = planned(case, caches=caches)
    for batch in batches_of(plan):
        others = [rank for rank in batch.requesters if rank != batch.reader]
        cache = caches[batch.reader]
        assert plan.receivers(batch) == [r for r in others if cache is None or caches[r] != cache]


@pytest.mark.parametrize("num_ranks", [3, 64])
def test_all_ranks_read_about_the_same_and_rounds_bound_their_memory(num_ranks: int) -> None:
    arrays, wants = gpt(num_ranks)
    for budget in (1 << 20, 64 << 20, BUDGET):
        plan = planned((arrays, wants), max_inflight_bytes=budget)
        read = [0] * num_ranks
        for batch in batches_of(plan):
            for each in batch.slices:
                read[batch.reader] += _ranges_nbytes(arrays[each.array], each.region)
        largest = max(batch.nbytes for batch in batches_of(plan))

        assert sum(read) <= 1.02 * sum(array.nbytes for array in arrays)
        assert max(read) <= 1.1 * sum(read) / num_ranks
        for batches in plan.rounds:
            assert sum(batch.nbytes for batch in batches) <= max(budget // 3, largest)


def _ranges_nbytes(array: ArraySpec, region: Region) -> int:
    """Bytes that are read of an array that is one block of a pack, for some of its rows."""
    row_nbytes = array.nbytes // array.shape[0]
    first, stop = region.offset[0] * row_nbytes, region.end[0] * row_nbytes
    whole = -(-stop // RANGE_NBYTES) * RANGE_NBYTES - first // RANGE_NBYTES * RANGE_NBYTES
    return min(whole, array.nbytes - first // RANGE_NBYTES * RANGE_NBYTES)


def test_compressed_chunks_are_cut_only_where_they_begin() -> None:
    array = ArraySpec("w", (4096, 4096), DType.FLOAT32, (512, 4096), is_raw=False)
    plan = planned(everywhere([array], 4))
    offsets = sorted(each.region.offset for batch in batches_of(plan) for each in batch.slices)

    assert offsets == [(row, 0) for row in range(0, 4096, 512)]
