"""Rank processes of ``demo``, ``bench`` and tools: started, watched, stopped with their parent.

Rank 0 reports events, one JSON object per line of a file that the parent follows.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

from dist_ckpt_strategies.config import environment
from dist_ckpt_strategies.errors import CheckpointError

EVENTS_NAME = "events.jsonl"
_POLL_S = 0.05
_STOP_TIMEOUT_S = 3.0
_NUM_TAIL_LINES = 15

Event = dict[str, Any]
"""What a rank reports; ``event`` says which kind."""
_Process = subprocess.Popen[bytes]


class RankError(CheckpointError):
    """A rank failed, or the ranks made no progress."""


def write_event(scratch: Path, event: str, **fields: Any) -> None:
    """Report an event. Called on rank 0 only."""
    with (scratch / EVENTS_NAME).open("a", encoding="utf-8") as file:
        file.write(json.dumps({"event": event, **fields}) + "\n")


@contextmanager
def rank_process(
    scratch: Path, global_rank: int, num_ranks: int, timeout_s: float
) -> Iterator[None]:
    """Within the block this process is a rank of a gloo world. Collective: world.

    A failure of the block is recorded for the parent.

    Args:
        scratch: directory of this start alone, the same on all ranks.
        global_rank: of this process.
        num_ranks: of the world.
        timeout_s: longest wait for another rank, in seconds.
    """
    end_with_parent()
    try:
        import torch  # noqa: PLC0415 - the parent does without
        import torch.distributed as dist  # noqa: PLC0415

        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{scratch / 'rendezvous'}",
            rank=global_rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=timeout_s),
        )
        yield
        dist.destroy_process_group()
    except BaseException as error:
        write_failure(scratch, global_rank, error)
        raise


def end_with_parent() -> None:
    """End this process, and all that it has started, when the parent stops it or dies.

    The parent holds the other end of our standard input and never writes to it. A session of our
    own: Ctrl-C reaches the parent alone, which then stops its ranks.
    """
    os.setsid()
    signal.signal(signal.SIGTERM, _leave_it_to_the_pipe)
    threading.Thread(target=_kill_group_at_end_of_input, daemon=True).start()


def _leave_it_to_the_pipe(_signal_number: int, _frame: object) -> None:
    """SIGTERM would end this process alone; the parent has closed our standard input as well."""


def _kill_group_at_end_of_input() -> None:
    os.read(sys.stdin.fileno(), 1)
    os.killpg(0, signal.SIGKILL)


def write_failure(scratch: Path, global_rank: int, error: BaseException) -> None:
    """Record a rank's failure with its time: the earliest one caused the others."""
    found = {"at": time.monotonic(), "error": f"{type(error).__name__}: {error}"}
    _failure_path(scratch, global_rank).write_text(json.dumps(found), encoding="utf-8")


def rank_commands(module: str, num_ranks: int, task: object) -> list[list[str]]:
    """For each rank, the command that runs a module with the rank and the task.

    Args:
        module: its ``main`` is given the rank and the task, as texts; see ``task_of``.
        num_ranks: how many.
        task: made of plain values and this package's own classes.
    """
    # -P: a file of the user's working directory must not pass for a module.
    python = [sys.executable, "-P", "-m", module]
    return [[*python, str(rank), pickle.dumps(task).hex()] for rank in range(num_ranks)]


def task_of(arguments: Sequence[str]) -> tuple[int, Any]:
    """The rank and the task that ``rank_commands`` gave to this process."""
    return int(arguments[0]), pickle.loads(bytes.fromhex(arguments[1]))  # noqa: S301 - our own


def run_rank_processes(
    commands: Sequence[Sequence[str]],
    scratch: Path,
    on_event: Callable[[Event], None],
    timeout_s: float,
) -> None:
    """Run one process per rank until all have ended well; on return none is left.

    Each gets a pipe as standard input that stays open as long as this process lives. Their output
    goes to files in ``scratch``.

    Args:
        commands: for each rank, the program and its arguments.
        scratch: directory for their output; they write events and failures there too.
        on_event: called with every event, in order, in this thread.
        timeout_s: longest time without an event, in seconds.

    Raises:
        RankError: a rank failed (the first one is named, with the end of its output), or there was
            no event for too long.
    """
    events, last_event = scratch / EVENTS_NAME, time.monotonic()
    events.touch()
    with (
        events.open("rb") as file,
        ExitStack() as logs,
        started(
            commands,
            [
                logs.enter_context(_log_path(scratch, rank).open("wb"))
                for rank in range(len(commands))
            ],
        ) as processes,
    ):
        is_running = True
        while is_running:
            is_running = any(code is None for code in _exit_codes(processes, scratch))
            for event in _new_events(file):
                last_event = time.monotonic()
                on_event(event)
            if is_running and time.monotonic() > last_event + timeout_s:
                raise RankError(_timeout_message(processes, scratch, timeout_s))
            time.sleep(_POLL_S if is_running else 0)


