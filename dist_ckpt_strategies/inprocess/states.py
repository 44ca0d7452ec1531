"""The restart loop as a table: states, events, and what follows from what."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType

from dist_ckpt_strategies.errors import RestartError


class State(StrEnum):
    """What a rank is doing."""

    JOINING = "joining"
    """It waits for all ranks to join the epoch."""

    RUNNING = "running"
    """It runs the block."""

    FINISHING = "finishing"
    """It has returned from the block, and waits for the others."""

    ABORTING = "aborting"
    """Its communication ends, and its main thread leaves the block."""

    FINALIZING = "finalizing"
    """It cleans up, with nothing of the block running."""

    CHECKING = "checking"
    """It makes sure that it is fit for another attempt."""

    DONE = "done"
    """All ranks have returned from the block."""

    FAILED = "failed"
    """This process takes no further part."""


class Event(StrEnum):
    """What changes a state."""

    JOINED = "joined"
    """All ranks have joined the epoch."""

    RETURNED = "returned"
    """The block has returned."""

    FAULT = "fault"
    """A fault has ended the epoch, of this rank or of another."""

    STOPPED = "stopped"
    """Communication has ended, and the main thread has left the block."""

    FINALIZED = "finalized"
    """All is cleaned up."""

    HEALTHY = "healthy"
    """The health check has passed."""

    ALL_RETURNED = "all returned"
    """Every rank has returned from the block in this epoch."""

    GAVE_UP = "gave up"
    """What happened cannot be mended here, or the block was left for good."""


TABLE: Mapping[tuple[State, Event], State] = MappingProxyType(
    {
        (State.JOINING, Event.JOINED): State.RUNNING,
        (State.RUNNING, Event.RETURNED): State.FINISHING,
        (State.RUNNING, Event.FAULT): State.ABORTING,
        (State.FINISHING, Event.ALL_RETURNED): State.DONE,
        (State.FINISHING, Event.FAULT): State.ABORTING,
        (State.ABORTING, Event.STOPPED): State.FINALIZING,
        (State.FINALIZING, Event.FINALIZED): State.CHECKING,
        (State.CHECKING, Event.HEALTHY): State.JOINING,
        **{
            (state, Event.GAVE_UP): State.FAILED
            for state in State
            if state not in {State.DONE, State.FAILED}
        },
    }
)


def next_state(state: State, event: Event) -> State:
    """What a rank does after ``event``.

    Raises:
        RestartError: nothing follows from the event in this state.
    """
    found = TABLE.get((state, event))
    if found is None:
        known = ", ".join(sorted(e for s, e in TABLE if s is state)) or "nothing"
        raise RestartError(f"state {state}: expected {known}, found {event!r}")
    return found
