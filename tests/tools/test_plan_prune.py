"""Which checkpoints go: never the newest, never what is not ours."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_ckpt_strategies.errors import PlanError
from dist_ckpt_strategies.tools.prune import PruneDecision, Status, build_prune_plan

Policy = dict[str, Any]


def of(iteration: int | None, status: Status = Status.COMPLETE, **more: object) -> PruneDecision:
    name = f"iter_{iteration:07d}" if iteration is not None else str(more.pop("name", "weights"))
    age_s = more.pop("age_s", 10_000.0 - (iteration or 0))
    assert isinstance(age_s, float)
    return PruneDecision(name, iteration, status, age_s, is_named=bool(more.get("is_named")))


def goes(found: list[PruneDecision], policy: Policy) -> list[str]:
    return [one.name for one in build_prune_plan(found, **policy) if one.is_removed]


RUN = [of(100 * n) for n in range(1, 8)]


def unfinished(iteration: int, age_s: float = 3600.0) -> PruneDecision:
    return of(iteration, Status.UNFINISHED, age_s=age_s)


YOUNG_AND_OLD = [unfinished(900, 3599.0), unfinished(800)]
DAMAGED = [of(n, Status.DAMAGED) for n in (150, 550, 800)]
WENT_BACK = [of(100, is_named=True), of(200), of(300, age_s=1.0), of(400), of(500)]


@pytest.mark.parametrize(
    ("found", "policy", "removed"),
    [
        (RUN[::-1], Policy(last=3), [100, 200, 300, 400]),
        (RUN, Policy(last=100), []),
        (RUN, Policy(last=1, every=300), [100, 200, 400, 500]),
        (RUN, Policy(every=300), [100, 200, 400, 500]),
        ([*RUN, unfinished(900)], Policy(unfinished=True), [900]),
        ([*RUN[:2], unfinished(900)], Policy(last=1), [100]),
        (YOUNG_AND_OLD, Policy(last=1), []),
        (YOUNG_AND_OLD, Policy(unfinished=True), [800]),
        (YOUNG_AND_OLD, Policy(unfinished=True, older_than_s=0), [800, 900]),
        ([*RUN, *DAMAGED], Policy(last=2), [100, 150, 200, 300, 400, 500, 550]),
        ([*RUN, *DAMAGED], Policy(last=3), [100, 150, 200, 300, 400]),
        ([*RUN, *DAMAGED], Policy(unfinished=True), []),
        (DAMAGED, Policy(last=1), []),
        (WENT_BACK, Policy(last=1), [200, 400]),
    ],
)
def test_what_is_not_to_be_kept_goes_in_this_order(
    found: list[PruneDecision], policy: Policy, removed: list[int]
) -> None:
    assert goes(found, policy) == [f"iter_{iteration:07d}" for iteration in removed]


@pytest.mark.parametrize("policy", [Policy(last=0), Policy(every=0), Policy(older_than_s=-1)])
def test_numbers_that_cannot_be_meant_are_refused(policy: Policy) -> None:
    with pytest.raises(PlanError, match="expected"):
        build_prune_plan(RUN, **policy)


found_sets = st.lists(
    st.builds(
        PruneDecision,
        st.text("ab", min_size=1),
        st.none() | st.integers(0, 50),
        st.sampled_from(Status),
        st.floats(0, 10_000),
        st.none(),
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
    found: list[PruneDecision],
    last: int | None,
    every: int | None,
    removes_unfinished: bool,
    older_than_s: float,
) -> None:
    policy = Policy(
        last=last, every=every, unfinished=removes_unfinished, older_than_s=older_than_s
    )
    plan = build_prune_plan(found, **policy)
    names = {decision.name for decision in plan if decision.is_removed}
    gone = [one for one in found if one.name in names]
    complete = [one for one in found if one.status is Status.COMPLETE]

    assert sorted(decision.name for decision in plan) == sorted(one.name for one in found)
    assert all(one.status is not Status.OTHER for one in gone)
    assert all(one.age_s >= older_than_s for one in gone if one.status is Status.UNFINISHED)
    if complete:
        newest = max(complete, key=lambda one: -1 if one.iteration is None else one.iteration)
        kept = [one for one in complete if one not in gone]
        assert any(one.iteration == newest.iteration for one in kept)
        assert len(kept) >= min(len(complete), last or 1)
    assert build_prune_plan(found[::-1], **policy) == plan
