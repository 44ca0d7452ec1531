"""Which checkpoints of a directory stay, and which go."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from dist_ckpt_strategies.errors import PlanError

RELEASE = "release"
"""How Megatron-LM names weights that belong to no iteration."""

_DAMAGED = "damaged, and counts for nothing; `dist-ckpt verify` says how"


class Standing(StrEnum):
    """What a directory is; the values are in the command's JSON.

    A complete one has a marker and a manifest that can be read. A damaged one lacks files besides.
    """

    COMPLETE = "complete"
    DAMAGED = "damaged"
    UNFINISHED = "unfinished"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class FoundCheckpoint:
    """A directory below the one that holds all checkpoints.

    Attributes:
        name: of the directory.
        iteration: the number that its name ends in; None where it ends in none.
        standing: what it is.
        age_s: since the newest change in it, in seconds.
        is_named: whether the run's own note says that this one is to be resumed.
    """

    name: str
    iteration: int | None
    standing: Standing
    age_s: float
    is_named: bool = False


@dataclass(frozen=True, slots=True)
class Keeping:
    """What is to stay; at least one of the first three says that anything goes.

    Attributes:
        last: that many complete ones, the newest; None to let all stay.
        every: those whose iteration is a multiple of it.
        removes_unfinished: whether what killed saves have left goes.
        older_than_s: an unfinished one that changed less than so many seconds ago stays: its save
            may still be running.
    """

    last: int | None = None
    every: int | None = None
    removes_unfinished: bool = False
    older_than_s: float = 3600.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """What becomes of one directory.

    Attributes:
        found: the directory.
        goes: whether it is removed.
        why: in words.
    """

    found: FoundCheckpoint
    goes: bool
    why: str


def build_prune_plan(found: Iterable[FoundCheckpoint], keeping: Keeping) -> tuple[Verdict, ...]:
    """Decide about each directory; the newest complete one stays, whatever is asked for.

    Newer is what has the larger iteration. Of those whose names end in no number, all older than
    the others, newer is what changed later. What was written last stays too, lest a run that went
    back should lose what it saved since, and so does what the run's own note names.

    Args:
        found: the directories.
        keeping: what is to stay.

    Returns:
        In the order of removal: unfinished ones, then the oldest.

    Raises:
        PlanError: a number of ``keeping`` is not one to count with.
    """
    _require_counts(keeping)
    ordered = sorted(found, key=_order)
    complete = [one for one in ordered if one.standing is Standing.COMPLETE]
    stays = _stays(complete, keeping)
    unfinished = [one for one in ordered if one.standing is Standing.UNFINISHED]
    others = [one for one in ordered if one.standing is Standing.OTHER]
    damaged = [one for one in ordered if one.standing is Standing.DAMAGED]
    return (
        *(_of_unfinished(one, keeping) for one in unfinished),
        *(_of_complete(one, stays) for one in complete),
        *(Verdict(one, goes=False, why=_DAMAGED) for one in damaged),
        *(Verdict(one, goes=False, why="no checkpoint of ours") for one in others),
    )


def relied_on(found: Iterable[FoundCheckpoint], keeping: Keeping) -> tuple[FoundCheckpoint, ...]:
    """The complete ones because of which older ones may go: they have to be whole."""
    complete = [one for one in sorted(found, key=_order) if one.standing is Standing.COMPLETE]
    return tuple(complete[-(keeping.last or 1) :])


def _require_counts(keeping: Keeping) -> None:
    for name, count in (("keep_last", keeping.last), ("keep_every", keeping.every)):
        if count is not None and count < 1:
            raise PlanError(f"{name} is {count}, expected 1 or more")
    if not keeping.older_than_s >= 0:
        raise PlanError(f"older_than is {keeping.older_than_s} s, expected 0 or more")


def _order(one: FoundCheckpoint) -> tuple[bool, int, float, str]:
    return one.iteration is not None, one.iteration or 0, -one.age_s, one.name


def _stays(complete: Sequence[FoundCheckpoint], keeping: Keeping) -> dict[str, str]:
    """Why each of those that stay does, by name."""
    if keeping.last is None and keeping.every is None:
        return {one.name: "complete; nothing said about those" for one in complete}
    stays: dict[str, str] = {}
    if complete:
        stays[complete[-1].name] = "the newest"
        latest = min(reversed(complete), key=lambda one: one.age_s)
        stays.setdefault(latest.name, "written last")
    for one in complete[max(0, len(complete) - (keeping.last or 0)) :]:
        stays.setdefault(one.name, f"one of the last {keeping.last}")
    for one in complete:
        if keeping.every and one.iteration is not None and one.iteration % keeping.every == 0:
            stays.setdefault(one.name, f"a multiple of {keeping.every}")
        if one.is_named:
            stays.setdefault(one.name, "the run's own note names it")
        if one.name == RELEASE:
            stays.setdefault(one.name, "a release")
    return stays


def _of_complete(one: FoundCheckpoint, stays: dict[str, str]) -> Verdict:
    if one.name in stays:
        return Verdict(one, goes=False, why=stays[one.name])
    return Verdict(one, goes=True, why="complete, and not to be kept")


def _of_unfinished(one: FoundCheckpoint, keeping: Keeping) -> Verdict:
    if not keeping.removes_unfinished:
        return Verdict(one, goes=False, why="unfinished; nothing said about those")
    if one.age_s < keeping.older_than_s:
        why = f"unfinished, and may still be written: changed {one.age_s:.0f} s ago"
        return Verdict(one, goes=False, why=why)
    return Verdict(one, goes=True, why="unfinished: its save was killed")
