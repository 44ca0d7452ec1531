"""Save one GPT-like state behind training: what does training wait for, and what slows it down?

    python benchmarks/async_save.py --out async_save.jsonl
    python benchmarks/async_save.py --smoke

Two parts, alternating contenders, medians; the first round of each is not counted.

``blocking``: two ranks. Seconds until the call returns and the tensors may be overwritten, beside a
copy of the rank's bytes into memory that is in use; and seconds until the checkpoint is there. What
the last round has saved is loaded and compared.

``training``: one rank, whose main thread runs steps of small matrix products on one core, while all
other threads and processes of the save are held to another. Steps with nothing else going on, timed
in the same round just before and after, are what its steps are compared with. ``raw writer`` is a
process that writes the same number of bytes and flushes them: what the machine itself takes from a
neighbour. ``idle`` is nothing: the noise.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Annotated

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script finds its neighbours only

import typer

from benchmarks.contenders.roster import (
    ASYNC_PACKAGES,
    BLOCKING_ONLY,
    IDLE,
    MEMCPY,
    QUEUE,
    RAW_WRITER,
    TRAINING_ONLY,
)
from benchmarks.measuring.command_line import Contest, Output, among, contest_command
from benchmarks.measuring.disks import file_system, fresh, touch_memory, workspace
from benchmarks.measuring.gpt_state import GptSize
from benchmarks.measuring.harness import Ranks, alternate, made_in
from benchmarks.measuring.measures import (
    SECONDS,
    Column,
    Measure,
    build_measure_table,
    ratio_column,
    seconds_column,
    summarise_measures,
)
from benchmarks.measuring.timings import Case
from benchmarks.measuring.training_steps import Schedule, Steps

BLOCKING, TRAINING = "blocking", "training"
PARTS = (BLOCKING, TRAINING)
UNTIL_THERE = "until_there"
SLOWDOWN, WORST, WORST_IDLE, NUM_STEPS = "slowdown", "worst", "worst_idle", "num_steps"
BEGIN, FINISH = "begin_seconds", "finish_seconds"

_OF_IDLE = "steps, of those of an idle machine"
_WORKER = "benchmarks.ranks.async_save"
_NUM_RANKS = 2
_NUM_IDLE = 12
"""Steps before and after each save."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How long steps of training are, and how many there are before and after each save."""

    step_seconds: float
    num_idle: int


@dataclass(frozen=True, slots=True)
class AsyncCase(Case):
    """One part, size and file system.

    Attributes:
        part: ``BLOCKING`` or ``TRAINING``.
        step_seconds: of a step of training, about.
        shares_core: whether the two processors that take part are threads of one core.
    """

    part: str = BLOCKING
    step_seconds: float = 0.0
    shares_core: bool = False

    def __str__(self) -> str:
        """For the title of a table."""
        return f"{self.part}, {Case.__str__(self)}"


def run_blocking(size: GptSize, contest: Contest, output: Output) -> None:
    """Time what is waited for, in every place."""
    names = [name for name in contest.names if name not in TRAINING_ONLY]
    make = made_in(_WORKER, size, names)
    with Ranks(_NUM_RANKS, make, timeout_s=contest.timeout_s, preload=(_WORKER,)) as ranks:
        nbytes = sum(ranks.step("nbytes").values)
        for place in contest.places:
            case = AsyncCase(file_system(place), nbytes, size.num_arrays, _NUM_RANKS)
            with workspace(place) as directory:
                rounds = _blocking_rounds(ranks, case, directory, names, contest.repetitions)
                measures = output.write_samples(case, rounds)
                for name in names:
                    ranks.step("check", name, directory / name)
            summaries = summarise_measures(measures, names, (MEMCPY, QUEUE))
            table = build_measure_table(f"{case}: median seconds", summaries, _BLOCKING_COLUMNS)
            output.write_summaries(case, summaries, table)


def _blocking_rounds(
    ranks: Ranks, case: Case, directory: Path, names: Sequence[str], repetitions: int
) -> Iterator[Measure]:
    for repetition, name in alternate(names, repetitions + 1):
        target = fresh(directory, name)
        touch_memory(case.held_nbytes)
        seconds = ranks.step("begin", name, target).seconds
        finishing = ranks.step("finish", name).seconds
        if repetition > 0:
            values = {SECONDS: seconds, UNTIL_THERE: seconds + finishing}
            yield Measure(BLOCKING, name, repetition, values)


