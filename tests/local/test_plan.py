"""Plans: who holds copies for whom, who sends what, and new layouts."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_ckpt_strategies.core.array import Region, ShardSpec
from dist_ckpt_strategies.errors import CoverageError, NoReplicasAvailableError
from dist_ckpt_strategies.local.plan import (
    build_cliques,
    build_exchange_plan,
)
from dist_ckpt_strategies.local.reshard import build_reshard_plan
from tests.support.regions import Split, regions_in, spec_of, splits, times_covered

WORLDS = st.integers(1, 8).flatmap(
    lambda size: st.tuples(
        st.lists(st.sets(st.integers(0, size - 1)), min_size=size, max_size=size),
        st.permutations(range(size)),
    )
)


@given(st.integers(1, 9), st.integers(1, 4), st.integers(0, 40))
def test_cliques_hold_every_rank_once_and_are_large_enough(
    jump: int, factor: int, num_more: int
) -> None:
    world_size = jump * factor + num_more
    cliques = build_cliques(world_size, jump, factor, allow_uneven=True)

    assert sorted(rank for clique in cliques for rank in clique) == list(range(world_size))
    for clique in cliques:
        assert len({rank // jump for rank in clique}) == len(clique) >= factor
    if world_size % (jump * factor) == 0:
        assert cliques == build_cliques(world_size, jump, factor)
        assert all(clique == (*range(clique[0], clique[-1] + 1, jump),) for clique in cliques)
        assert {len(clique) for clique in cliques} == {factor}


def test_twenty_ranks_on_nodes_of_eight_as_the_page_works_out() -> None:
    assert build_cliques(20, 8, 2, allow_uneven=True) == (
        (0, 8), (1, 9), (2, 10), (3, 11), (4, 12, 16), (5, 13, 17), (6, 14, 18), (7, 15, 19),
    )  # fmt: skip


@given(WORLDS)
def test_every_rank_gets_what_some_rank_has(world: tuple[list[set[int]], list[int]]) -> None:
    held, wishes = world
    available = {rank: [str(shard) for shard in shards] for rank, shards in enumerate(held)}
    wanted = {rank: [str(wish)] for rank, wish in enumerate(wishes)}
    if set(wishes) - set().union(*held):
        with pytest.raises(NoReplicasAvailableError, match="no rank has a copy"):
            build_exchange_plan(available, wanted)
        return
    plan = build_exchange_plan(available, wanted)

    assert {(t.receiver, t.id_) for t in plan.entries} == {(r, w[0]) for r, w in wanted.items()}
    for transfer in plan.entries:
        assert transfer.id_ in available[transfer.sender]
        if transfer.id_ in available[transfer.receiver]:
            assert transfer.sender == transfer.receiver


def test_a_plan_says_what_a_rank_has_to_have_and_holders_share_the_load() -> None:
    available = {0: ["a", "b", "c", "d"], 1: ["a", "b", "c", "d"], 2: [], 3: [], 4: [], 5: []}
    plan = build_exchange_plan(available, {2: ["a"], 3: ["b"], 4: ["c"], 5: ["d"]}, 1)

    assert Counter(t.sender for t in plan.entries) == {0: 2, 1: 2}
    assert plan.required_ids() == plan.required_ids(1)
    assert plan.required_ids(0) | plan.required_ids(1) == {"a", "b", "c", "d"}
    assert plan.required_ids(2) == set()


@given(splits().filter(lambda split: split.main), st.data())
def test_every_wanted_region_is_covered_once_by_parts_of_what_is_held(
    split: Split, data: st.DataObject
) -> None:
    held = split.held()
    region = data.draw(regions_in(split.shape))
    receiver = data.draw(st.integers(0, len(held) - 1))
    wanted: list[list[ShardSpec]] = [[] for _ in held]
    wanted[receiver].append(spec_of(region, split.shape))

    slices = list(build_reshard_plan(held, wanted))

    found = times_covered(split.shape, [one.region for one in slices])
    assert (found == times_covered(split.shape, [region])).all()
    for one in slices:
        assert one.receiver == receiver
        assert one.source in [spec.id for spec in held[one.sender]]
        if one.source in [spec.id for spec in held[receiver]]:
            assert one.sender == receiver


def test_a_shard_held_only_in_part_is_named_with_the_rank_that_wants_all_of_it() -> None:
    half, whole = (spec_of(Region((0, 0), (rows, 3)), (12, 3)) for rows in (6, 12))

    with pytest.raises(CoverageError, match=r"w: rank 1 wants .* hold 18 of them"):
        build_reshard_plan([[half], []], [[], [whole]])
