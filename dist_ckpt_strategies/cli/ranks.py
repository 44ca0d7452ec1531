"""Rank processes of ``demo``, ``bench`` and ``--nproc``, which end with their parent.

Each is ``python -m dist_ckpt_strategies.cli.ranks RANK SCRATCH`` and calls one function. Rank 0
reports events, one JSON object per line of a file that the parent follows, and the result.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from pkgutil import resolve_name
from tempfile import TemporaryDirectory
from typing import IO, TYPE_CHECKING, Any, NoReturn

from dist_ckpt_strategies.comm.shared_work import open_world
from dist_ckpt_strategies.config import (
    environment,
    options_from_environment,
    rank_from_environment,
)
from dist_ckpt_strategies.errors import CheckpointError, PlanError
from dist_ckpt_strategies.formats.issues import Watch

if TYPE_CHECKING:  # torch takes a while to import, and the parent goes without
    from dist_ckpt_strategies.comm.base import Communicator

Event = dict[str, Any]
"""What rank 0 reports; ``event`` says which kind."""

WatchOf = Callable[[str], Watch]
"""Opens a progress bar with a description."""

_EVENTS, _RESULT, _TASK = "events.jsonl", "result", "task"
_START_S = 120.0
"""Longest time until all ranks have imported torch and found each other, in seconds."""
_POLL_S = 0.05
_STOP_TIMEOUT_S = 3.0
_NUM_TAIL_LINES = 15

_Process = subprocess.Popen[bytes]


class RankError(CheckpointError):
    """A rank failed, or the ranks made no progress; a note has the end of its output."""


def is_reporting(nproc: int | None) -> bool:
    """Whether this process prints what a tool has found; other ranks of torchrun do not."""
    return nproc is not None or rank_from_environment()[0] == 0


def run_tool(
    function: str, arguments: Mapping[str, Any], nproc: int | None, watch_of: WatchOf
) -> Any:
    """Call a function on all ranks that share a tool's work; returns its result.

    Collective under torchrun.

    Args:
        function: ``module:name``; called with the arguments, ``comm`` and ``watch_of``.
        arguments: plain values.
        nproc: new processes of this node; None: the ranks of torchrun, else this process alone.
        watch_of: for progress.

    Raises:
        PlanError: torchrun has started several ranks, and ``nproc`` asks for more.
        RankError: a process ended before the function did.
    """
    rank, size = rank_from_environment()
    if size > 1 and nproc is not None and nproc > 1:
        raise PlanError(
            f"--nproc {nproc}: WORLD_SIZE says that this is one of {size} ranks already; leave "
            "--nproc out, or unset RANK and WORLD_SIZE"
        )
    if (nproc or size) == 1:
        return resolve_name(function)(**arguments, comm=None, watch_of=watch_of)
    timeout_s = options_from_environment().timeout_s
    if nproc is None:
        with open_world(rank, size, None, start_s=_START_S, timeout_s=timeout_s) as comm:
            return resolve_name(function)(**arguments, comm=comm, watch_of=watch_of)
    bars: dict[str, Watch] = {}

    def show(event: Event) -> None:
        description = event["event"]
        if description not in bars:
            bars[description] = watch_of(description)
        bars[description](event["done"], event["total"])

    try:
        task = (function, dict(arguments))
        return run_ranks(f"{__name__}:tool_rank", task, nproc, timeout_s=timeout_s, on_event=show)
    except RankError as error:
        if error.__cause__ is None:
            raise
        raise error.__cause__ from None


def tool_rank(
    task: tuple[str, dict[str, Any]], comm: Communicator, report: Callable[..., None]
) -> Any:
    """Call a tool's function on one rank that ``run_tool`` has started."""
    function, arguments = task

    def watch_of(description: str) -> Watch:
        return lambda done, total: report(description, done=done, total=total)

    return resolve_name(function)(**arguments, comm=comm, watch_of=watch_of)


