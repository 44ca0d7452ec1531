"""The interface between a rank and the rendezvous of a job: places, barriers, faults.

A *restart round* is one attempt of all ranks to run the function together. The rendezvous numbers
them; numbers grow, and may be skipped.
"""

import signal
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

EXIT_PREEMPTED = 128 + signal.SIGTERM
"""Exit code of a rank that has left because of SIGTERM, with its work saved: no death. A process
that the signal itself killed has a negative one."""


class FaultMode(StrEnum):
    """Kind of a rank's failure."""

    EXCEPTION = "exception"
    """The function raised; the process is alive."""

    DEATH = "death"
    """The process is gone."""

    HANG = "hang"
    """No sign of progress for too long."""

    UNHEALTHY = "unhealthy"
    """The process or its device has failed a check of the agent."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a round has ended.

    Attributes:
        global_rank: the rank that failed first; None if unknown.
        restart_round: number of the attempt that it ended.
        mode: kind of fault.
        why: text for logs and errors.
    """

    global_rank: int | None
    restart_round: int
    mode: FaultMode
    why: str

    def __str__(self) -> str:
        """One line for a log."""
        who = "a rank" if self.global_rank is None else f"rank {self.global_rank}"
        return f"{who}: {self.mode} in restart round {self.restart_round}: {self.why}"


@dataclass(frozen=True, slots=True)
class RankInfo:
    """The place of a process in the job.

    Attributes:
        global_rank: rank among all processes.
        local_rank: rank among the processes of its node.
        world_size: number of ranks of the job.
        local_world_size: number of ranks of this node.
        environment: variables that the process needs for this place, such as ``MASTER_ADDR``.
    """

    global_rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    environment: tuple[tuple[str, str], ...] = ()


_NUMBERS = {
    "RANK": "global_rank",
    "LOCAL_RANK": "local_rank",
    "WORLD_SIZE": "world_size",
    "LOCAL_WORLD_SIZE": "local_world_size",
}


def environment_of(place: RankInfo) -> dict[str, str]:
    """The variables of a place, as torchrun names them."""
    numbers = {name: str(getattr(place, field)) for name, field in _NUMBERS.items()}
    return numbers | dict(place.environment)


def place_of(variables: Mapping[str, object]) -> RankInfo:
    """The place that variables state; a ValueError names a number that is missing, or is none.

    Variables that torchrun does not name are its environment.
    """
    wrong = [name for name in _NUMBERS if not str(variables.get(name, "")).isdecimal()]
    if wrong:
        found = ", ".join(f"{name}={variables.get(name)!r}" for name in wrong)
        raise ValueError(f"expected numbers as {', '.join(_NUMBERS)}, found {found}")
    numbers = {field: int(str(variables[name])) for name, field in _NUMBERS.items()}
    rest = sorted((str(k), str(v)) for k, v in variables.items() if k not in _NUMBERS)
    return RankInfo(**numbers, environment=tuple(rest))


class RendezvousClient(Protocol):
    """One rank's connection to the other ranks that does not need a process group.

    Methods may be called from several threads at the same time; none blocks another. Each raises
    PeerLostError if the rendezvous is gone. docs/design/recovery.md has the protocol.
    """

    def wait_rank(self, timeout_s: float | None = None) -> RankInfo:
        """This process's place; a spare waits here until it gets one.

        Raises:
            PeerTimeoutError: it got none in time.
        """

    def barrier(self, timeout_s: float) -> int:
        """Join the forming round; return its number once every rank of the world has joined.

        Faults while it forms only make it another round; the wait continues.

        Raises:
            PeerTimeoutError: ranks are missing; names them.
        """

    def wait_fault(self, restart_round: int, timeout_s: float) -> Fault | None:
        """The fault that ended a round, as soon as there is one; None after ``timeout_s``."""

    def report(self, global_rank: int, restart_round: int, mode: FaultMode, why: str) -> None:
        """End a round for all ranks. The first report counts; none against an ended round."""

    def finish(self, restart_round: int, timeout_s: float) -> bool:
        """Say that this rank has returned from the block; wait for the others.

        True once all have; False as soon as a fault ends the round.

        Raises:
            PeerTimeoutError: neither happened in time.
        """

    def close(self) -> None:
        """Give up the connections. Nothing may be asked afterwards."""