def run_training(
    size: GptSize, contest: Contest, cores: Sequence[int], pace: Pace, output: Output
) -> None:
    """Time steps of training beside saves, in every place."""
    names = [name for name in contest.names if name not in BLOCKING_ONLY]
    make = made_in(_WORKER, size, names)
    schedule = Schedule(cores[-1], cores[0], pace.step_seconds, pace.num_idle)
    with Ranks(1, make, timeout_s=contest.timeout_s, preload=(_WORKER,)) as ranks:
        nbytes = ranks.step("nbytes").values[0]
        for place in contest.places:
            plain = AsyncCase(file_system(place), nbytes, size.num_arrays, 1, part=TRAINING)
            shares_core = _share_core(cores[0], cores[-1])
            case = replace(plain, step_seconds=pace.step_seconds, shares_core=shares_core)
            with workspace(place) as directory:
                training = _Training(ranks, case, directory, schedule, output)
                rounds = training.rounds(names, contest.repetitions)
                measures = output.write_samples(case, rounds)
            summaries = summarise_measures(measures, names, (IDLE, RAW_WRITER))
            table = build_measure_table(f"{case}: {_OF_IDLE}", summaries, _TRAINING_COLUMNS)
            output.write_summaries(case, summaries, table)


@dataclass(frozen=True, slots=True)
class _Training:
    """Training in one place."""

    ranks: Ranks
    case: AsyncCase
    directory: Path
    schedule: Schedule
    output: Output

    def rounds(self, names: Sequence[str], repetitions: int) -> Iterator[Measure]:
        """Train beside every contender in turn; every step is written too."""
        for repetition, name in alternate(names, repetitions + 1):
            target = fresh(self.directory, name)
            touch_memory(self.case.held_nbytes)
            (steps,) = self.ranks.step("train", name, target, self.schedule).values
            if repetition > 0:
                about = {"contender": name, "repetition": repetition, "case": self.case}
                self.output.lines.write("steps", steps, **about)
                yield Measure(TRAINING, name, repetition, _of_steps(steps))


def _of_steps(steps: Steps) -> dict[str, float]:
    """What the steps of one save amount to; ratios are to the median of idle ones."""
    idle = [*steps.before, *steps.after]
    usual = median(idle)
    return {
        SECONDS: median(steps.during),
        SLOWDOWN: median(steps.during) / usual,
        WORST: max(steps.during) / usual,
        WORST_IDLE: max(idle) / usual,
        NUM_STEPS: len(steps.during),
        BEGIN: steps.begin_seconds,
        FINISH: steps.finish_seconds,
    }


def _share_core(one: int, other: int) -> bool:
    path = Path(f"/sys/devices/system/cpu/cpu{one}/topology/core_cpus_list")
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError:
        return False
    ranges = [[int(end) for end in part.split("-")] for part in text.split(",")]
    return any(ends[0] <= other <= ends[-1] for ends in ranges)


def _median_column(title: str, name: str) -> Column:
    return Column(title, lambda summary: f"{summary.medians[name]:.2f}")


_BLOCKING_COLUMNS = (
    seconds_column("blocks"),
    ratio_column(MEMCPY),
    ratio_column(QUEUE),
    seconds_column("until it is there", UNTIL_THERE),
)
_TRAINING_COLUMNS = (
    Column("steps", lambda summary: f"{summary.medians[NUM_STEPS]:.0f}"),
    _median_column("median step", SLOWDOWN),
    _median_column("worst", WORST),
    Column("worst of all", lambda summary: f"{summary.maxima[WORST]:.2f}"),
    _median_column("worst idle", WORST_IDLE),
    seconds_column("begin, s", BEGIN),
    seconds_column("finish, s", FINISH),
)


@contest_command(ASYNC_PACKAGES, (MEMCPY, IDLE, RAW_WRITER))
def main(
    contest: Contest,
    output: Output,
    *,
    part: Annotated[
        list[str] | None, typer.Option(help="blocking or training.", callback=among(PARTS))
    ] = None,
    step_ms: Annotated[float, typer.Option(min=1, help="Of a step of training.")] = 70.0,
) -> None:
    """Save one GPT-like state behind training with every contender in turn."""
    parts = part or PARTS
    cores = sorted(os.sched_getaffinity(0))
    has_two = len(cores) > 1
    if TRAINING in parts and not has_two:
        output.skip(TRAINING, "one core only: there is none to write on beside training")
    pace = Pace(0.002, 3) if contest.is_smoke else Pace(step_ms / 1000, _NUM_IDLE)
    for size in contest.sizes:
        if BLOCKING in parts:
            run_blocking(size, contest, output)
        if TRAINING in parts and has_two:
            run_training(size, contest, cores, pace, output)


if __name__ == "__main__":
    typer.run(main)
