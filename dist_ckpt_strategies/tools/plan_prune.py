"""Which checkpoints of a directory stay, and which are removed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from dist_ckpt_strategies.errors import PlanError

RELEASE = "release"
"""How Megatron-LM names weights that belong to no iteration."""


class Status(StrEnum):
    """What a directory is; the values are in the command's JSON.

    A complete one has its marker and all files, by names and sizes. A damaged one has a marker and
    lacks files. Of an unreadable one nothing is known.
    """

    COMPLETE = "complete"
    DAMAGED = "damaged"
    UNFINISHED = "unfinished"
    OTHER = "other"
    UNREADABLE = "unreadable"


@dataclass(frozen=True, slots=True)
class FoundCheckpoint:
    """A directory below the one that holds all checkpoints.

    Attributes:
        name: of the directory.
        iteration: the number that its name ends in; None where it ends in none.
        status: what it is.
        age_s: since the newest change in it, in seconds.
        nbytes: of its files; None where that is not known.
        is_named: whether ``latest_checkpointed_iteration.txt`` names it.
        failure: why it is unreadable.
    """

    name: str
    iteration: int | None
    status: Status
    age_s: float
    nbytes: int | None = None
    is_named: bool = False
    failure: str = ""


@dataclass(frozen=True, slots=True)
class RetentionPolicy:
    """What is kept; without any of the first three nothing is removed.

    Attributes:
        last: that many complete ones, the newest; None to let all stay.
        every: those whose iteration is a multiple of it.
        removes_unfinished: whether what killed saves have left is removed.
        older_than_s: an unfinished one that changed less than so many seconds ago stays: its save
            may still be running.
    """

    last: int | None = None
    every: int | None = None
    removes_unfinished: bool = False
    older_than_s: float = 3600.0


@dataclass(frozen=True, slots=True)
class PruneDecision:
    """Whether one directory is removed, and why."""

    found: FoundCheckpoint
    is_removed: bool
    why: str


def build_prune_plan(
    found: Iterable[FoundCheckpoint], policy: RetentionPolicy
) -> tuple[PruneDecision, ...]:
    """Decide about each directory; the newest complete one is always kept.

    A damaged one does not count, and stays unless enough complete ones are newer. Newer is what has
    the larger iteration. Of those whose names end in no number, all older than the others,
    newer is what changed later. What was written last stays too, which is another one where a run
    was resumed from an older checkpoint, and so does what the run's tracker file names.

    Args:
        found: the directories.
        policy: what is to stay.

    Returns:
        In the order of removal: unfinished ones, then the oldest.

    Raises:
        PlanError: a number of the policy makes no sense.
    """
    for name, count in (("keep_last", policy.last), ("keep_every", policy.every)):
        if count is not None and count < 1:
            raise PlanError(f"{name} is {count}, expected 1 or more")
    if not policy.older_than_s >= 0:
        raise PlanError(f"older_than is {policy.older_than_s} s, expected 0 or more")
    ordered = sorted(found, key=_order)
    complete = [one for one in ordered if one.status is Status.COMPLETE]
    return tuple(
        _decision(one, policy, complete)
        for statuses in _REMOVAL_ORDER
        for one in ordered
        if one.status in statuses
    )


_REMOVAL_ORDER = (
    (Status.UNFINISHED,),
    (Status.COMPLETE, Status.DAMAGED),
    (Status.OTHER,),
    (Status.UNREADABLE,),
)


def _order(one: FoundCheckpoint) -> tuple[bool, int, float, str]:
    return one.iteration is not None, one.iteration or 0, -one.age_s, one.name


def _why_it_stays(
    one: FoundCheckpoint, policy: RetentionPolicy, complete: Sequence[FoundCheckpoint]
) -> str:
    """Why a complete or damaged one stays; empty where it does not."""
    is_damaged, every = one.status is Status.DAMAGED, policy.every or 0
    is_all_kept = policy.last is None and policy.every is None
    num_newer = sum(_order(other) > _order(one) for other in complete)
    latest = min(reversed(complete), key=lambda other: other.age_s, default=None)
    is_multiple = bool(every and one.iteration is not None and one.iteration % every == 0)
    reasons = (
        (
            is_damaged and (is_all_kept or num_newer < (policy.last or 1)),
            "damaged, and not counted; `dist-ckpt verify` lists the damage",
        ),
        (is_all_kept, "complete; kept without --keep-last or --keep-every"),
        (num_newer == 0, "the newest"),
        (one is latest, "written last"),
        (not is_damaged and num_newer < (policy.last or 0), f"one of the last {policy.last}"),
        (is_multiple, f"a multiple of {every}"),
        (one.is_named, "the run's tracker file names it"),
        (one.name == RELEASE, "a release"),
    )
    return next((why for applies, why in reasons if applies), "")


def _decision(
    one: FoundCheckpoint, policy: RetentionPolicy, complete: Sequence[FoundCheckpoint]
) -> PruneDecision:
    is_removed = False
    if one.status in {Status.COMPLETE, Status.DAMAGED}:
        why = _why_it_stays(one, policy, complete)
        is_removed, why = not why, why or f"{one.status}, and not to be kept"
    elif one.status is Status.OTHER:
        why = "not known to be a checkpoint of this package"
    elif one.status is Status.UNREADABLE:
        why = f"cannot be read: {one.failure}"
    elif not policy.removes_unfinished:
        why = "unfinished; kept without --unfinished"
    elif one.age_s < policy.older_than_s:
        why = f"unfinished, and may still be written: changed {one.age_s:.0f} s ago"
    else:
        is_removed, why = True, "unfinished: its save was killed"
    return PruneDecision(one, is_removed, why)
