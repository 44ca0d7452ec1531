"""Faults injected into a training of Lightning. Imports nothing of Lightning."""

import os
import signal
import time
from dataclasses import dataclass
from enum import StrEnum


class FaultPoint(StrEnum):
    """The point in a step at which a rank fails."""

    BATCH_START = "batch start"
    FORWARD = "forward"
    AFTER_FORWARD = "after the forward pass"
    AFTER_BACKWARD = "after the backward pass"
    BEFORE_OPTIMIZER_STEP = "before the optimizer's step"
    BATCH_END = "batch end"


class FaultKind(StrEnum):
    """The fault itself."""

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
        global_rank: the rank that fails.
        step: number of updates before it.
        point: where in the step.
        kind: what happens.
    """

    global_rank: int
    step: int
    point: FaultPoint = FaultPoint.FORWARD
    kind: FaultKind = FaultKind.EXCEPTION


def cause_fault(fault: PlannedFault) -> None:
    """Fail as planned."""
    match fault.kind:
        case FaultKind.EXCEPTION:
            raise InjectedFaultError(f"rank {fault.global_rank}, step {fault.step}: {fault.point}")
        case FaultKind.KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        case FaultKind.HANG:
            time.sleep(1e6)
