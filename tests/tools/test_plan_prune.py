"""Which checkpoints go: never the newest, never what is not ours."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_ckpt_strategies.errors import PlanError
from dist_ckpt_strategies.tools.plan_prune import (
    FoundCheckpoint,
    Status,
    build_prune_plan,
)
from dist_ckpt_strategies.tools.plan_prune import (
    RetentionPolicy as Policy,
)


def of(iteration: int | None, status: Status = Status.COMPLETE, **more: object) -> FoundCheckpoint:
    name = f"iter_{iteration:07d}" if iteration is not None else str(more.pop("name", "weights"))
    age_s = more.pop("age_s", 10_000.0 - (iteration or 0))
    assert isinstance(age_s, float)
    return FoundCheckpoint(name, iteration, status, age_s, bool(more.get("is_named")))


def goes(found: list[FoundCheckpoint], policy: Policy) -> list[int | None]:
    return [v.found.iteration for v in build_prune_plan(found, policy) if v.is_removed]


RUN = [of(100 * n) for n in range(1, 8)]


def test_the_last_ones_stay_and_the_oldest_goes_first() -> None:
    assert goes(RUN[::-1], Policy(last=3)) == [100, 200, 300, 400]


def test_where_there_are_fewer_than_the_last_ones_all_stay() -> None:
    assert goes(RUN, Policy(last=100)) == []


def test_multiples_stay() -> None:
    assert goes(RUN, Policy(last=1, every=300)) == [100, 200, 400, 500]
    assert goes(RUN, Policy(every=300)) == [100, 200, 400, 500]


def test_complete_ones_stay_where_nothing_is_said_about_them() -> None:
    assert goes([*RUN, of(900, Status.UNFINISHED)], Policy(removes_unfinished=True)) == [900]


def test_an_unfinished_one_stays_unless_asked_for_and_old_enough() -> None:
    young = of(900, Status.UNFINISHED, age_s=3599.0)
    old = of(800, Status.UNFINISHED, age_s=3600.0)

    assert goes([young, old], Policy(last=1)) == []
    assert goes([young, old], Policy(removes_unfinished=True)) == [800]
    assert goes([young, old], Policy(removes_unfinished=True, older_than_s=0)) == [
        800,
        900,
    ]


def test_an_unfinished_one_does_not_count_among_the_last() -> None:
    assert goes([*RUN[:2], of(900, Status.UNFINISHED)], Policy(last=1)) == [100]


def test_a_run_that_went_back_keeps_what_it_saved_since_and_what_its_note_names() -> None:
    found = [of(100, is_named=True), of(200), of(300, age_s=1.0), of(400), of(500)]

    assert goes(found, Policy(last=1)) == [200, 400]


def test_names_without_a_number_are_older_and_a_release_stays() -> None:
    found = [of(None, name="release"), of(None, name="weights"), of(1)]

    assert [v.found.name for v in build_prune_plan(found, Policy(last=1)) if v.is_removed] == [
        "weights"
    ]


@pytest.mark.parametrize("policy", [Policy(last=0), Policy(every=0), Policy(older_than_s=-1)])
def test_numbers_that_cannot_be_meant_are_refused(policy: Policy) -> None:
    with pytest.raises(PlanError, match="expected"):
        build_prune_plan(RUN, policy)


found_sets = st.lists(
    st.builds(
        FoundCheckpoint,
        st.text("ab", min_size=1),
        st.none() | st.integers(0, 50),
        st.sampled_from(Status),
        st.floats(0, 10_000),
        st.booleans(),
    ),
    unique_by=lambda found: found.name,
)


@given(
    found_sets,
    st.none() | st.integers(1, 5),
    st.none() | st.integers(1, 5),
    st.booleans(),
    st.floats(0, 10_000),
)
def test_whatever_is_asked_for_the_newest_and_what_is_not_ours_stay(
    found: list[FoundCheckpoint],
    last: int | None,
    every: int | None,
    removes_unfinished: bool,
    older_than_s: float,
) -> None:
    policy = Policy(last, every, removes_unfinished, older_than_s)
    plan = build_prune_plan(found, policy)
    gone = [decision.found for decision in plan if decision.is_removed]
    complete = [one for one in found if one.status is Status.COMPLETE]

    assert sorted(v.found.name for v in plan) == sorted(one.name for one in found)
    assert all(one.status is not Status.OTHER for one in gone)
    assert all(one.age_s >= older_than_s for one in gone if one.status is Status.UNFINISHED)
    if complete:
        newest = max(complete, key=lambda one: -1 if one.iteration is None else one.iteration)
        kept = [one for one in complete if one not in gone]
        assert any(one.iteration == newest.iteration for one in kept)
        assert len(kept) >= min(len(complete), last or 1)
    assert build_prune_plan(found[::-1], policy) == plan
