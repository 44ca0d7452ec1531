"""Steps of training on a core of their own, for what goes on beside them to slow down."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

_WIDTH = 160
_NUM_TRIALS = 200
_TASKS = Path("/proc/self/task")


@dataclass(frozen=True, slots=True)
class Schedule:
    """How training goes.

    Attributes:
        training_core: where the steps run, alone.
        writing_core: where everything else of the process does.
        step_seconds: of a step, about.
        num_idle: steps before and after a save.
    """

    training_core: int
    writing_core: int
    step_seconds: float
    num_idle: int


@dataclass(frozen=True, slots=True)
class Steps:
    """How long each step of training took, in seconds.

    Attributes:
        before: with nothing else going on.
        during: those that began while a save was being written.
        after: with nothing else going on, again.
        begin_seconds: what the save held training up for.
        finish_seconds: what ending it did.
    """

    before: tuple[float, ...]
    during: tuple[float, ...]
    after: tuple[float, ...]
    begin_seconds: float
    finish_seconds: float


def run_beside(
    schedule: Schedule,
    begin: Callable[[], object],
    is_done: Callable[[], bool],
    finish: Callable[[], object],
) -> Steps:
    """Run steps before, during and after what ``begin`` starts. On the main thread."""
    os.sched_setaffinity(0, {schedule.training_core})
    step = _build_step(schedule.step_seconds)
    before = [step() for _ in range(schedule.num_idle)]
    # Threads and processes that are started here are born where their maker is.
    os.sched_setaffinity(0, {schedule.writing_core})
    begin_seconds = timed(begin)
    _move_others(schedule.writing_core)
    os.sched_setaffinity(0, {schedule.training_core})
    during = [step()]
    while not is_done():
        during.append(step())
    finish_seconds = timed(finish)
    after = [step() for _ in range(schedule.num_idle)]
    os.sched_setaffinity(0, {schedule.training_core, schedule.writing_core})
    return Steps(tuple(before), tuple(during), tuple(after), begin_seconds, finish_seconds)


def timed(body: Callable[[], object]) -> float:
    """How many seconds it takes."""
    started = time.perf_counter()
    body()
    return time.perf_counter() - started


def _build_step(step_seconds: float) -> Callable[[], float]:
    """A step of about so long: many small products on one thread, each a call from Python."""
    left, right, out = (torch.ones(_WIDTH, _WIDTH) for _ in range(3))

    def run(num_calls: int) -> None:
        for _ in range(num_calls):
            torch.mm(left, right, out=out)

    run(_NUM_TRIALS)
    trial_seconds = timed(lambda: run(_NUM_TRIALS))
    num_calls = max(1, round(_NUM_TRIALS * step_seconds / trial_seconds))
    return lambda: timed(lambda: run(num_calls))


def _move_others(core: int) -> None:
    """Have every thread but the main one run on one core."""
    for task in _TASKS.iterdir():
        if int(task.name) != os.getpid():  # the main thread's number is that of the process
            with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                os.sched_setaffinity(int(task.name), {core})