def _new_events(file: IO[bytes]) -> Iterator[Event]:
    """Events whose line is complete and was not read before."""
    while (line := file.readline()).endswith(b"\n"):
        yield json.loads(line)
    file.seek(-len(line), os.SEEK_CUR)


@contextmanager
def started(
    commands: Sequence[Sequence[str]],
    outputs: Sequence[IO[bytes] | int],
    stderr: int | None = subprocess.STDOUT,
) -> Iterator[list[_Process]]:
    """A process per command, with a pipe as standard input; within the block they run.

    Args:
        commands: each with its arguments.
        outputs: where each process writes to, as for ``Popen``.
        stderr: of all of them, as for ``Popen``.
    """
    processes: list[_Process] = []
    try:
        for command, output in zip(commands, outputs, strict=True):
            # One by one, so that those already started are stopped if the next one cannot be.
            process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
                command,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=stderr,
                env=child_environment(),
            )
            processes.append(process)
        yield processes
    finally:
        stop(processes)


def child_environment() -> dict[str, str]:
    """The environment of a rank: this package importable, no GPU, gloo on the loopback device.

    Gloo would otherwise choose the device that the host's name resolves to, which on many
    laptops and in many containers cannot be reached.
    """
    found = {**environment(), "CUDA_VISIBLE_DEVICES": ""}
    root = str(Path(__file__).resolve().parents[2])
    found["PYTHONPATH"] = os.pathsep.join(filter(None, [root, found.get("PYTHONPATH")]))
    if sys.platform == "linux":
        found.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return found


def stop(processes: Sequence[_Process]) -> None:
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


def _exit_codes(processes: Sequence[_Process], scratch: Path) -> list[int | None]:
    """Exit status of each rank, None while it runs.

    Raises:
        RankError: at least one failed.
    """
    codes = [process.poll() for process in processes]
    failed = [rank for rank, code in enumerate(codes) if code]
    if failed:
        first = _first_failed(codes, failed, scratch)
        ended = f"rank {first} failed (exit status {codes[first]})"
        path = _failure_path(scratch, first)
        if path.exists():
            ended = f"rank {first}: {json.loads(path.read_text(encoding='utf-8'))['error']}"
        raise RankError(f"{ended}\nthe end of its output:\n{_tail(scratch, first)}")
    return codes


def _first_failed(codes: Sequence[int | None], failed: Sequence[int], scratch: Path) -> int:
    """The rank that failed first: one ended by a signal, or the one with the earliest record.

    A rank records its failure before it ends, and the failures that this causes on others come
    later; so the earliest record is the cause, whichever process ended first.
    """
    signalled = [rank for rank in failed if (codes[rank] or 0) < 0]
    if signalled:
        return signalled[0]
    times = {
        rank: json.loads(_failure_path(scratch, rank).read_text(encoding="utf-8"))["at"]
        for rank in range(len(codes))
        if _failure_path(scratch, rank).exists()
    }
    return min(times, key=times.__getitem__, default=failed[0])


def _timeout_message(processes: Sequence[_Process], scratch: Path, timeout_s: float) -> str:
    running = [rank for rank, process in enumerate(processes) if process.poll() is None]
    names = ", ".join(str(rank) for rank in running)
    tail = _tail(scratch, running[0]) if running else ""
    return (
        f"rank(s) {names} still running, but nothing happened for {timeout_s:g} s; the end of the "
        f"output:\n{tail}"
    )


def _failure_path(scratch: Path, global_rank: int) -> Path:
    return scratch / f"rank{global_rank}.failure"


def _log_path(scratch: Path, global_rank: int) -> Path:
    return scratch / f"rank{global_rank}.log"


def _tail(scratch: Path, global_rank: int) -> str:
    text = _log_path(scratch, global_rank).read_text(encoding="utf-8", errors="replace")
    return "\n".join(text.splitlines()[-_NUM_TAIL_LINES:])
