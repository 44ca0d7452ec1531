"""Deal boxes out to the ranks that read them, evenly, and to rounds that bound the memory."""

from __future__ import annotations

import bisect
import heapq
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
    least = [(0, rank) for rank in range(num_ranks)]
    share = -(-sum(run.nbytes for run in runs) // num_ranks)
    members = _members(audiences, num_ranks)
    found = [0] * len(runs)
    for number in sorted(range(len(runs)), key=lambda n: (-runs[n].nbytes, n)):
        nbytes, wanting = runs[number].nbytes, members[runs[number].audience]
        reader = _least_loaded(least, read) if wanting is None else _least_of(wanting, read)
        if wanting is not None and read[reader] + nbytes > share:
            reader = _least_loaded(least, read)
        read[reader] += nbytes
        heapq.heappush(least, (int(read[reader]), reader))
        found[number] = reader
    return found


def _members(audiences: Audiences, num_ranks: int) -> list[Table | None]:
    """The ranks of each audience; None for all of the group, which are not worth counting out."""
    return [np.array(a) if len(a) < num_ranks else None for a in audiences]


def _least_of(ranks: Table, read: Table) -> int:
    """The first of the ranks that has read least of them."""
    return int(ranks[read[ranks].argmin()])


def _least_loaded(least: list[tuple[int, int]], read: Table) -> int:
    """The rank that has read least; entries of the heap that are out of date are dropped."""
    while read[least[0][1]] != least[0][0]:
        heapq.heappop(least)
    return least[0][1]


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
    members = _members(audiences, num_ranks)
    whole = _Held(num_ranks)
    for run, reader in zip(runs, readers, strict=True):
        whole.add(run.nbytes, members[run.audience], reader)
    limit = min(limit_nbytes, -(-whole.most() // _MIN_ROUNDS))
    found: list[Bundle] = []
    held, number = _Held(num_ranks), 0
    for position in _in_turns(readers):
        run, reader = runs[position], readers[position]
        most = held.most_of(members[run.audience], reader)
        if most and most + run.nbytes > limit:
            held = _Held(num_ranks)
            number += 1
        held.add(run.nbytes, members[run.audience], reader)
        found.append(Bundle(number, reader, run.first, run.stop, run.nbytes, run.audience))
    return found


class _Held:
    """Bytes that each rank reads or receives; what all of them do is counted once."""

    def __init__(self, num_ranks: int) -> None:
        self._by_all = 0
        self._by_rank = np.zeros(num_ranks, np.int64)
        self._most_by_one = 0

    def add(self, nbytes: int, members: Table | None, reader: int) -> None:
        """Count what an audience gets, None for all ranks, and the reader if it is none of them."""
        if members is None:
            self._by_all += nbytes
            return
        before = self._by_rank[reader]
        self._by_rank[members] += nbytes
        self._by_rank[reader] = before + nbytes
        most = max(int(self._by_rank[members].max()), int(self._by_rank[reader]))
        self._most_by_one = max(self._most_by_one, most)

    def most(self) -> int:
        """The most that a rank holds."""
        return self._by_all + self._most_by_one

    def most_of(self, members: Table | None, reader: int) -> int:
        """The most that one of these ranks holds; of all ranks, where ``members`` is None."""
        if members is None:
            return self.most()
        own = max(int(self._by_rank[members].max()), int(self._by_rank[reader]))
        return self._by_all + own


def _in_turns(readers: Sequence[int]) -> list[int]:
    """Positions of the first run of every reader, then of the second of every reader, and so on."""
    turns: dict[int, int] = defaultdict(int)
    order = []
    for position, reader in enumerate(readers):
        order.append((turns[reader], reader, position))
        turns[reader] += 1
    return [position for _, _, position in sorted(order)]
