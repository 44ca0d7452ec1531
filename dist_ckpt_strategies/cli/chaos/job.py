"""Runs a task of chaos on real processes, and compares it with the run without a fault."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from dist_ckpt_strategies.cli.chaos.faults import InjectedFault, Kind
from dist_ckpt_strategies.cli.chaos.task import NUM_RANKS, ChaosTask, read_events
from dist_ckpt_strategies.config import environment

HEARTBEAT_TIMEOUT_S = 3.0
_NUM_TAIL_LINES = 30
_FAREWELL_S = 10.0
_POLL_S = 0.1
_GONE = " is gone: "


@dataclass(frozen=True, slots=True)
class JobOptions:
    """How the ranks are started.

    Attributes:
        num_spares: processes that wait to take over a rank.
        timeout_s: after which the run counts as hung.
    """

    num_spares: int = 0
    timeout_s: float = 600.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a run.

    Attributes:
        exit_code: None: it hung, and was ended.
        output: the last lines of all processes.
        events: of all ranks, in the order of time.
        found_gone: when the launcher said that a worker is gone.
        digests: of every rank that came to the end.
        seconds: that the whole run took.
    """

    exit_code: int | None
    output: tuple[str, ...]
    events: tuple[Mapping[str, Any], ...]
    found_gone: tuple[float, ...]
    digests: Mapping[int, Mapping[str, str]]
    seconds: float

    @property
    def losses(self) -> Mapping[tuple[int, int], frozenset[str]]:
        """By rank and step, every loss that was noted: one, however often the step was run."""
        found: dict[tuple[int, int], set[str]] = defaultdict(set)
        for event in self.events:
            if event["event"] == "loss":
                found[event["rank"], event["step"]].add(event["loss"])
        return {key: frozenset(values) for key, values in found.items()}


def run_job(
    task: ChaosTask, options: JobOptions, watch: Callable[[int], None] | None = None
) -> Outcome:
    """Start the ranks under ``dist-ckpt run``, and wait for their end.

    Args:
        task: what they do.
        options: how they are started.
        watch: called now and then with the number of faults that have happened.
    """
    path = task.write()
    command = [
        *(sys.executable, "-P", "-m", "dist_ckpt_strategies.cli", "run"),
        *("--nproc", str(NUM_RANKS), "--spares", str(options.num_spares)),
        *("--max-restarts", str(2 * len(task.faults) + 4)),
        *("--heartbeat-timeout", str(HEARTBEAT_TIMEOUT_S)),
        *("-m", "dist_ckpt_strategies.cli.chaos.worker", str(path)),
    ]
    began = time.monotonic()
    process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
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
    try:
        code = _ended(process, options.timeout_s, lambda: watch and watch(_num_fired(task)))
    finally:
        _end(process)
    reader.join(_FAREWELL_S)
    process.stdout.close()
    return Outcome(
        code,
        tuple(text for _, text in lines[-_NUM_TAIL_LINES:]),
        tuple(read_events(task.events)),
        tuple(at for at, text in lines if text.startswith("dist-ckpt: ") and _GONE in text),
        {rank: _read(task.final(rank)) for rank in range(NUM_RANKS) if task.final(rank).exists()},
        time.monotonic() - began,
    )


def differences(outcome: Outcome, reference: Outcome) -> list[str]:
    """What is not as in the run without a fault; empty where all is, to the bit."""
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
    """By fault, from it until all ranks are in a step again; None where that never came.

    Of a hang, from its detection on.
    """
    found = {}
    for fault in faults:
        fired = [e for e in outcome.events if e["event"] == "fault" and e["number"] == fault.number]
        if fired:
            began = _known_at(outcome, fault, fired[-1]["at"])
            found[fault.number] = _back_at(outcome, fired[-1]["epoch"], began)
    return found


def _known_at(outcome: Outcome, fault: InjectedFault, at: float) -> float:
    if fault.kind is Kind.STOP:
        return min((gone for gone in outcome.found_gone if gone > at), default=at)
    if fault.kind is Kind.STUCK:
        heard = (e["at"] for e in outcome.events if e["event"] == "stopped" and e["at"] > at)
        return min(heard, default=at)
    return at


def _back_at(outcome: Outcome, epoch: int, began: float) -> float | None:
    first: dict[int, float] = {}
    for event in outcome.events:
        if event["event"] == "step" and event["epoch"] > epoch:
            first.setdefault(event["rank"], event["at"])
    return max(first.values()) - began if len(first) == NUM_RANKS else None


def _environment() -> dict[str, str]:
    """Of the launcher: this package importable, no GPU, gloo on the loopback device."""
    root = str(Path(__file__).resolve().parents[3])
    found = environment() | {"CUDA_VISIBLE_DEVICES": ""}
    found["PYTHONPATH"] = ":".join(filter(None, [root, found.get("PYTHONPATH")]))
    found.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # Torch's store looks up the name of every peer, only to log it; where no name server answers,
    # one connection in twenty takes 5 s.
    found.setdefault("RES_OPTIONS", "attempts:0")
    return found


def _follow(stream: IO[bytes], lines: list[tuple[float, str]]) -> None:
    lines.extend((time.monotonic(), line.decode(errors="replace").rstrip("\n")) for line in stream)


def _ended(
    process: subprocess.Popen[bytes], timeout_s: float, watch: Callable[[], object]
) -> int | None:
    """The exit code; None where the time was up."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            return process.wait(_POLL_S)
        except subprocess.TimeoutExpired:
            watch()
    return None


def _end(process: subprocess.Popen[bytes]) -> None:
    """Nobody is left afterwards."""
    process.terminate()
    try:
        process.wait(_FAREWELL_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _num_fired(task: ChaosTask) -> int:
    return len({path.name.partition(".")[0] for path in task.fired.iterdir()})


def _read(path: Path) -> dict[str, str]:
    found: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))
    return found
