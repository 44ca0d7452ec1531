"""The demonstration's ranks as processes: started, watched, and none of them left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from dist_ckpt_strategies.cli.demo.events import EVENTS_NAME, Event, EventReader
from dist_ckpt_strategies.cli.demo.task import DemoError, RankTask

_POLL_S = 0.05
_STOP_TIMEOUT_S = 3.0
_NUM_TAIL_LINES = 15

RankProcess = subprocess.Popen[bytes]


def failure_path(scratch: Path, global_rank: int) -> Path:
    """Where a rank notes that it failed, and when."""
    return scratch / f"rank{global_rank}.failure"


def write_failure(scratch: Path, global_rank: int, error: BaseException) -> None:
    """Note a rank's failure, so that the first one can be told from those it caused."""
    found = {"at": time.monotonic(), "error": f"{type(error).__name__}: {error}"}
    failure_path(scratch, global_rank).write_text(json.dumps(found), encoding="utf-8")


def end_with_parent() -> None:
    """End this process as soon as the one that started it is gone; for a thread of its own.

    That one holds the other end of our standard input and never writes to it.
    """
    os.read(sys.stdin.fileno(), 1)
    os.kill(os.getpid(), signal.SIGKILL)


def run_task(task: RankTask, on_event: Callable[[Event], None], timeout_s: float) -> None:
    """Carry out a task with one new process per rank of its layout; see run_rank_processes."""
    # -P: a file of the user's working directory must not pass for a module.
    worker = [sys.executable, "-P", "-m", "dist_ckpt_strategies.cli.demo.worker"]
    ranks = range(task.layout.num_ranks)
    commands = [[*worker, str(rank), task.to_json()] for rank in ranks]
    run_rank_processes(commands, task.scratch, on_event, timeout_s)


def run_rank_processes(
    commands: Sequence[Sequence[str]],
    scratch: Path,
    on_event: Callable[[Event], None],
    timeout_s: float,
) -> None:
    """Run one process per rank until all have ended well; on return none is left.

    Each gets a pipe as standard input that stays open as long as this process lives: a rank that
    reads its end knows that it is alone and ends too. Their output goes to files in ``scratch``.

    Args:
        commands: for each rank, the program and its arguments.
        scratch: directory for their output; they write events and failures there too.
        on_event: called with every event, in order, in this thread.
        timeout_s: longest time without an event, in seconds; a slow machine may take its time.

    Raises:
        DemoError: a rank failed (the first one is named, with the end of its output), or nothing
            happens any more.
    """
    reader = EventReader(scratch / EVENTS_NAME)
    last_event = time.monotonic()
    with _started(commands, scratch) as processes:
        while any(code is None for code in _exit_codes(processes, scratch)):
            if _pass_on(reader, on_event):
                last_event = time.monotonic()
            if time.monotonic() > last_event + timeout_s:
                raise DemoError(_timeout_message(processes, scratch, timeout_s))
            time.sleep(_POLL_S)
    _pass_on(reader, on_event)


def _pass_on(reader: EventReader, on_event: Callable[[Event], None]) -> int:
    """How many events there were."""
    events = list(reader.read())
    for event in events:
        on_event(event)
    return len(events)


@contextmanager
def _started(commands: Sequence[Sequence[str]], scratch: Path) -> Iterator[list[RankProcess]]:
    processes: list[RankProcess] = []
    try:
        for global_rank, command in enumerate(commands):
            # One by one, so that those already started are stopped if the next one cannot be.
            processes.append(_start(command, _log_path(scratch, global_rank)))
        yield processes
    finally:
        _stop(processes)


def _start(command: Sequence[str], log: Path) -> RankProcess:
    with log.open("wb") as output:
        return subprocess.Popen(  # noqa: S603  (our own interpreter and module)
            command,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=_child_environment(os.environ),
        )


def _child_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a rank: this package importable, no GPU, gloo on the loopback device.

    Gloo would otherwise choose the device that the host's name resolves to, which on many
    laptops and in many containers cannot be reached.
    """
    package_root = str(Path(__file__).resolve().parents[3])
    found = {**environ, "CUDA_VISIBLE_DEVICES": ""}
    found["PYTHONPATH"] = os.pathsep.join(filter(None, [package_root, environ.get("PYTHONPATH")]))
    if sys.platform == "linux":
        found.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return found


def _stop(processes: Sequence[RankProcess]) -> None:
    """End those that still run, and wait for all."""
    for process in processes:
        if process.stdin is not None:
            process.stdin.close()
        if process.poll() is None:
            process.terminate()
    deadline = time.monotonic() + _STOP_TIMEOUT_S
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    for process in processes:
        process.kill()
        process.wait()


def _exit_codes(processes: Sequence[RankProcess], scratch: Path) -> list[int | None]:
    """Exit status of each rank, None while it runs.

    Raises:
        DemoError: at least one failed.
    """
    codes = [process.poll() for process in processes]
    failed = [rank for rank, code in enumerate(codes) if code]
    if failed:
        first = _first_failed(codes, failed, scratch)
        raise DemoError(_failure_message(first, codes[first], scratch))
    return codes


def _first_failed(codes: Sequence[int | None], failed: Sequence[int], scratch: Path) -> int:
    """The rank that failed first: one ended by a signal, or the one with the earliest note.

    A rank notes its failure before it ends, and the failures that this causes on others come
    after it has ended; so the earliest note is the cause, whoever is seen to have ended first.
    """
    signalled = [rank for rank in failed if (codes[rank] or 0) < 0]
    if signalled:
        return signalled[0]
    notes = {
        rank: json.loads(failure_path(scratch, rank).read_text(encoding="utf-8"))["at"]
        for rank in range(len(codes))
        if failure_path(scratch, rank).exists()
    }
    return min(notes, key=notes.__getitem__, default=failed[0])


def _failure_message(global_rank: int, code: int | None, scratch: Path) -> str:
    path = failure_path(scratch, global_rank)
    ended = f"rank {global_rank} failed (exit status {code})"
    if path.exists():
        ended = f"rank {global_rank}: {json.loads(path.read_text(encoding='utf-8'))['error']}"
    return f"{ended}\nthe end of its output:\n{_tail(_log_path(scratch, global_rank))}"


def _timeout_message(processes: Sequence[RankProcess], scratch: Path, timeout_s: float) -> str:
    running = [rank for rank, process in enumerate(processes) if process.poll() is None]
    names = ", ".join(str(rank) for rank in running)
    tail = _tail(_log_path(scratch, running[0])) if running else ""
    return (
        f"rank(s) {names} still running, but nothing happened for {timeout_s:g} s; the end of the "
        f"output:\n{tail}"
    )


def _log_path(scratch: Path, global_rank: int) -> Path:
    return scratch / f"rank{global_rank}.log"


def _tail(path: Path) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(lines[-_NUM_TAIL_LINES:])
