"""What happens in a campaign, from its seed alone: no file, clock or process is looked at."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from tests.faults.oracle import NUM_RANKS, Tier

MAX_STEPS = 3  # between two events
_STORE_RUN = 12  # so many events in a row have the global checkpoints in the same store


class Strike(StrEnum):
    KILL = "a rank is killed"
    WAKE = "a rank stops, and goes on when the others have given it up"
    PAUSE = "a rank stops, and goes on in time"
    FAIL = "a storage call fails"
    LOSE_NODE = "a node's directory vanishes"
    DAMAGE_GLOBAL = "files of the newest global checkpoint change"
    DAMAGE_LOCAL = "files of the newest local checkpoint change"
    OUTAGE = "the object store is gone for a moment"


class During(StrEnum):
    SAVE = "a save"
    LOAD = "a load"
    NOTHING = "nothing"


class Store(StrEnum):
    DISK = "disk"
    OBJECTS = "objects"


_WEIGHTS: dict[Store, dict[Strike, int]] = {
    Store.DISK: {
        Strike.KILL: 6,
        Strike.WAKE: 2,
        Strike.PAUSE: 2,
        Strike.FAIL: 9,
        Strike.LOSE_NODE: 3,
        Strike.DAMAGE_GLOBAL: 6,
        Strike.DAMAGE_LOCAL: 5,
    },
    Store.OBJECTS: {
        Strike.KILL: 3,
        Strike.PAUSE: 1,
        Strike.FAIL: 1,
        Strike.LOSE_NODE: 2,
        Strike.DAMAGE_GLOBAL: 5,
        Strike.DAMAGE_LOCAL: 1,
        Strike.OUTAGE: 5,
    },
}
_LOAD_SHARE = 0.3
_BETWEEN_SHARE = 0.4
_GLOBAL_SHARE = 0.65
_LOCAL_SHARE = 0.7
_ASYNC_SHARE = 0.75
_STAY_SHARE = 0.5
_TIMED_SHARE = 0.4
_MAX_CALL = 30  # storage calls that a rank makes before a fault at most; a save makes about forty


@dataclass(frozen=True, slots=True)
class Save:
    """A save of the training before an event; with ``is_async`` training goes on meanwhile."""

    tier: Tier
    after_steps: int
    is_async: bool

    def __str__(self) -> str:
        return f"{self.tier} save {'behind' if self.is_async else 'after'} step {self.after_steps}"


@dataclass(frozen=True, slots=True)
class Event:
    """The training that comes before an event, the event, and who is there after it."""

    number: int  # of the event
    strike: Strike  # what happens
    during: During  # what the ranks do when it happens
    store: Store  # where the global save before it goes
    steps: int  # of training before it
    saves: tuple[Save, ...]  # in these steps
    victim: int  # the rank, or the node, that is hit
    call: int  # storage calls of the victim before it is hit; those of a load count too
    share: float  # of everything of a kind, where it strikes: 0 is the first, 1 beyond the last
    is_timed: bool  # strike at a time, a share of a second, not at a call
    do_others_stay: bool  # where a rank is killed, the others make new groups, or start anew
    jump: int  # the ranks between a part and its copy, in the process groups made after it

    def chance(self) -> random.Random:
        """Random numbers for what only the moment shows, such as how many files there are."""
        return random.Random(f"{self.number} {self.share}")

    def __str__(self) -> str:
        return (
            f"event {self.number}: {self.strike} (during {self.during}, rank {self.victim}, call "
            f"{self.call}, share {self.share:.3f}); before it {self.steps} steps, "
            f"{', '.join(map(str, self.saves))}; global checkpoints in {self.store}"
        )


def build_event(seed: int, number: int) -> Event:
    """One event of a schedule."""
    chance = random.Random(f"{seed} {number}")
    store = list(Store)[(number // _STORE_RUN) % len(Store)]
    (strike,) = chance.choices(list(_WEIGHTS[store]), list(_WEIGHTS[store].values()))
    during = _during(strike, chance)
    steps = chance.randint(1, MAX_STEPS)
    return Event(
        number,
        strike,
        during,
        store,
        steps,
        _saves(strike, during, steps, chance),
        victim=chance.randrange(NUM_RANKS),
        call=chance.randrange(_MAX_CALL),
        share=chance.random(),
        is_timed=chance.random() < _TIMED_SHARE,
        do_others_stay=chance.random() < _STAY_SHARE,
        jump=chance.choice([1, 2]),
    )


def _during(strike: Strike, chance: random.Random) -> During:
    is_between = strike is Strike.LOSE_NODE and chance.random() < _BETWEEN_SHARE
    if strike in {Strike.DAMAGE_GLOBAL, Strike.DAMAGE_LOCAL} or is_between:
        return During.NOTHING
    return During.LOAD if chance.random() < _LOAD_SHARE else During.SAVE


def _saves(strike: Strike, during: During, steps: int, chance: random.Random) -> tuple[Save, ...]:
    """At least one, and what the event can strike at.

    What is damaged afterwards is the newest, so that it is looked at. No rank trains while a
    rank is silent.
    """
    is_local = chance.random() < _LOCAL_SHARE or strike in {Strike.DAMAGE_LOCAL, Strike.LOSE_NODE}
    is_global = not is_local or chance.random() < _GLOBAL_SHARE or strike is Strike.DAMAGE_GLOBAL
    is_global |= strike is Strike.OUTAGE and during is During.SAVE
    after_global, after_local = chance.randint(0, steps), chance.randint(0, steps)
    if during is During.SAVE and strike is Strike.WAKE:
        after_global = after_local = steps
    elif strike is Strike.DAMAGE_GLOBAL:
        after_global, after_local = steps, chance.randrange(steps)
    elif strike is Strike.DAMAGE_LOCAL:
        after_local = steps
    found = []
    if is_global:
        found.append(Save(Tier.GLOBAL, after_global, chance.random() < _ASYNC_SHARE))
    if is_local:
        found.append(Save(Tier.LOCAL, after_local, chance.random() < _ASYNC_SHARE))
    return tuple(found)


_ATTEMPTS_IN_A_ROW = 4
_EARLY_SHARE = 0.6
_EARLY, _LATE = 3, 40
"""Calls before a fault, at most: few mostly, since most functions are called a few times."""

_FOR_EVER_SHARE = 0.3


@dataclass(frozen=True, slots=True)
class Attempt:
    """An operation of all ranks in which one of them cannot call a function."""

    number: int  # of the attempt
    operation: str  # its name
    target: str  # the function's name
    call: int  # calls before it fails
    for_ever: bool  # whether all later calls fail too

    def __str__(self) -> str:
        later = " and all later ones" if self.for_ever else ""
        return f"attempt {self.number}: {self.operation}: {self.target} call {self.call}{later}"


def build_attempt(
    seed: int, number: int, operations: Sequence[str], targets: Sequence[str]
) -> Attempt:
    """One attempt: some in a row are of one operation, then of the next."""
    chance = random.Random(f"{seed} attempt {number}")
    return Attempt(
        number,
        operations[(number // _ATTEMPTS_IN_A_ROW) % len(operations)],
        chance.choice(targets),
        chance.randrange(_EARLY if chance.random() < _EARLY_SHARE else _LATE),
        chance.random() < _FOR_EVER_SHARE,
    )
