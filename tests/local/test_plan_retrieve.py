"""Every rank gets what it wants from one that has it, evenly."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_ckpt_strategies.errors import NoReplicasAvailableError, PlanError
from dist_ckpt_strategies.local.plan import (
    Completeness,
    assign_shards,
    build_exchange_plan,
    group_saves,
)
from dist_ckpt_strategies.local.shard_format import LocalShardId, SaveId

WORLDS = st.integers(1, 8).flatmap(
    lambda size: st.tuples(
        st.lists(st.sets(st.integers(0, size - 1)), min_size=size, max_size=size),
        st.permutations(range(size)),
    )
)


@given(WORLDS)
def test_everybody_gets_what_somebody_has(world: tuple[list[set[int]], list[int]]) -> None:
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


def test_a_plan_can_be_renumbered_and_says_which_rank_is_strange() -> None:
    plan = build_exchange_plan({4: ["a"], 6: []}, {6: ["a"]})

    (transfer,) = plan.renumbered({4: 0, 6: 1}).entries
    assert (transfer.sender, transfer.receiver) == (0, 1)
    assert plan.required_ids(4) == {"a"}
    assert plan.held_by(4).required_ids() == {"a"}
    assert plan.held_by(4) == plan
    with pytest.raises(PlanError, match="expected a rank"):
        plan.required_ids()
    with pytest.raises(PlanError, match=r"rank 6 is not one of \[4\]"):
        plan.renumbered({4: 0})


def test_a_survey_lists_the_newest_save_first_and_what_is_missing() -> None:
    old, new = SaveId(5, "a"), SaveId(9, "b")
    found = [
        (LocalShardId(old, 0), 2, "x"),
        (LocalShardId(old, 1), 2, "y"),
        (LocalShardId(new, 1), 2, "x"),
    ]

    assert group_saves([*found, found[-1]]) == (
        Completeness(new, 2, (0,), frozenset("x")),
        Completeness(old, 2, (), frozenset("xy")),
    )


def test_two_saves_of_one_iteration_and_worlds_of_other_sizes_do_not_mix() -> None:
    first, second = SaveId(5, "a"), SaveId(5, "b")
    found = [
        (LocalShardId(first, 0), 2, ""),
        (LocalShardId(second, 1), 2, ""),
        (LocalShardId(first, 1), 3, ""),
    ]

    assert [(one.save, one.missing) for one in group_saves(found)] == [
        (second, (0,)),
        (first, (0, 2)),
        (first, (1,)),
    ]


def test_parts_of_a_larger_world_are_taken_by_ranks_that_have_them() -> None:
    save = SaveId(5, "a")
    ids = [str(LocalShardId(save, rank)) for rank in range(4)]
    taken = assign_shards(save, 4, {0: ids[:2], 1: ids[2:]})

    assert taken == {0: tuple(ids[:2]), 1: tuple(ids[2:])}
