"""Break ranks of a training at random: does it continue as if nothing had happened?

    python benchmarks/recovery_faults.py --out recovery_faults.jsonl
    python benchmarks/recovery_faults.py --faults 50 --kind SIGKILL --steps-apart 300

Four gloo ranks, two replicas of two shards, train a small GPT with dropout under ``dist-ckpt run``.
A rank raises, is killed, is stopped or waits for ever, at a random point of a step; a few steps
later the next one. In every second job a spare waits to take over. Weights, moments and random
numbers before every step, and every loss, on every rank, have to be those of a run without a fault,
bit for bit, and every recovery has to have come from memory. Faults follow each other so fast that
the next spare is often still starting; with ``--steps-apart 300`` it waits.

Times are from the fault until all ranks are in a step again; those of SIGSTOP and of a stuck rank
from its detection on.

Ends with status 1 at the first job that differs or hangs, and prints its seed.
"""

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
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script finds its neighbours only

from benchmarks.common.command_line import ROOT, Parser, open_output
from benchmarks.common.disks import workspace
from benchmarks.recovery_training import NUM_RANKS, InjectedFault, JobTask, Kind, Point

_FAULTS_PER_JOB = 25
_SMOKE_SHARE = 20
"""A campaign of toy size has one fault for so many."""

_FIRST_STEP = 2
_STEPS_AFTER = 3
_HEARTBEAT_TIMEOUT_S = 3.0
_NUM_TAIL_LINES = 30
_EXIT_TIMEOUT_S = 10.0
_GONE = " is gone: "


