"""Break ranks of a training at random: does it go on as if nothing had happened?

    python benchmarks/recovery_faults.py --out recovery_faults.jsonl
    python benchmarks/recovery_faults.py --smoke
    python benchmarks/recovery_faults.py --faults 50 --kind SIGKILL --steps-apart 300

Four gloo ranks, two replicas of two shards, train a small GPT with dropout under ``dist-ckpt run``.
A rank raises, is killed, is stopped or waits for ever, at a random point of a step; a few steps
later the next one. In every second job a spare waits to take over. At the end of each job weights,
moments, random numbers and every loss that any rank has computed have to be those of a run without
a fault, bit for bit, and every recovery has to have come from memory. Faults follow each other so
fast that the next spare is often still starting; with ``--steps-apart 300`` it waits.

Times are from the fault until all ranks are in a step again; those of SIGSTOP and of a stuck rank
from its detection on.

Ends with status 1 at the first job that differs or hangs, and says its seed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script finds its neighbours only

import typer

from benchmarks.common.command_line import NOWHERE, SMOKE_SHARE, Directory, Out, Smoke, open_output
from benchmarks.common.disks import workspace
from benchmarks.recovery.job import (
    NUM_RANKS,
    InjectedFault,
    JobTask,
    Kind,
    Outcome,
    differences,
    random_faults,
    recovery_seconds,
    run_job,
)

FAULTS_PER_JOB = 25
_STEPS_AFTER = 3
_TRAINING_SEED = 5


class ViolationError(Exception):
    """Something that must never happen did."""


@dataclass(frozen=True, slots=True)
class Campaign:
    """What is asked for.

    Attributes:
        seed: of all faults.
        num_faults: in all jobs together.
        timeout_s: longest time for one job.
        kinds: of the faults.
        steps_apart: from one fault to the next, so that a new spare is ready by then; 0: two to
            four, at random.
    """

    seed: int
    num_faults: int
    timeout_s: float
    kinds: tuple[Kind, ...] = tuple(Kind)
    steps_apart: int = 0

    def jobs(self) -> Iterator[tuple[int, tuple[InjectedFault, ...]]]:
        """Number and faults of each."""
        left, number = self.num_faults, 0
        while left > 0:
            count = min(left, FAULTS_PER_JOB)
            seed = 1000 * self.seed + number
            faults = random_faults(seed, count, NUM_RANKS, self.kinds)
            if self.steps_apart:
                faults = tuple(
                    replace(fault, step=(1 + fault.number) * self.steps_apart) for fault in faults
                )
            yield number, faults
            left, number = left - count, number + 1


@dataclass(frozen=True, slots=True)
class Recovery:
    """One fault, and what came after it.

    Attributes:
        job: its number.
        fault: what happened.
        num_spares: that were waiting.
        seconds: until all ranks were in a step again.
    """

    job: int
    fault: InjectedFault
    num_spares: int
    seconds: float


def run_jobs(campaign: Campaign, root: Path) -> Iterator[Recovery]:
    """The recoveries of all jobs.

    Raises:
        ViolationError: a job hung, ended badly, or something differs.
    """
    longest = max(faults[-1].step for _, faults in campaign.jobs()) + _STEPS_AFTER
    task = JobTask(root / "reference", longest, _TRAINING_SEED)
    reference = run_job(task, 0, campaign.timeout_s)
    for number, faults in campaign.jobs():
        num_spares = number % 2
        task = JobTask(root / str(number), longest, _TRAINING_SEED, faults)
        outcome = run_job(task, num_spares, campaign.timeout_s)
        seconds = recovery_seconds(outcome, faults)
        wrong = [*differences(outcome, reference), *_unrecovered(outcome, faults, seconds)]
        if wrong:
            raise ViolationError(f"job {number}: " + "\n".join(wrong))
        for fault in faults:
            yield Recovery(number, fault, num_spares, seconds[fault.number] or 0.0)


def _unrecovered(
    outcome: Outcome, faults: Sequence[InjectedFault], seconds: Mapping[int, float | None]
) -> Iterator[str]:
    for fault in faults:
        if seconds.get(fault.number) is None:
            yield f"fault {fault.number} did not happen, or no step came after it"
    for event in outcome.events:
        if event["event"] == "loaded" and event["epoch"] > 1 and event["source"] != "memory":
            yield f"epoch {event['epoch']}: rank {event['rank']} has its state from nowhere"


def main(  # noqa: PLR0913 - the options of a command
    *,
    faults: Annotated[int, typer.Option(min=1, help="Faults, all jobs together.")] = 500,
    seed: Annotated[int, typer.Option(help="Of the faults.")] = 0,
    directory: Directory = None,
    out: Out = NOWHERE,
    smoke: Smoke = False,
    timeout_s: Annotated[float, typer.Option(help="Longest time for one job.")] = 600.0,
    kind: Annotated[Kind | None, typer.Option(help="Of all faults. Default: any.")] = None,
    steps_apart: Annotated[int, typer.Option(min=0, help="Between faults; 0: 2 to 4.")] = 0,
) -> None:
    """Break ranks of a training at random: does it go on as if nothing had happened?"""
    num_faults = faults // (SMOKE_SHARE if smoke else 1)
    kinds = tuple(Kind) if kind is None else (kind,)
    campaign = Campaign(seed, num_faults, timeout_s, kinds, steps_apart)
    count = 0
    with open_output(out, "recovery_faults.py") as output, workspace(directory) as root:
        try:
            for count, one in enumerate(run_jobs(campaign, root), 1):  # noqa: B007 - used below
                output.write("recovery", one)
        except ViolationError as violation:
            output.write("violation", {"why": str(violation), "seed": seed})
            typer.echo(f"VIOLATION with --seed {seed}: {violation}", err=True)
            raise typer.Exit(1) from violation
        output.write("campaign", campaign, violations=0, faults=count)


if __name__ == "__main__":
    typer.run(main)
