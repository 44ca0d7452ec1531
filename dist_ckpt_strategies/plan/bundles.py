"""Deal boxes out to the ranks that read them, evenly, and to rounds that bound the memory."""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dist_ckpt_strategies.plan.pieces import Audiences, Pieces
from dist_ckpt_strategies.spec.box import BoxTable, Table

_MIN_ROUNDS = 6
"""So that reading one round hides behind sending another."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """Boxes that one rank reads in one round for the same ranks.

    Attributes:
        round: in which it is read and sent.
        reader: the rank that reads them, counted in the group.
        first: the first of them, as a row of the table.
        stop: the row after the last.
        nbytes: bytes of all of them.
        audience: number of the ranks that want them.
    """

    round: int
    reader: int
    first: int
    stop: int
    nbytes: int
    audience: int


@dataclass(frozen=True, slots=True)
class _Run:
    """Boxes that the same ranks want, by their rows, before they have a reader."""

    first: int
    stop: int
    nbytes: int
    audience: int


def build_bundles(
    pieces: Pieces, num_ranks: int, *, bundle_nbytes: int, round_nbytes: int
) -> list[Bundle]:
    """Every box in a bundle, by round; all ranks read about the same.

    Largest first, bundles go to a rank that wants them while that rank has read less than its
    share, else to the rank that has read least.

    Args:
        pieces: boxes in the order of the table; those that the same ranks want are neighbours.
        num_ranks: ranks of the group; any of them may read for the others.
        bundle_nbytes: bound on a bundle of several boxes.
        round_nbytes: bound on what a rank reads and receives in a round; a larger bundle is alone.
    """
    runs = _runs(pieces.boxes, pieces.audience, bundle_nbytes)
    readers = _readers(runs, pieces.audiences, num_ranks)
    return _in_rounds(runs, readers, pieces.audiences, num_ranks, round_nbytes)


def _runs(boxes: BoxTable, audience: Table, limit_nbytes: int) -> list[_Run]:
    """Boxes that the same ranks want, in runs; none above the limit if it has several boxes."""
    ends: list[int] = [0, *np.cumsum(boxes.nbytes).tolist()]
    stops = np.flatnonzero(np.diff(audience, append=-1)) + 1
    found, first = [], 0
    for stop in stops.tolist():
        wanting = int(audience[first])
        while first < stop:
            after = bisect.bisect_right(ends, ends[first] + limit_nbytes, first, stop + 1) - 1
            after = max(after, first + 1)
            found.append(_Run(first, after, ends[after] - ends[first], wanting))
            first = after
    return found


def _readers(runs: Sequence[_Run], audiences: Audiences, num_ranks: int) -> list[int]:
    """Who reads each run."""
    read = np.zeros(num_ranks, np.int64)
    share = -(-sum(run.nbytes for run in runs) // num_ranks)
    members = [np.array(audience) for audience in audiences]
    found = [0] * len(runs)
    for number in sorted(range(len(runs)), key=lambda n: (-runs[n].nbytes, n)):
        run = runs[number]
        wanting = members[run.audience]
        reader = int(wanting[read[wanting].argmin()])
        if read[reader] + run.nbytes > share:
            reader = int(read.argmin())
        read[reader] += run.nbytes
        found[number] = reader
    return found


def _in_rounds(
    runs: Sequence[_Run],
    readers: Sequence[int],
    audiences: Audiences,
    num_ranks: int,
    limit_nbytes: int,
) -> list[Bundle]:
    """Every run with its reader and round, by round.

    Readers take turns, each in the order of the table, which is the order of the files. A round
    ends where a rank would read and receive more than the limit.
    """
    concerned = _Concerned(audiences)
    per_rank = np.zeros(num_ranks, np.int64)
    for run, reader in zip(runs, readers, strict=True):
        per_rank[concerned.by(run.audience, reader)] += run.nbytes
    limit = min(limit_nbytes, -(-int(per_rank.max(initial=0)) // _MIN_ROUNDS))
    found: list[Bundle] = []
    held, number = np.zeros(num_ranks, np.int64), 0
    for position in _in_turns(readers):
        run, reader = runs[position], readers[position]
        ranks = concerned.by(run.audience, reader)
        most = int(held[ranks].max())
        if most and most + run.nbytes > limit:
            held[:] = 0
            number += 1
        held[ranks] += run.nbytes
        found.append(Bundle(number, reader, run.first, run.stop, run.nbytes, run.audience))
    return found


class _Concerned:
    """The ranks that read or receive what an audience wants."""

    def __init__(self, audiences: Audiences) -> None:
        self._members = [np.array(audience) for audience in audiences]
        self._found: dict[tuple[int, int], Table] = {}

    def by(self, audience: int, reader: int) -> Table:
        """The audience, and the reader if it is none of them."""
        found = self._found.get((audience, reader))
        if found is None:
            found = np.union1d(self._members[audience], [reader])
            self._found[audience, reader] = found
        return found


def _in_turns(readers: Sequence[int]) -> list[int]:
    """Positions of the first run of every reader, then of the second of every reader, and so on."""
    turns: dict[int, int] = defaultdict(int)
    order = []
    for position, reader in enumerate(readers):
        order.append((turns[reader], reader, position))
        turns[reader] += 1
    return [position for _, _, position in sorted(order)]