def random_faults(
    seed: int, num_faults: int, kinds: Sequence[Kind], steps_apart: int
) -> tuple[InjectedFault, ...]:
    """Faults of any rank, kind and point, two to four steps apart; equal for an equal seed.

    Not one step apart: while a rank hangs after its commit, others reach the next step's, and a
    fault there could take both replicas of a shard.
    """
    rng = random.Random(seed)  # noqa: S311 - not a secret
    step = _FIRST_STEP
    found = []
    for number in range(num_faults):
        point, kind = rng.choice(tuple(Point)), rng.choice(tuple(kinds))
        fault = InjectedFault(number, step, point, kind, rng.randrange(NUM_RANKS))
        found.append(replace(fault, step=(1 + number) * steps_apart) if steps_apart else fault)
        step += rng.randint(2, 4)
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a run: no exit code if it hung, the last lines of output, events by time."""

    exit_code: int | None
    output: tuple[str, ...]
    events: tuple[Mapping[str, Any], ...]
    found_gone: tuple[float, ...]
    """When the launcher reported a dead worker."""

    def digests(self) -> Mapping[tuple[int, int, str], set[str]]:
        """By rank, step and "step" or "loss": one, however often the step was run."""
        found: dict[tuple[int, int, str], set[str]] = defaultdict(set)
        for event in self.events:
            if "digest" in event:
                found[event["rank"], event["step"], event["event"]].add(event["digest"])
        return found


def run_job(task: JobTask, num_spares: int, timeout_s: float) -> Outcome:
    """Start the ranks under ``dist-ckpt run``, wait for their end, and end them after a limit."""
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
        text=True,
        errors="replace",
    )
    lines: list[tuple[float, str]] = []

    def follow() -> None:
        assert process.stdout is not None  # noqa: S101 - it is a pipe
        with process.stdout as output:
            lines.extend((time.monotonic(), line.rstrip("\n")) for line in output)

    reader = threading.Thread(target=follow, daemon=True)
    reader.start()
    code = None
    try:
        code = process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        pass
    finally:
        process.terminate()
        try:
            process.wait(_EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    reader.join(_EXIT_TIMEOUT_S)
    texts = [path.read_text(encoding="utf-8") for path in task.scratch.glob("events.*")]
    events = [json.loads(line) for text in texts for line in text.splitlines()]
    return Outcome(
        code,
        tuple(text for _, text in lines[-_NUM_TAIL_LINES:]),
        tuple(sorted(events, key=lambda event: float(event["at"]))),
        tuple(at for at, text in lines if text.startswith("dist-ckpt: ") and _GONE in text),
    )


def _environment() -> dict[str, str]:
    """Of the launcher: this repository importable, no GPU, gloo on the loopback device."""
    found = dict(os.environ) | {"CUDA_VISIBLE_DEVICES": ""}
    found["PYTHONPATH"] = ":".join(filter(None, [str(ROOT), found.get("PYTHONPATH")]))
    found.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # Torch's store looks up the name of every peer, only to log it; where no name server answers,
    # one connection in twenty takes 5 s.
    found.setdefault("RES_OPTIONS", "attempts:0")
    return found


def violations(
    outcome: Outcome, reference: Outcome, seconds: Mapping[int, float | None]
) -> Iterator[str]:
    """What is not as in the reference, a run without faults, and what did not recover from memory.

    ``seconds`` are those of the recoveries, by fault.
    """
    if outcome.exit_code != 0:
        ended = "hung" if outcome.exit_code is None else f"ended with {outcome.exit_code}"
        yield f"the job {ended}:\n" + "\n".join(outcome.output)
        return
    expected, found = reference.digests(), outcome.digests()
    for rank, step, what in sorted(expected.keys() | found.keys()):
        key = (rank, step, what)
        if found.get(key) != expected.get(key):
            text = "loss" if what == "loss" else "state before the step"
            yield f"rank {rank}, step {step}: {text} {found.get(key)}, expected {expected.get(key)}"
    for event in outcome.events:
        if event["event"] == "loaded" and event["attempt"] > 1 and not event["from_memory"]:
            yield f"attempt {event['attempt']}: rank {event['rank']} was not loaded from memory"
    for number, after in seconds.items():
        if after is None:
            yield f"fault {number} did not happen, or no step came after it"


def recovery_seconds(outcome: Outcome, fault: InjectedFault) -> float | None:
    """Time until all ranks are in a step again; None where there was no fault or no such step.

    Of SIGSTOP and of a stuck rank, from its detection on.
    """
    fired = [event for event in outcome.events if event.get("number") == fault.number]
    if not fired:
        return None
    began, attempt = fired[-1]["at"], fired[-1]["attempt"]
    if fault.kind is Kind.STOP:
        began = min((at for at in outcome.found_gone if at > began), default=began)
    elif fault.kind is Kind.STUCK:
        stopped = [event["at"] for event in outcome.events if event["event"] == "stopped"]
        began = min((at for at in stopped if at > began), default=began)
    first: dict[int, float] = {}
    for event in outcome.events:
        if event["event"] == "step" and event["attempt"] > attempt:
            first.setdefault(event["rank"], event["at"])
    return max(first.values()) - began if len(first) == NUM_RANKS else None


class ViolationError(Exception):
    """Something that must never happen did."""


def run_jobs(
    jobs: Sequence[Sequence[InjectedFault]], root: Path, timeout_s: float
) -> Iterator[dict[str, Any]]:
    """The recoveries of all jobs, whose faults these are.

    Raises:
        ViolationError: a job hung, ended badly, or something differs.
    """
    num_steps = max(faults[-1].step for faults in jobs) + _STEPS_AFTER
    reference = run_job(JobTask(root / "reference", num_steps), 0, timeout_s)
    for number, faults in enumerate(jobs):
        num_spares = number % 2
        task = JobTask(root / str(number), num_steps, tuple(faults))
        outcome = run_job(task, num_spares, timeout_s)
        seconds = {fault.number: recovery_seconds(outcome, fault) for fault in faults}
        if wrong := list(violations(outcome, reference, seconds)):
            raise ViolationError(f"job {number}: " + "\n".join(wrong))
        for fault in faults:
            about = {"job": number, "fault": asdict(fault), "num_spares": num_spares}
            yield {**about, "seconds": seconds[fault.number]}


def main() -> None:
    """Break ranks of a training at random: does it continue as if nothing had happened?"""
    parser = Parser(__doc__)
    parser.set_defaults(timeout_s=600.0)
    parser.add_argument("--directory", type=Path, help="where to write")
    parser.add_argument("--faults", type=int, default=500, help="all jobs together (500)")
    parser.add_argument("--seed", type=int, default=0, help="of the faults (0)")
    parser.add_repeated("kind", list(Kind), "only these", type=Kind)
    text = "steps between faults (2 to 4, at random)"
    parser.add_argument("--steps-apart", type=int, default=0, help=text)
    options = parser.parse()
    num_faults = options.faults // (_SMOKE_SHARE if options.smoke else 1)
    jobs = [
        random_faults(
            1000 * options.seed + number,
            min(num_faults - start, _FAULTS_PER_JOB),
            options.kind,
            options.steps_apart,
        )
        for number, start in enumerate(range(0, num_faults, _FAULTS_PER_JOB))
    ]
    with open_output(options.out, __file__) as output, workspace(options.directory) as root:
        try:
            for recovery in run_jobs(jobs, root, options.timeout_s):
                output.write("recovery", **recovery)
        except ViolationError as violation:
            output.write("violation", why=str(violation), seed=options.seed)
            sys.exit(f"VIOLATION with --seed {options.seed}: {violation}")
        output.write("campaign", seed=options.seed, faults=num_faults, violations=0)


if __name__ == "__main__":
    main()
