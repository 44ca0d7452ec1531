"""The restart loop as a table."""

from __future__ import annotations

import pytest

from dist_ckpt_strategies.errors import RestartError
from dist_ckpt_strategies.inprocess.states import TABLE, Event, State, next_state

ENDS = {State.DONE, State.FAILED}


def walk(*events: Event) -> State:
    state = State.JOINING
    for event in events:
        state = next_state(state, event)
    return state


def test_a_run_without_a_fault_is_done_when_all_have_returned() -> None:
    assert walk(Event.JOINED, Event.RETURNED, Event.ALL_RETURNED) is State.DONE


@pytest.mark.parametrize("before", [[], [Event.RETURNED]], ids=["running", "finishing"])
def test_a_fault_leads_back_to_the_barrier(before: list[Event]) -> None:
    after = [Event.FAULT, Event.STOPPED, Event.FINALIZED, Event.HEALTHY]

    assert walk(Event.JOINED, *before, *after) is State.JOINING


def test_every_state_but_the_last_ones_can_fail() -> None:
    assert {state for state, event in TABLE if event is Event.GAVE_UP} == set(State) - ENDS


@pytest.mark.parametrize("state", sorted(ENDS))
@pytest.mark.parametrize("event", Event)
def test_nothing_follows_the_end(state: State, event: Event) -> None:
    with pytest.raises(RestartError, match=f"state {state}: expected nothing"):
        next_state(state, event)


def test_an_event_that_a_state_does_not_know_is_an_error_that_names_both() -> None:
    with pytest.raises(RestartError, match="state joining: expected gave up, joined, found"):
        next_state(State.JOINING, Event.HEALTHY)


def test_every_state_can_be_reached_and_leads_to_an_end() -> None:
    reached = {State.JOINING} | set(TABLE.values())

    assert reached == set(State)
    assert {state for state, _ in TABLE} == set(State) - ENDS
