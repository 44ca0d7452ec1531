"""Faults: which rank, in which step, at which point of it, and what happens there."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from itertools import product
from pathlib import Path
from typing import Any, Self

_FIRST_STEP = 2
"""Of the first fault."""


class Point(StrEnum):
    """Where in a step a rank fails."""

    FORWARD = "forward"
    BACKWARD = "backward"
    REDUCED = "gradients reduced"
    BEFORE_VOTE = "before the vote"
    AFTER_VOTE = "after the vote"
    UPDATED = "shard updated"
    GATHERED = "weights gathered"


class Kind(StrEnum):
    """What happens to the rank."""

    EXCEPTION = "exception"
    """The block raises."""

    KILL = "SIGKILL"
    """The process is gone."""

    STOP = "SIGSTOP"
    """The process does nothing any more; nobody is told."""

    STUCK = "stuck"
    """The block waits for ever; the rest of the process is alive."""


class InjectedError(Exception):
    """Raised on purpose."""


@dataclass(frozen=True, slots=True)
class InjectedFault:
    """One fault.

    Attributes:
        number: of the run; every fault happens once.
        step: of the training.
        point: in the step.
        kind: what happens.
        global_ranks: to whom.
    """

    number: int
    step: int
    point: Point
    kind: Kind
    global_ranks: tuple[int, ...]

    def to_json(self) -> dict[str, Any]:
        """As JSON types."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Self:
        """What ``to_json`` gave."""
        point, kind = Point(fields["point"]), Kind(fields["kind"])
        return cls(fields["number"], fields["step"], point, kind, tuple(fields["global_ranks"]))


def every_fault(kinds: Sequence[Kind], global_ranks: Sequence[int]) -> tuple[InjectedFault, ...]:
    """Each kind at each point on each of the ranks, one per step, in an order that mixes them."""
    found = list(product(kinds, Point, global_ranks))
    random.Random(0).shuffle(found)  # noqa: S311 - not a secret
    return tuple(
        InjectedFault(number, _FIRST_STEP + number, point, kind, (rank,))
        for number, (kind, point, rank) in enumerate(found)
    )


def random_faults(
    seed: int, num_faults: int, num_ranks: int, kinds: Sequence[Kind]
) -> tuple[InjectedFault, ...]:
    """Faults of any rank, kind and point, two to four steps apart; equal for an equal seed.

    Not one: while a rank hangs behind its vote, others come as far as the next step's, and with a
    fault there both holders of a shard may be gone at once.
    """
    rng = random.Random(seed)  # noqa: S311 - not a secret
    step = _FIRST_STEP
    found = []
    for number in range(num_faults):
        point, kind = rng.choice(tuple(Point)), rng.choice(tuple(kinds))
        found.append(InjectedFault(number, step, point, kind, (rng.randrange(num_ranks),)))
        step += rng.randint(2, 4)
    return tuple(found)


class FaultInjector:
    """Makes the faults of this rank happen, each once in the whole run.

    Args:
        faults: of all ranks.
        global_rank: this one.
        fired: directory where it is noted which have happened; it outlives the process.
        note: called with a fault right before it happens.
    """

    def __init__(
        self,
        faults: Sequence[InjectedFault],
        global_rank: int,
        fired: Path,
        note: Callable[[InjectedFault], None],
    ) -> None:
        self._mine = [fault for fault in faults if global_rank in fault.global_ranks]
        self._global_rank = global_rank
        self._fired = fired
        self._note = note

    def reach(self, step: int, point: Point) -> None:
        """This rank has come to a point of a step.

        Raises:
            InjectedError: that is its fault.
        """
        for fault in self._due(step, point):
            self._note(fault)
            _happen(fault)

    def _due(self, step: int, point: Point) -> Iterator[InjectedFault]:
        for fault in self._mine:
            if (fault.step, fault.point) == (step, point) and self._is_first(fault):
                yield fault

    def _is_first(self, fault: InjectedFault) -> bool:
        try:
            (self._fired / f"{fault.number}.{self._global_rank}").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


def _happen(fault: InjectedFault) -> None:
    match fault.kind:
        case Kind.EXCEPTION:
            raise InjectedError(f"fault {fault.number}: {fault.point}")
        case Kind.KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        case Kind.STOP:
            os.kill(os.getpid(), signal.SIGSTOP)
        case Kind.STUCK:
            time.sleep(1e6)
