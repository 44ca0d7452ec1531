"""What happens in a run, from its seed alone: no file, clock or process is looked at."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

NUM_RANKS = 4
MAX_STEPS = 3
"""Between two events."""

_STORE_RUN = 12
"""So many events in a row have the global checkpoints in the same store."""


class Kind(StrEnum):
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


_WEIGHTS: dict[Store, dict[Kind, int]] = {
    Store.DISK: {
        Kind.KILL: 6,
        Kind.HANG: 1,
        Kind.WAKE: 1,
        Kind.PAUSE: 2,
        Kind.FAIL: 6,
        Kind.LIMIT: 3,
        Kind.FULL: 2,
        Kind.LOSE_NODE: 3,
        Kind.LOSE_GLOBAL: 2,
        Kind.FLIP_GLOBAL: 4,
        Kind.FLIP_LOCAL: 5,
    },
    Store.OBJECTS: {
        Kind.KILL: 3,
        Kind.PAUSE: 1,
        Kind.FAIL: 1,
        Kind.LOSE_NODE: 2,
        Kind.LOSE_GLOBAL: 2,
        Kind.FLIP_GLOBAL: 3,
        Kind.FLIP_LOCAL: 1,
        Kind.RESTART: 4,
        Kind.EMPTIED: 1,
    },
}
_BETWEEN = {Kind.LOSE_GLOBAL, Kind.FLIP_GLOBAL, Kind.FLIP_LOCAL}
"""What is done while no rank saves or loads."""

_DAMAGE_OF_GLOBAL = {Kind.LOSE_GLOBAL, Kind.FLIP_GLOBAL}
_OF_GLOBAL = _DAMAGE_OF_GLOBAL | {Kind.EMPTIED}
_ONLY_SAVES = {Kind.LIMIT, Kind.FULL}
HANGS = {Kind.HANG, Kind.WAKE}
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
        kind: what happens.
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
    kind: Kind
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
            f"event {self.number}: {self.kind} (during {self.during}, rank {self.victim}, call "
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
    kind = chance.choices(list(kinds), list(kinds.values()))[0]
    during = _during(kind, chance)
    steps = chance.randint(1, MAX_STEPS)
    global_save, local_save = _saves(kind, during, store, steps, chance)
    return Event(
        number,
        kind,
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


def _during(kind: Kind, chance: random.Random) -> During:
    if kind in _BETWEEN or (kind is Kind.LOSE_NODE and chance.random() < _BETWEEN_SHARE):
        return During.NOTHING
    if kind not in _ONLY_SAVES and chance.random() < _LOAD_SHARE:
        return During.LOAD
    return During.SAVE


def _saves(
    kind: Kind, during: During, store: Store, steps: int, chance: random.Random
) -> tuple[SaveAt | None, SaveAt | None]:
    """The global and the local save, at least one.

    What is damaged afterwards is the newest, lest nobody should look at it. Nobody trains while a
    rank is silent.
    """
    is_local = chance.random() < _LOCAL_SHARE or kind in {Kind.FLIP_LOCAL, Kind.LOSE_NODE}
    is_global = not is_local or chance.random() < _GLOBAL_SHARE or kind in _OF_GLOBAL
    # What this kind of event can strike at has to be there.
    is_global |= store is Store.OBJECTS and kind is Kind.RESTART and during is During.SAVE
    after_global, after_local = chance.randint(0, steps), chance.randint(0, steps)
    if during is During.SAVE and kind in HANGS:
        after_global = after_local = steps
    elif kind in _DAMAGE_OF_GLOBAL:
        after_global, after_local = steps, chance.randrange(steps)
    elif kind is Kind.FLIP_LOCAL:
        after_local = steps
    return (
        SaveAt(after_global, chance.random() < _ASYNC_SHARE) if is_global else None,
        SaveAt(after_local, chance.random() < _ASYNC_SHARE) if is_local else None,
    )
