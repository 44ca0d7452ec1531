"""Saves in which a rank is killed."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.measuring.harness import Bereaved, RankFailedError, Ranks


class CampaignError(Exception):
    """Something that must never happen did, outside the case that is being judged."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """A save in which a rank is to be killed.

    Attributes:
        number: of the case.
        method: of the worker: ``save`` or ``save_behind``.
        victim: the rank.
        delay_s: how long after the begin.
        iteration: that is saved; the one before is complete.
    """

    number: int
    method: str
    victim: int
    delay_s: float
    iteration: int


def ended(ranks: Ranks, attempt: Attempt) -> Bereaved:
    """How it ended for the others.

    Raises:
        CampaignError: one of them failed, or did not end in time.
    """
    one = attempt
    try:
        return ranks.step_killing(one.victim, one.delay_s, one.method, one.iteration)
    except RankFailedError as error:
        raise CampaignError(f"{attempt}: {error}") from error