def run_ranks(
    function: str,
    task: Any,
    num_ranks: int,
    *,
    timeout_s: float,
    on_event: Callable[[Event], None],
    silence_s: float = math.inf,
) -> Any:
    """Call a function on new processes, the ranks of a gloo world; on return none is left.

    Args:
        function: ``module:name``; called with the task, the ranks' communicator, and what reports
            an event on rank 0.
        task: for every rank; pickled.
        num_ranks: how many processes.
        timeout_s: longest wait of a rank for another one, in seconds.
        on_event: called with every event, in order, in this thread.
        silence_s: longest time without an event, in seconds.

    Returns:
        What the function returned on rank 0.

    Raises:
        RankError: a rank failed (the first one is named; the cause is its error, if that is one of
            this package), or there was no event for too long.
    """
    with _leaving_on_sigterm(), TemporaryDirectory(prefix="dist-ckpt-ranks-") as directory:
        scratch, last_event = Path(directory), time.monotonic()
        (scratch / _TASK).write_bytes(pickle.dumps((function, task, num_ranks, timeout_s)))
        (scratch / _EVENTS).touch()
        with (scratch / _EVENTS).open("rb") as events, _started(num_ranks, scratch) as processes:
            is_running = True
            while is_running:
                is_running = _is_any_running(processes, scratch)
                for event in _new_events(events):
                    last_event = time.monotonic()
                    on_event(event)
                if is_running and time.monotonic() > last_event + silence_s:
                    raise _silent(processes, scratch, silence_s)
                time.sleep(_POLL_S if is_running else 0)
        return pickle.loads((scratch / _RESULT).read_bytes())  # noqa: S301 - our own


def _new_events(file: IO[bytes]) -> Iterator[Event]:
    """Events whose line is complete and was not read before."""
    while (line := file.readline()).endswith(b"\n"):
        yield json.loads(line)
    file.seek(-len(line), os.SEEK_CUR)


@contextmanager
def _leaving_on_sigterm() -> Iterator[None]:
    """Within the block SIGTERM runs every ``finally``, so that no process or file is left."""

    def leave(signal_number: int, _frame: object) -> NoReturn:
        raise SystemExit(128 + signal_number)

    previous = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


@contextmanager
def _started(num_ranks: int, scratch: Path) -> Iterator[list[_Process]]:
    """The processes of all ranks; within the block they run.

    Each has a pipe as standard input, to which this process never writes: it ends with us.
    """
    processes: list[_Process] = []
    with ExitStack() as logs:
        try:
            for rank in range(num_ranks):
                process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
                    # -P: a file of the user's working directory must not pass for a module.
                    [sys.executable, "-P", "-m", __name__, str(rank), str(scratch)],
                    stdin=subprocess.PIPE,
                    stdout=logs.enter_context(_log_path(scratch, rank).open("wb")),
                    stderr=subprocess.STDOUT,
                    env=_rank_environment(),
                )
                processes.append(process)
            yield processes
        finally:
            _stop(processes)


def _rank_environment() -> dict[str, str]:
    """This package importable, no GPU, gloo on the loopback device.

    Gloo would otherwise choose the device that the host's name resolves to, which on many
    laptops and in many containers cannot be reached.
    """
    found = {**environment(), "CUDA_VISIBLE_DEVICES": ""}
    root = str(Path(__file__).resolve().parents[2])
    found["PYTHONPATH"] = os.pathsep.join(filter(None, [root, found.get("PYTHONPATH")]))
    if sys.platform == "linux":
        found.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return found


def _stop(processes: Sequence[_Process]) -> None:
    """End those that still run, and wait for all."""
    for process in processes:
        if process.stdin is not None:
            process.stdin.close()
    deadline = time.monotonic() + _STOP_TIMEOUT_S
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    for process in processes:
        process.kill()
        process.wait()


def _is_any_running(processes: Sequence[_Process], scratch: Path) -> bool:
    """Whether not all have ended.

    Raises:
        RankError: at least one failed.
    """
    codes = [process.poll() for process in processes]
    if any(codes):
        raise _failure(codes, scratch)
    return None in codes


