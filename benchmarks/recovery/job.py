"""A training with injected faults under ``dist-ckpt run``, and its comparison with one without."""

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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import IO, Any

NUM_RANKS = 4
NUM_SHARDS = 2
PROGRESS_TIMEOUT_S = 5.0
"""A wrapped block without a step for this long counts as stuck."""
_HEARTBEAT_TIMEOUT_S = 3.0
_FIRST_STEP = 2
_NUM_TAIL_LINES = 30
_EXIT_TIMEOUT_S = 10.0
_GONE = " is gone: "


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
    """What happens to the rank: STUCK waits for ever in the block, while the process lives."""

    EXCEPTION = "exception"
    KILL = "SIGKILL"
    STOP = "SIGSTOP"
    STUCK = "stuck"


@dataclass(frozen=True, slots=True)
class InjectedFault:
    """One fault.

    Attributes:
        number: in the job; every fault happens once.
        step: of the training.
        point: in the step.
        kind: what happens.
        global_ranks: where it happens.
    """

    number: int
    step: int
    point: Point
    kind: Kind
    global_ranks: tuple[int, ...]


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
        found.append(InjectedFault(number, step, point, kind, (rng.randrange(num_ranks),)))
        step += rng.randint(2, 4)
    return tuple(found)


@dataclass(frozen=True, slots=True)
class JobTask:
    """One run of all ranks.

    Attributes:
        scratch: directory for what the ranks write.
        num_steps: of the training.
        seed: of weights, batches and dropout.
        faults: none for the reference run.
    """

    scratch: Path
    num_steps: int
    seed: int
    faults: tuple[InjectedFault, ...] = ()

    @property
    def events(self) -> Path:
        """Directory of events, one file per process."""
        return self.scratch / "events"

    @property
    def fired(self) -> Path:
        """Directory with an empty file for each fault that has happened; outlives the process."""
        return self.scratch / "fired"

    def final(self, global_rank: int) -> Path:
        """File with a rank's digests at the end."""
        return self.scratch / f"final{global_rank}.json"

    def write(self) -> Path:
        """Make the directories, and the file that the ranks read."""
        for directory in (self.events, self.fired):
            directory.mkdir(parents=True)
        path = self.scratch / "task"
        path.write_bytes(pickle.dumps(self))
        return path

    @staticmethod
    def read(path: Path) -> JobTask:
        """What ``write`` wrote."""
        task: JobTask = pickle.loads(path.read_bytes())  # noqa: S301 - of our own
        return task


class EventLog:
    """Lines of JSON that outlive a killed process.

    Args:
        directory: of all processes' files.
        global_rank: of this one.
    """

    def __init__(self, directory: Path, global_rank: int) -> None:
        self._rank = global_rank
        path = directory / f"{global_rank}-{os.getpid()}.jsonl"
        self._handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)

    def note(self, event: str, **fields: Any) -> None:
        """Add one line, with the clock that all processes share."""
        line = {"event": event, "at": time.monotonic(), "rank": self._rank, **fields}
        os.write(self._handle, json.dumps(line).encode() + b"\n")


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
    command = [
        *(sys.executable, "-P", "-m", "dist_ckpt_strategies.cli", "run"),
        *("--nproc", str(NUM_RANKS), "--spares", str(num_spares)),
        *("--max-restarts", str(2 * len(task.faults) + 4)),
        *("--heartbeat-timeout", str(_HEARTBEAT_TIMEOUT_S)),
        *("-m", "benchmarks.recovery.rank", str(task.write())),
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
        tuple(_read_events(task.events)),
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
    root = str(Path(__file__).resolve().parents[2])
    found["PYTHONPATH"] = ":".join(filter(None, [root, found.get("PYTHONPATH")]))
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
        for path in sorted(directory.iterdir())
        for line in path.read_text(encoding="utf-8").splitlines()
    ]
    return sorted(lines, key=lambda line: float(line["at"]))
