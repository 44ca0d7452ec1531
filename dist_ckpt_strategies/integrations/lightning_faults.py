"""Faults on purpose, in a training of Lightning. Imports nothing of Lightning."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path


class FaultPoint(StrEnum):
    """Where in a step a rank fails."""

    BATCH_START = "batch start"
    FORWARD = "forward"
    AFTER_FORWARD = "after the forward pass"
    AFTER_BACKWARD = "after the backward pass"
    BEFORE_OPTIMIZER_STEP = "before the optimizer's step"
    BATCH_END = "batch end"


class FaultKind(StrEnum):
    """What happens to the rank."""

    EXCEPTION = "exception"
    """The training raises."""

    KILL = "SIGKILL"
    """The process is gone."""

    HANG = "hang"
    """The training waits for ever; the rest of the process is alive."""


class InjectedFaultError(Exception):
    """Raised on purpose."""


@dataclass(frozen=True, slots=True)
class PlannedFault:
    """One fault of one rank; it happens once.

    Attributes:
        global_rank: to whom.
        step: updates before it.
        point: in the step.
        kind: what happens.
    """

    global_rank: int
    step: int
    point: FaultPoint = FaultPoint.FORWARD
    kind: FaultKind = FaultKind.EXCEPTION


class FaultSchedule:
    """Faults, each of which happens once, however often its step is run.

    Args:
        faults: of all ranks.
        directory: where it is noted which have happened; it outlives the process.
    """

    def __init__(self, faults: Sequence[PlannedFault], directory: str | Path) -> None:
        self._faults = tuple(faults)
        self._directory = Path(directory)

    def reach(self, global_rank: int, step: int, point: FaultPoint) -> None:
        """A rank has come to a point of a step.

        Raises:
            InjectedFaultError: that is its fault.
        """
        for number, fault in enumerate(self._faults):
            here = (fault.global_rank, fault.step, fault.point) == (global_rank, step, point)
            if here and self._is_first(number):
                _happen(fault)

    def _is_first(self, number: int) -> bool:
        try:
            (self._directory / f"fault{number}").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


def _happen(fault: PlannedFault) -> None:
    match fault.kind:
        case FaultKind.EXCEPTION:
            raise InjectedFaultError(f"rank {fault.global_rank}, step {fault.step}: {fault.point}")
        case FaultKind.KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        case FaultKind.HANG:
            time.sleep(1e6)
