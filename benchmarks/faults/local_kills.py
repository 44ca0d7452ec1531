"""Ranks that are killed while they save: what they leave, and what a load has to come to then."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from itertools import count
from statistics import median

from benchmarks.faults.attempts import Attempt, CampaignError, ended
from benchmarks.faults.local_worker import PRELOAD, WorldSpec, make_worker
from benchmarks.faults.outcomes import Ending, Outcome
from benchmarks.measuring.harness import Ranks
from dist_ckpt_strategies.local.scan import check_shard
from dist_ckpt_strategies.local.shard_format import LocalShardId
from dist_ckpt_strategies.storage.files import PARTIAL_PREFIX

NUM_RANKS = 4

_METHODS = ("save", "save_behind")
_FIRST_GUESS_S = 0.1
_BEYOND = 1.1
"""Kills come up to this much of a usual save after its begin; those after its end do not count."""
_NUM_REMEMBERED = 9


class Left(StrEnum):
    """What is on the disks of a save in which a rank was killed."""

    NOTHING = "nothing"
    PARTIAL = "unfinished files"
    SOME = "some of the shards"
    EVERY = "every rank's shard"


@dataclass(frozen=True, slots=True)
class Kill:
    """One case, and what was there after it.

    Attributes:
        attempt: the case.
        left: what was on the disks.
        survivors: how it ended for the others.
        is_counted: whether the kill came before the victim was done.
    """

    attempt: Attempt
    left: Left
    survivors: tuple[Outcome, ...]
    is_counted: bool

    @property
    def expected(self) -> int:
        """What a load has to bring: this save if it is whole, else the one before."""
        return self.attempt.iteration - (self.left is not Left.EVERY)


@dataclass(frozen=True, slots=True)
class Killed:
    """A case and what was found next, by new processes.

    Attributes:
        kill: the case.
        loaded: the iteration that a load brought.
        complaint: what is wrong; None if nothing.
    """

    kill: Kill
    loaded: int | None
    complaint: str | None


def run_kills(spec: WorldSpec, chance: random.Random, num_kills: int) -> Iterator[Killed]:
    """Kill a rank in each of so many saves, every second one asynchronous.

    In each turn new processes load what the turn before has left, save, and begin another save,
    in which one of them is killed.
    """
    usual = deque([_FIRST_GUESS_S], maxlen=_NUM_REMEMBERED)
    last: Kill | None = None
    number = 0
    for iteration in count(1, 2):
        with _world(spec) as ranks:
            if last is not None:
                result = _judged(spec, last, _outcomes(ranks.step("load").values))
                if last.is_counted or result.complaint:
                    yield result
                    number += 1
            if number == num_kills:
                return
            timed = ranks.step("save", iteration)
            _require_clean(spec, iteration, _outcomes(timed.values))
            usual.append(timed.seconds)
            attempt = Attempt(
                number,
                _METHODS[number % 2],
                chance.randrange(NUM_RANKS),
                chance.random() * _BEYOND * median(usual),
                iteration + 1,
            )
            end = ended(ranks, attempt)
        survivors = tuple(_outcomes(list(end.values.values())))
        last = Kill(attempt, _left(spec, attempt.iteration), survivors, not end.was_done)


def _world(spec: WorldSpec) -> Ranks:
    return Ranks(
        NUM_RANKS, partial(make_worker, spec), timeout_s=3 * spec.timeout_s, preload=PRELOAD
    )


def _outcomes(values: Sequence[object]) -> list[Outcome]:
    return [value for value in values if isinstance(value, Outcome)]


def _left(spec: WorldSpec, iteration: int) -> Left:
    ids = [LocalShardId.require(path.stem) for path in spec.root.glob("node*/*/*.part")]
    owners = {one.global_rank for one in ids if one.save.iteration == iteration}
    if len(owners) == NUM_RANKS:
        return Left.EVERY
    if owners:
        return Left.SOME
    return Left.PARTIAL if _partials(spec) else Left.NOTHING


def _partials(spec: WorldSpec) -> list[str]:
    return [str(path) for path in spec.root.glob(f"node*/*/{PARTIAL_PREFIX}*")]


def _judged(spec: WorldSpec, kill: Kill, outcomes: Sequence[Outcome]) -> Killed:
    loaded = outcomes[0].iteration if outcomes[0].ending is Ending.LOADED else None
    return Killed(kill, loaded, _complaint(spec, kill, outcomes))


def _complaint(spec: WorldSpec, kill: Kill, outcomes: Sequence[Outcome]) -> str | None:
    if any((o.ending, o.iteration) != (Ending.LOADED, kill.expected) for o in outcomes):
        return f"expected iteration {kill.expected} on every rank, found {list(outcomes)}"
    saved = [one for one in kill.survivors if one.ending is Ending.SAVED]
    if saved and kill.left is not Left.EVERY:
        return f"{len(saved)} ranks were told that it was saved"
    for path in spec.root.glob("node*/*/*.part"):
        for finding in check_shard(path.parent, path.name):
            return f"half-written under a shard's name: {path}: {finding}"
    return None


def _require_clean(spec: WorldSpec, iteration: int, outcomes: Sequence[Outcome]) -> None:
    """Raise unless a save after a kill worked, and removed what the kill had left."""
    if any(one.ending is not Ending.SAVED for one in outcomes):
        raise CampaignError(f"the save of iteration {iteration} after a kill: {outcomes}")
    names = [LocalShardId.require(path.stem) for path in spec.root.glob("node*/*/*.part")]
    found = sorted({one.save.iteration for one in names})
    if found != [iteration] or _partials(spec):
        raise CampaignError(
            f"after the save of iteration {iteration} there are shards of {found}, and "
            f"{_partials(spec)}"
        )
