"""The schedule follows from the seed, and leaves nothing out."""

from __future__ import annotations

from itertools import islice

import pytest

from tests.chaos.schedule import (
    HANGS,
    MAX_STEPS,
    NUM_RANKS,
    During,
    Event,
    Kind,
    Store,
    build_event,
    build_schedule,
)


def events(seed: int, count: int = 400, stores: tuple[Store, ...] = tuple(Store)) -> list[Event]:
    return list(islice(build_schedule(seed, stores), count))


def test_the_same_seed_gives_the_same_events_and_another_one_others() -> None:
    assert events(3) == events(3)
    assert events(3) != events(4)


def test_an_event_needs_none_of_those_before_it() -> None:
    assert build_event(3, 77) == events(3)[77]


def test_every_kind_happens_in_saves_and_in_loads() -> None:
    found = {(event.kind, event.during) for event in events(1)}

    assert {kind for kind, _ in found} == set(Kind)
    for kind in (Kind.KILL, Kind.PAUSE, Kind.FAIL, Kind.LOSE_NODE, Kind.RESTART, *HANGS):
        assert {(kind, During.SAVE), (kind, During.LOAD)} <= found
    for kind in (Kind.FLIP_GLOBAL, Kind.FLIP_LOCAL, Kind.LOSE_GLOBAL):
        assert {during for one, during in found if one is kind} == {During.NOTHING}


def test_there_is_always_a_save_before_an_event() -> None:
    for event in events(2):
        saves = [save for save in (event.global_save, event.local_save) if save is not None]
        assert saves
        assert all(0 <= save.after_steps <= event.steps <= MAX_STEPS for save in saves)
        assert event.victim in range(NUM_RANKS)
        assert 1 <= event.change <= 255


def test_nobody_trains_while_a_rank_is_silent() -> None:
    hanging = [e for e in events(5) if e.kind in HANGS and e.during is During.SAVE]

    assert hanging
    for event in hanging:
        for save in (event.global_save, event.local_save):
            assert save is None or save.after_steps == event.steps


@pytest.mark.parametrize("store", Store)
def test_a_run_keeps_to_the_stores_that_are_asked_for(store: Store) -> None:
    found = events(6, stores=(store,))

    assert {event.store for event in found} == {store}
    needs_server = {event.kind for event in found} & {Kind.RESTART, Kind.EMPTIED}
    assert bool(needs_server) == (store is Store.OBJECTS)


def test_an_event_is_one_line_that_says_what_and_to_whom() -> None:
    event = build_event(0, 12)

    assert "\n" not in str(event)
    assert str(event).startswith("event 12: ")
    assert event.kind in str(event)
    assert f"rank {event.victim}" in str(event)


def test_what_is_damaged_is_the_newest_checkpoint() -> None:
    for event in events(7):
        found = (event.global_save, event.local_save)
        if event.kind in {Kind.FLIP_GLOBAL, Kind.LOSE_GLOBAL}:
            assert found[0] is not None
            assert found[1] is None or found[1].after_steps < found[0].after_steps
        if event.kind is Kind.FLIP_LOCAL:
            assert found[1] is not None
            assert found[0] is None or found[0].after_steps <= found[1].after_steps
