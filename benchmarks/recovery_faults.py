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

import json
import os
import pickle
import random
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script finds its neighbours only

import typer

from benchmarks.common.command_line import (
    NOWHERE,
    ROOT,
    SMOKE_SHARE,
    Directory,
    Out,
    Smoke,
    open_output,
)
from benchmarks.common.disks import workspace
from benchmarks.recovery_training import NUM_RANKS, InjectedFault, JobTask, Kind, Point

FAULTS_PER_JOB = 25
_FIRST_STEP = 2
_STEPS_AFTER = 3
_TRAINING_SEED = 5
_HEARTBEAT_TIMEOUT_S = 3.0
_NUM_TAIL_LINES = 30
_EXIT_TIMEOUT_S = 10.0
_GONE = " is gone: "


def random_faults(
    seed: int, num_faults: int, num_ranks: int, kinds: Sequence[Kind]
) -> tuple[InjectedFault, ...]:
    """Faults of any rank, kind and point, two to four steps apart; equal for an equal seed.

    Not one step apart: while a rank hangs after its vote, others reach the next step's vote, and a
    fault there could take both replicas of a shard.
    """
    rng = random.Random(seed)  # noqa: S311 - not a secret
    step = _FIRST_STEP
    found = []
    for number in range(num_faults):
        point, kind = rng.choice(tuple(Point)), rng.choice(tuple(kinds))
        found.append(InjectedFault(number, step, point, kind, rng.randrange(num_ranks)))
        step += rng.randint(2, 4)
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a run.

    Attributes:
        exit_code: None if it hung, and was ended.
        output: the last lines of all processes.
        events: of all ranks, in the order of time.
        found_gone: times at which the launcher reported a dead worker.
        digests: of every rank that came to the end.
    """

    exit_code: int | None
    output: tuple[str, ...]
    events: tuple[Mapping[str, Any], ...]
    found_gone: tuple[float, ...]
    digests: Mapping[int, Mapping[str, str]]

    @property
    def losses(self) -> Mapping[tuple[int, int], frozenset[str]]:
        """Every noted loss, by rank and step: one, however often the step was run."""
        found: dict[tuple[int, int], set[str]] = defaultdict(set)
        for event in self.events:
            if event["event"] == "loss":
                found[event["rank"], event["step"]].add(event["loss"])
        return {key: frozenset(values) for key, values in found.items()}


def run_job(task: JobTask, num_spares: int, timeout_s: float) -> Outcome:
    """Start the ranks under ``dist-ckpt run``, and wait for their end.

    Args:
        task: what they do.
        num_spares: processes that wait to take over a rank.
        timeout_s: after this the run counts as hung, and is ended.
    """
    task.scratch.mkdir()
    (task.scratch / "task").write_bytes(pickle.dumps(task))
    command = [
        *(sys.executable, "-P", "-m", "dist_ckpt_strategies.cli", "run"),
        *("--nproc", str(NUM_RANKS), "--spares", str(num_spares)),
        *("--max-restarts", str(2 * len(task.faults) + 4)),
        *("--heartbeat-timeout", str(_HEARTBEAT_TIMEOUT_S)),
        *("-m", "benchmarks.recovery_training", str(task.scratch / "task")),
    ]
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=_environment(),
    )
    assert process.stdout is not None  # noqa: S101 - a pipe
    lines: list[tuple[float, str]] = []
    reader = threading.Thread(target=_follow, args=(process.stdout, lines), daemon=True)
    reader.start()
    code = None
    try:
        code = process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        pass
    finally:
        _end(process)
    reader.join(_EXIT_TIMEOUT_S)
    process.stdout.close()
    finals = {rank: task.final(rank) for rank in range(NUM_RANKS)}
    return Outcome(
        code,
        tuple(text for _, text in lines[-_NUM_TAIL_LINES:]),
        tuple(_read_events(task.scratch)),
        tuple(at for at, text in lines if text.startswith("dist-ckpt: ") and _GONE in text),
        {
            rank: json.loads(path.read_text(encoding="utf-8"))
            for rank, path in finals.items()
            if path.exists()
        },
    )


def differences(outcome: Outcome, reference: Outcome) -> list[str]:
    """What is not as in the run without a fault; empty where all is bit-identical."""
    if outcome.exit_code != 0:
        ended = "hung" if outcome.exit_code is None else f"ended with {outcome.exit_code}"
        return [f"the job {ended}:\n" + "\n".join(outcome.output)]
    found = []
    for rank, expected in reference.digests.items():
        digests = outcome.digests.get(rank, {})
        found += [
            f"rank {rank}: {name} differs at the end"
            for name in expected
            if digests.get(name) != expected[name]
        ]
    expected_losses = reference.losses
    for (rank, step), losses in outcome.losses.items():
        if losses != expected_losses.get((rank, step)):
            found.append(f"rank {rank}: the loss of step {step} differs: {sorted(losses)}")
    missing = set(expected_losses) - set(outcome.losses)
    found += [f"rank {rank}: no loss of step {step}" for rank, step in sorted(missing)]
    return found


def recovery_seconds(
    outcome: Outcome, faults: Sequence[InjectedFault]
) -> Mapping[int, float | None]:
    """By fault that happened, the time until all ranks are in a step again; None: never.

    Of SIGSTOP and of a stuck rank, from its detection on.
    """
    found = {}
    for fault in faults:
        fired = [e for e in outcome.events if e["event"] == "fault" and e["number"] == fault.number]
        if fired:
            began = _known_at(outcome, fault, fired[-1]["at"])
            found[fault.number] = _seconds_until_step(outcome, fired[-1]["epoch"], began)
    return found


def _known_at(outcome: Outcome, fault: InjectedFault, at: float) -> float:
    if fault.kind is Kind.STOP:
        return min((gone for gone in outcome.found_gone if gone > at), default=at)
    if fault.kind is Kind.STUCK:
        stopped = (e["at"] for e in outcome.events if e["event"] == "stopped" and e["at"] > at)
        return min(stopped, default=at)
    return at


def _seconds_until_step(outcome: Outcome, epoch: int, began: float) -> float | None:
    first: dict[int, float] = {}
    for event in outcome.events:
        if event["event"] == "step" and event["epoch"] > epoch:
            first.setdefault(event["rank"], event["at"])
    return max(first.values()) - began if len(first) == NUM_RANKS else None


def _environment() -> dict[str, str]:
    """Of the launcher: this repository importable, no GPU, gloo on the loopback device."""
    found = dict(os.environ) | {"CUDA_VISIBLE_DEVICES": ""}
    found["PYTHONPATH"] = ":".join(filter(None, [str(ROOT), found.get("PYTHONPATH")]))
    found.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # Torch's store looks up the name of every peer, only to log it; where no name server answers,
    # one connection in twenty takes 5 s.
    found.setdefault("RES_OPTIONS", "attempts:0")
    return found


def _follow(stream: IO[bytes], lines: list[tuple[float, str]]) -> None:
    lines.extend((time.monotonic(), line.decode(errors="replace").rstrip("\n")) for line in stream)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_EXIT_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _read_events(directory: Path) -> list[dict[str, Any]]:
    lines = [
        json.loads(line)
        for path in sorted(directory.glob("events.*"))
        for line in path.read_text(encoding="utf-8").splitlines()
    ]
    return sorted(lines, key=lambda line: float(line["at"]))


class ViolationError(Exception):
    """Something that must never happen did."""


@dataclass(frozen=True, slots=True)
class Campaign:
    """What is asked for: ``steps_apart`` 0 is two to four steps, at random."""

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


def run_jobs(campaign: Campaign, root: Path) -> Iterator[dict[str, Any]]:
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
            about = {"job": number, "fault": asdict(fault), "num_spares": num_spares}
            yield {**about, "seconds": seconds[fault.number]}


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
