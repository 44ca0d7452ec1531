"""Plans: who holds copies for whom, which saves are kept, who sends what, and new layouts."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from dist_ckpt_strategies.core.array import DType, Region, ShardId, ShardSpec
from dist_ckpt_strategies.errors import (
    CheckpointError,
    CoverageError,
    NoReplicasAvailableError,
    PlanError,
    ShapeMismatchError,
)
from dist_ckpt_strategies.local.plan import (
    Completeness,
    build_cliques,
    build_exchange_plan,
    build_reshard_plan,
    build_retention,
    group_saves,
)
from dist_ckpt_strategies.local.shard_format import LocalShardId, SaveId
from tests.support.boxes import Split, regions_in, spec_of, splits, times_covered

ROWS = 12
A, B, C = SaveId(10, "a"), SaveId(20, "b"), SaveId(30, "c")

WORLDS = st.integers(1, 8).flatmap(
    lambda size: st.tuples(
        st.lists(st.sets(st.integers(0, size - 1)), min_size=size, max_size=size),
        st.permutations(range(size)),
    )
)


@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 4))
def test_even_cliques_are_those_of_the_formula(jump: int, factor: int, blocks: int) -> None:
    world_size = jump * factor * blocks
    formula = {
        tuple(a * jump * factor + b + copy * jump for copy in range(factor))
        for a in range(blocks)
        for b in range(jump)
    }

    assert set(build_cliques(world_size, jump, factor)) == formula


def test_twenty_ranks_on_nodes_of_eight_as_the_page_works_out() -> None:
    with pytest.raises(PlanError, match=r"20 is not divisible by .* = 16"):
        build_cliques(20, 8, 2)

    assert build_cliques(20, 8, 2, allow_uneven=True) == (
        (0, 8), (1, 9), (2, 10), (3, 11), (4, 12, 16), (5, 13, 17), (6, 14, 18), (7, 15, 19),
    )  # fmt: skip


@given(st.integers(1, 60), st.integers(1, 9), st.integers(1, 4))
def test_uneven_cliques_hold_every_rank_once_and_are_large_enough(
    world_size: int, jump: int, factor: int
) -> None:
    assume(world_size >= jump * factor)
    cliques = build_cliques(world_size, jump, factor, allow_uneven=True)

    assert sorted(rank for clique in cliques for rank in clique) == list(range(world_size))
    for clique in cliques:
        assert len({rank // jump for rank in clique}) == len(clique) >= factor


def test_too_few_nodes_is_an_error() -> None:
    with pytest.raises(PlanError, match=r"3 copies .* nodes of 8 .* makes 2"):
        build_cliques(16, 8, 3, allow_uneven=True)


@pytest.mark.parametrize("numbers", [(0, 1, 1), (4, 0, 2), (4, 1, 0), (4, -1, 2)])
def test_numbers_below_one_are_refused(numbers: tuple[int, int, int]) -> None:
    with pytest.raises(PlanError, match="expected 1 or more"):
        build_cliques(*numbers)


D, E = SaveId(20, "d"), SaveId(10, "b")


@pytest.mark.parametrize(
    ("saves", "newest", "number", "kept"),
    [
        ([A, B, C], C, 1, {C}),
        ([A, B, C], C, 2, {B, C}),
        ([A, B, C], C, 9, {A, B, C}),
        ([A, C], C, 2, {A, C}),  # an incomplete save takes no place
        ([A, B, C, D], D, 3, {A, D}),  # of a run that went back
        ([A, E, C], C, 2, {E, C}),  # of two saves of one iteration the later
    ],
)
def test_the_newest_is_kept_and_as_many_before_it_as_asked_for(
    saves: list[SaveId], newest: SaveId, number: int, kept: set[SaveId]
) -> None:
    assert build_retention(saves, newest, number) == kept


@given(WORLDS)
def test_every_rank_gets_what_some_rank_has(world: tuple[list[set[int]], list[int]]) -> None:
    held, wishes = world
    available = {rank: [str(shard) for shard in shards] for rank, shards in enumerate(held)}
    wanted = {rank: [str(wish)] for rank, wish in enumerate(wishes)}
    there = set().union(*held)
    if set(wishes) - there:
        with pytest.raises(NoReplicasAvailableError, match="no rank has a copy"):
            build_exchange_plan(available, wanted)
        return
    plan = build_exchange_plan(available, wanted)

    assert {(t.receiver, t.id_) for t in plan.entries} == {(r, w[0]) for r, w in wanted.items()}
    for transfer in plan.entries:
        assert transfer.id_ in available[transfer.sender]
        if transfer.id_ in available[transfer.receiver]:
            assert transfer.sender == transfer.receiver


def test_holders_share_the_load() -> None:
    available = {0: ["a", "b", "c", "d"], 1: ["a", "b", "c", "d"], 2: [], 3: [], 4: [], 5: []}
    plan = build_exchange_plan(available, {2: ["a"], 3: ["b"], 4: ["c"], 5: ["d"]})

    assert Counter(t.sender for t in plan.entries) == {0: 2, 1: 2}


def test_a_plan_says_what_a_rank_has_to_have() -> None:
    plan = build_exchange_plan({4: ["a"], 6: []}, {6: ["a"]}, 4)

    assert plan.required_ids() == plan.required_ids(4) == {"a"}
    assert plan.required_ids(6) == set()
    assert plan == build_exchange_plan({4: ["a"], 6: []}, {6: ["a"]}, 6)


def test_saves_are_told_apart_by_id_and_world_and_the_newest_is_the_first() -> None:
    first, second, new = SaveId(5, "a"), SaveId(5, "b"), SaveId(9, "c")
    found = [
        (LocalShardId(first, 0), 2),
        (LocalShardId(second, 1), 2),
        (LocalShardId(second, 0), 2),
        (LocalShardId(first, 1), 3),
        (LocalShardId(new, 1), 2),
        (LocalShardId(new, 1), 2),
    ]

    assert group_saves(found) == (
        Completeness(new, 2, (0,)),
        Completeness(second, 2, ()),
        Completeness(first, 3, (0, 2)),
        Completeness(first, 2, (1,)),
    )


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


@pytest.mark.parametrize(
    ("held", "wanted", "error", "words"),
    [
        (spec(0, 6), spec(0, 12), CoverageError, r"w: rank 1 wants .* hold 18 of them"),
        (spec(0, 12), spec(0, 12, key="x"), CoverageError, "x: rank 1 wants"),
        (
            spec(0, 12),
            spec(0, 16, rows=16),
            ShapeMismatchError,
            r"shape \(12, 3\) .* \(16, 3\) requested",
        ),
    ],
)
def test_what_no_rank_can_have_is_named_with_rank_and_key(
    held: ShardSpec, wanted: ShardSpec, error: type[CheckpointError], words: str
) -> None:
    with pytest.raises(error, match=words) as info:
        build_reshard_plan([[held], []], [[], [wanted]])
    assert info.value.key == wanted.id.key
