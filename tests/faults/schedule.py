"""What happens in a campaign, from its seed alone: no file, clock or process is looked at."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

NUM_RANKS = 4
MAX_STEPS = 3
"""Between two events."""

_STORE_RUN = 12
"""So many events in a row have the global checkpoints in the same store."""


class Strike(StrEnum):
    """What strikes."""

    KILL = "a rank is killed"
    HANG = "a rank stops, and is killed later"
    WAKE = "a rank stops, and goes on when the others have given it up"
    PAUSE = "a rank stops, and goes on in time"
    FAIL = "a storage call fails"
    LIMIT = "a rank may not write so much to a file"
    FULL = "the disk is full"
    LOSE_NODE = "a node's directory vanishes"
    LOSE_GLOBAL = "the newest global checkpoint vanishes"
    FLIP_GLOBAL = "a byte of a global checkpoint changes"
    FLIP_LOCAL = "a byte of a local checkpoint changes"
    RESTART = "the object store is gone for a moment"
    EMPTIED = "the object store comes back empty"


class During(StrEnum):
    """What the ranks do meanwhile."""

    SAVE = "a save"
    LOAD = "a load"
    NOTHING = "nothing"


class Store(StrEnum):
    """Where global checkpoints go."""

    DISK = "disk"
    OBJECTS = "objects"


class Survivors(StrEnum):
    """What becomes of the processes that outlive one that is killed."""

    STAY = "they make new process groups"
    GO = "they are started anew"


_WEIGHTS: dict[Store, dict[Strike, int]] = {
    Store.DISK: {
        Strike.KILL: 6,
        Strike.HANG: 1,
        Strike.WAKE: 1,
        Strike.PAUSE: 2,
        Strike.FAIL: 6,
        Strike.LIMIT: 3,
        Strike.FULL: 2,
        Strike.LOSE_NODE: 3,
        Strike.LOSE_GLOBAL: 2,
        Strike.FLIP_GLOBAL: 4,
        Strike.FLIP_LOCAL: 5,
    },
    Store.OBJECTS: {
        Strike.KILL: 3,
        Strike.PAUSE: 1,
        Strike.FAIL: 1,
        Strike.LOSE_NODE: 2,
        Strike.LOSE_GLOBAL: 2,
        Strike.FLIP_GLOBAL: 3,
        Strike.FLIP_LOCAL: 1,
        Strike.RESTART: 4,
        Strike.EMPTIED: 1,
    },
}
_BETWEEN = {Strike.LOSE_GLOBAL, Strike.FLIP_GLOBAL, Strike.FLIP_LOCAL}
"""What is done while no rank saves or loads."""

_DAMAGE_OF_GLOBAL = {Strike.LOSE_GLOBAL, Strike.FLIP_GLOBAL}
_OF_GLOBAL = _DAMAGE_OF_GLOBAL | {Strike.EMPTIED}
_ONLY_SAVES = {Strike.LIMIT, Strike.FULL}
HANGS = {Strike.HANG, Strike.WAKE}
"""After these nobody answers until a limit of time is over."""

_LOAD_SHARE = 0.3
_BETWEEN_SHARE = 0.4
_GLOBAL_SHARE = 0.65
_LOCAL_SHARE = 0.7
_ASYNC_SHARE = 0.75
_STAY_SHARE = 0.5
_TIMED_SHARE = 0.4
_MAX_CALL = 30
"""Storage calls that a rank makes before a fault at most; a save is of some forty."""


@dataclass(frozen=True, slots=True)
class SaveAt:
    """A save of the training before an event.

    Attributes:
        after_steps: how many steps come before it.
        is_async: whether training goes on meanwhile.
    """

    after_steps: int
    is_async: bool


@dataclass(frozen=True, slots=True)
class Event:
    """The training that comes before an event, the event, and who is there after it.

    Attributes:
        number: of the event.
        strike: what happens.
        during: what the ranks do when it happens.
        store: where the global save before it goes.
        steps: of training before it.
        global_save: the global save in these steps, if any.
        local_save: the local one.
        victim: the rank, or the node, that is hit.
        call: storage calls of the victim before it is hit; those of a load count too.
        share: of everything of a kind, where it strikes: 0 is the first, 1 beyond the last.
        is_timed: strike at a time, a share of a second, not at a call.
        change: what a byte is XORed with.
        survivors: what becomes of the processes that are left, where one is killed.
        jump: the ranks between a part and its copy, in the process groups made after it.
    """

    number: int
    strike: Strike
    during: During
    store: Store
    steps: int
    global_save: SaveAt | None
    local_save: SaveAt | None
    victim: int
    call: int
    share: float
    is_timed: bool
    change: int
    survivors: Survivors
    jump: int

    def chance(self) -> random.Random:
        """Random numbers for what only the moment shows, such as how many files there are."""
        return random.Random(f"{self.number} {self.share} {self.change}")

    def __str__(self) -> str:
        """One line."""
        saves = ", ".join(
            f"{what} save {'behind' if save.is_async else 'after'} step {save.after_steps}"
            for what, save in (("global", self.global_save), ("local", self.local_save))
            if save is not None
        )
        return (
            f"event {self.number}: {self.strike} (during {self.during}, rank {self.victim}, call "
            f"{self.call}, share {self.share:.3f}); before it {self.steps} steps, {saves}; "
            f"global checkpoints in {self.store}"
        )


def build_schedule(seed: int, stores: tuple[Store, ...] = tuple(Store)) -> Iterator[Event]:
    """Events without end. Each follows from the seed, the stores and its number alone."""
    number = 0
    while True:
        yield build_event(seed, number, stores)
        number += 1


def build_event(seed: int, number: int, stores: tuple[Store, ...] = tuple(Store)) -> Event:
    """One event of a schedule."""
    chance = random.Random(f"{seed} {number}")
    store = stores[(number // _STORE_RUN) % len(stores)]
    kinds = _WEIGHTS[store]
    strike = chance.choices(list(kinds), list(kinds.values()))[0]
    during = _during(strike, chance)
    steps = chance.randint(1, MAX_STEPS)
    global_save, local_save = _saves(strike, during, store, steps, chance)
    return Event(
        number,
        strike,
        during,
        store,
        steps,
        global_save,
        local_save,
        chance.randrange(NUM_RANKS),
        chance.randrange(_MAX_CALL),
        chance.random(),
        chance.random() < _TIMED_SHARE,
        chance.randrange(1, 256),
        Survivors.STAY if chance.random() < _STAY_SHARE else Survivors.GO,
        chance.choice([1, 2]),
    )


def _during(strike: Strike, chance: random.Random) -> During:
    if strike in _BETWEEN or (strike is Strike.LOSE_NODE and chance.random() < _BETWEEN_SHARE):
        return During.NOTHING
    if strike not in _ONLY_SAVES and chance.random() < _LOAD_SHARE:
        return During.LOAD
    return During.SAVE


def _saves(
    strike: Strike, during: During, store: Store, steps: int, chance: random.Random
) -> tuple[SaveAt | None, SaveAt | None]:
    """The global and the local save, at least one.

    What is damaged afterwards is the newest, lest nobody should look at it. Nobody trains while a
    rank is silent.
    """
    is_local = chance.random() < _LOCAL_SHARE or strike in {Strike.FLIP_LOCAL, Strike.LOSE_NODE}
    is_global = not is_local or chance.random() < _GLOBAL_SHARE or strike in _OF_GLOBAL
    # What this kind of event can strike at has to be there.
    is_global |= store is Store.OBJECTS and strike is Strike.RESTART and during is During.SAVE
    after_global, after_local = chance.randint(0, steps), chance.randint(0, steps)
    if during is During.SAVE and strike in HANGS:
        after_global = after_local = steps
    elif strike in _DAMAGE_OF_GLOBAL:
        after_global, after_local = steps, chance.randrange(steps)
    elif strike is Strike.FLIP_LOCAL:
        after_local = steps
    return (
        SaveAt(after_global, chance.random() < _ASYNC_SHARE) if is_global else None,
        SaveAt(after_local, chance.random() < _ASYNC_SHARE) if is_local else None,
    )


_ATTEMPTS_IN_A_ROW = 8
_EARLY_SHARE = 0.6
_EARLY, _LATE = 3, 40
"""Calls before a fault, at most: few mostly, since most functions are called a few times."""

_FOR_EVER_SHARE = 0.3


@dataclass(frozen=True, slots=True)
class Attempt:
    """An operation of all ranks in which one of them cannot call a function.

    Attributes:
        number: of the attempt.
        operation: its name.
        target: the function's name.
        call: calls before it fails.
        for_ever: whether all later calls fail too.
    """

    number: int
    operation: str
    target: str
    call: int
    for_ever: bool

    def __str__(self) -> str:
        """One line."""
        later = " and all later ones" if self.for_ever else ""
        return f"attempt {self.number}: {self.operation}: {self.target} call {self.call}{later}"


def build_attempts(
    seed: int, operations: Sequence[str], targets: Sequence[str]
) -> Iterator[Attempt]:
    """Attempts without end: some in a row of one operation, then of the next."""
    number = 0
    while True:
        chance = random.Random(f"{seed} attempt {number}")
        yield Attempt(
            number,
            operations[(number // _ATTEMPTS_IN_A_ROW) % len(operations)],
            chance.choice(targets),
            chance.randrange(_EARLY if chance.random() < _EARLY_SHARE else _LATE),
            chance.random() < _FOR_EVER_SHARE,
        )
        number += 1
