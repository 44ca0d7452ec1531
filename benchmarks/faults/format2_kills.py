"""Ranks that are killed in a save of format 2: what they leave, and what a load comes to then."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from itertools import count

from benchmarks.faults.attempts import Attempt, CampaignError, ended
from benchmarks.faults.format2_worker import NUM_WRITERS, PRELOAD, Spec, make_worker
from benchmarks.faults.outcomes import Ending, Outcome
from benchmarks.measuring.harness import Ranks
from dist_ckpt_strategies.formats.manifest import INDEX_NAME, SAVE_NAME
from dist_ckpt_strategies.formats.scan import scan, verify
from dist_ckpt_strategies.storage.files import MARKER_NAME
from dist_ckpt_strategies.tools.prune import prune

_METHODS = ("save", "save_behind")
_FIRST_GUESS_S = 0.2
_SOONER, _LATER = 0.8, 1.1
"""A kill comes at a random moment up to a bound after a save's begin. One after the save's end does
not count, and lowers the bound for the next; one before raises it: about 70 % count."""
_REFUSALS = ("IncompleteCheckpointError", "CheckpointNotFoundError")


class Left(StrEnum):
    """What is on the disk of a save in which a rank was killed."""

    NOTHING = "nothing"
    BEGUN = "files, no manifest"
    MANIFEST = "a manifest, no marker"
    EVERYTHING = "a marker"


@dataclass(frozen=True, slots=True)
class Kill:
    """One case, and what was there after it.

    Attributes:
        attempt: the case.
        left: what was on the disk.
        survivors: how it ended for the others.
        seconds: until the last of them had ended.
        is_counted: whether the kill came before the victim was done.
    """

    attempt: Attempt
    left: Left
    survivors: tuple[Outcome, ...]
    seconds: float
    is_counted: bool

    @property
    def expected(self) -> int:
        """The newest complete checkpoint: this one if it has a marker, else the one before."""
        return self.attempt.iteration - (self.left is not Left.EVERYTHING)


@dataclass(frozen=True, slots=True)
class Killed:
    """A case and what was found next, by new processes.

    Attributes:
        kill: the case.
        loaded: the newest iteration that a load brought.
        complaint: what is wrong; None if nothing.
    """

    kill: Kill
    loaded: int | None
    complaint: str | None


def run_kills(spec: Spec, chance: random.Random, num_kills: int) -> Iterator[Killed]:
    """Kill a rank in each of so many saves, every second one asynchronous.

    In each turn new processes load what the turn before has left, and what it must have left
    alone; the rest is pruned. Then they save, and begin another save, in which one is killed.
    """
    bounds_s = dict.fromkeys(_METHODS, _FIRST_GUESS_S)
    last: Kill | None = None
    number = 0
    for iteration in count(1, 2):
        with _world(spec) as ranks:
            if last is not None:
                result = _judged(spec, last, ranks)
                if last.is_counted or result.complaint:
                    yield result
                    number += 1
            if number == num_kills:
                return
            method = _METHODS[number % 2]
            timed = ranks.step(method, iteration)
            if any(one.ending is not Ending.SAVED for one in timed.values):
                raise CampaignError(f"the save of {iteration} after a kill: {timed.values}")
            attempt = Attempt(
                number,
                method,
                chance.randrange(NUM_WRITERS),
                chance.random() * bounds_s[method],
                iteration + 1,
            )
            began = time.monotonic()
            end = ended(ranks, attempt)
        bounds_s[method] *= _SOONER if end.was_done else _LATER
        seconds = time.monotonic() - began - attempt.delay_s
        survivors = tuple(end.values.values())
        left = _left(spec, attempt.iteration)
        last = Kill(attempt, left, survivors, seconds, not end.was_done)


def _world(spec: Spec) -> Ranks:
    return Ranks(
        NUM_WRITERS, partial(make_worker, spec), timeout_s=3 * spec.timeout_s, preload=PRELOAD
    )


def _left(spec: Spec, iteration: int) -> Left:
    """What is there, in place or staged: a save whose marker is staged is completed by a load."""
    directory = spec.directory(iteration)
    places = [directory, *directory.glob(".partial-*")]
    for name, left in (
        (MARKER_NAME, Left.EVERYTHING),
        (INDEX_NAME, Left.MANIFEST),
        (SAVE_NAME, Left.BEGUN),
    ):
        if any((place / name).exists() for place in places):
            return left
    return Left.NOTHING


def _judged(spec: Spec, kill: Kill, ranks: Ranks) -> Killed:
    """What new processes make of it; then all but the newest complete checkpoint is pruned."""
    newer = ranks.step("load", kill.attempt.iteration).values
    older = ranks.step("load", kill.attempt.iteration - 1).values
    complaint = _complaint(spec, kill, newer, older) or _unpruned(spec, kill)
    loaded = [one.iteration for one in (newer[0], older[0]) if one.ending is Ending.LOADED]
    return Killed(kill, max(loaded, default=None), complaint)


_MAX_WAITS = 2
"""A rank that is no neighbour of the one killed may wait out the limit, once, before it is told."""


def _complaint(
    spec: Spec, kill: Kill, newer: Sequence[Outcome], older: Sequence[Outcome]
) -> str | None:
    is_there = kill.left is Left.EVERYTHING
    if any(one.ending is not Ending.LOADED for one in older):
        return f"the checkpoint before does not load any more: {list(older)}"
    if is_there and any(one.ending is not Ending.LOADED for one in newer):
        return f"there is a marker, and not what was saved: {list(newer)}"
    if not is_there and not all(
        one.ending is Ending.REFUSED and one.text.startswith(_REFUSALS) for one in newer
    ):
        return f"there is no marker, and loading it is not refused for that: {list(newer)}"
    if kill.seconds > _MAX_WAITS * spec.timeout_s:
        return f"the others took {kill.seconds:.1f} s to end"
    told = [one for one in kill.survivors if one.ending is Ending.SAVED]
    if told and not is_there:
        return f"{len(told)} ranks were told that it was saved"
    findings = verify(scan(spec.directory(kill.expected)))
    return f"dist-ckpt verify of {kill.expected}: {findings}" if findings else None


def _unpruned(spec: Spec, kill: Kill) -> str | None:
    """What is wrong with what a prune makes of it."""
    prune(spec.root, keep_last=1, unfinished=True, older_than_s=0)
    left = sorted(path.name for path in spec.root.iterdir() if any(path.iterdir()))
    expected = [spec.directory(kill.expected).name]
    return None if left == expected else f"after prune there are {left}, expected {expected}"
