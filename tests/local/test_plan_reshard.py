"""Wanted shards are made up of held ones, exactly, and from the rank itself where it can be."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_ckpt_strategies.core.array import DType, Region, ShardId, ShardSpec
from dist_ckpt_strategies.errors import CoverageError, ShapeMismatchError
from dist_ckpt_strategies.local.plan import build_reshard_plan
from tests.support.boxes import Split, regions_in, spec_of, splits, times_covered

ROWS = 12


def spec(start: int, stop: int, key: str = "w", rows: int = ROWS) -> ShardSpec:
    region = Region((start, 0), (stop - start, 3))
    return ShardSpec(ShardId(key, region), (rows, 3), DType.INT16)


def cut(num_shards: int) -> list[ShardSpec]:
    bounds = [ROWS * n // num_shards for n in range(num_shards + 1)]
    return [spec(a, b) for a, b in itertools.pairwise(bounds)]


@given(
    st.sampled_from([1, 2, 3, 4, 6, 12]), st.sampled_from([1, 2, 3, 5, 12]),
    st.integers(1, 4),
)  # fmt: skip
def test_any_layout_is_made_from_any_other(old: int, new: int, size: int) -> None:
    held = [cut(old)[rank::size] for rank in range(size)]
    wanted = [[cut(new)[rank % new]] for rank in range(size)]
    plan = build_reshard_plan(held, wanted)
    slices = list(plan)

    for rank, (want,) in enumerate(wanted):
        rows = sorted(
            row
            for one in slices
            if one.receiver == rank
            for row in range(one.region.offset[0], one.region.end[0])
        )
        assert rows == list(range(want.region.offset[0], want.region.end[0]))
    for one in slices:
        assert one.source in [spec.id for spec in held[one.sender]]
        if any(spec.id == one.source for spec in held[one.receiver]):
            assert one.sender == one.receiver


@given(splits().filter(lambda split: split.main), st.data())
def test_every_wanted_box_is_covered_once_by_parts_of_what_is_held(
    split: Split, data: st.DataObject
) -> None:
    held = [request.shards for request in split.requests()]
    box = data.draw(regions_in(split.shape))
    wanted: list[list[ShardSpec]] = [[], [spec_of(box, split.shape)], [], []]

    plan = build_reshard_plan(held, wanted)

    slices = list(plan)
    found = times_covered(split.shape, [one.region for one in slices])
    assert (found == times_covered(split.shape, [box])).all()


def test_replicas_share_the_sending() -> None:
    plan = build_reshard_plan([cut(2), cut(2), [], []], [[], [], cut(2), cut(2)])

    senders = [one.sender for one in plan]
    assert sorted(senders) == [0, 0, 1, 1]


def test_a_gap_is_named_with_rank_and_key() -> None:
    with pytest.raises(CoverageError, match=r"w: rank 1 wants .* hold 18 of them") as info:
        build_reshard_plan([[spec(0, 6)], []], [[], [spec(0, 12)]])
    assert info.value.key == "w"


def test_an_unknown_array_is_named() -> None:
    with pytest.raises(CoverageError, match="x: rank 0 wants"):
        build_reshard_plan([[spec(0, 12)]], [[spec(0, 12, key="x")]])


def test_another_shape_is_refused() -> None:
    with pytest.raises(ShapeMismatchError, match=r"shape \(12, 3\) .* \(16, 3\) requested"):
        build_reshard_plan([[spec(0, 12)]], [[spec(0, 16, rows=16)]])