def _failure(codes: Sequence[int | None], scratch: Path) -> RankError:
    """The failure of the rank that failed first: ended by a signal, or with the earliest record.

    A rank records its failure before it ends, and the failures that this causes on others come
    later; so the earliest record is the cause, whichever process ended first.
    """
    paths = [_failure_path(scratch, rank) for rank in range(len(codes))]
    records = {
        rank: pickle.loads(path.read_bytes())  # noqa: S301 - our own
        for rank, path in enumerate(paths)
        if path.exists()
    }
    killed = [rank for rank, code in enumerate(codes) if code is not None and code < 0]
    if killed or not records:
        first = (killed or [rank for rank, code in enumerate(codes) if code])[0]
        error = RankError(f"rank {first} failed (exit status {codes[first]})")
    else:
        first = min(records, key=lambda rank: float(records[rank][0]))
        _, text, cause = records[first]
        error = RankError(f"rank {first}: {text}")
        error.__cause__ = cause
    return _noted(error, scratch, first)


def _silent(processes: Sequence[_Process], scratch: Path, silence_s: float) -> RankError:
    running = [rank for rank, process in enumerate(processes) if process.poll() is None]
    names = ", ".join(map(str, running))
    text = f"rank(s) {names} still running, but nothing happened for {silence_s:g} s"
    return _noted(RankError(text), scratch, running[0] if running else 0)


def _noted(error: RankError, scratch: Path, rank: int) -> RankError:
    output = _log_path(scratch, rank).read_text(encoding="utf-8", errors="replace")
    tail = "\n".join(output.splitlines()[-_NUM_TAIL_LINES:])
    for shown in filter(None, (error, error.__cause__)):
        shown.add_note(f"the end of the output of rank {rank}:\n{tail}")
    return error


def _failure_path(scratch: Path, rank: int) -> Path:
    return scratch / f"rank{rank}.failure"


def _log_path(scratch: Path, rank: int) -> Path:
    return scratch / f"rank{rank}.log"


def main(rank: int, scratch: Path) -> None:
    """Be one rank: call the function in its world; result or failure are left in ``scratch``."""
    _end_with_parent()
    warnings.simplefilter("ignore")

    def report(event: str, **fields: Any) -> None:
        if rank == 0:
            with (scratch / _EVENTS).open("a", encoding="utf-8") as file:
                file.write(json.dumps({"event": event, **fields}) + "\n")

    try:
        import torch  # noqa: PLC0415 - the parent does without
        from torch._C._distributed_c10d import FileStore  # noqa: PLC0415

        torch.set_num_threads(1)
        content = (scratch / _TASK).read_bytes()
        function, task, num_ranks, timeout_s = pickle.loads(content)  # noqa: S301 - our own
        call = resolve_name(function)
        store = FileStore(str(scratch / "store"), num_ranks)
        start_s = max(_START_S, timeout_s)
        with open_world(rank, num_ranks, store, start_s=start_s, timeout_s=timeout_s) as comm:
            result = call(task, comm, report)
        if rank == 0:
            (scratch / _RESULT).write_bytes(pickle.dumps(result))
    except BaseException as error:
        cause = error if isinstance(error, CheckpointError) else None
        record = (time.monotonic(), f"{type(error).__name__}: {error}", cause)
        unfinished = scratch / f"rank{rank}.unfinished"
        unfinished.write_bytes(pickle.dumps(record))
        unfinished.rename(_failure_path(scratch, rank))
        raise


def _end_with_parent() -> None:
    """End this process, and all that it has started, when the parent stops it or dies.

    The parent holds the other end of our standard input and never writes to it. A session of our
    own: Ctrl-C reaches the parent alone, which then stops its ranks.
    """

    def end_at_end_of_input() -> None:
        os.read(sys.stdin.fileno(), 1)
        os.killpg(0, signal.SIGKILL)

    os.setsid()
    threading.Thread(target=end_at_end_of_input, daemon=True).start()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
