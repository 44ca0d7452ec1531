"""Rank processes of ``demo``, ``bench`` and ``--nproc``, which end with their parent.

Each is ``python -m dist_ckpt_strategies.cli.ranks FD`` and calls one function. It gets its task
through that connection, and sends events (rank 0 alone) and its result or failure.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from pkgutil import resolve_name
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NoReturn

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

_START_S = 120.0
"""Longest time until all ranks have imported torch and found each other, in seconds."""
_STOP_TIMEOUT_S = 3.0
_NUM_TAIL_LINES = 15

_Process = subprocess.Popen[bytes]
_Failure = tuple[float, str, CheckpointError | None]
"""When it happened, what to say of it, and the error if that is one of this package."""


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
    silence_s: float | None = None,
) -> Any:
    """Call a function on new processes, the ranks of a gloo world; on return none is left.

    Args:
        function: ``module:name``; called with the task, the ranks' communicator, and what reports
            an event on rank 0.
        task: for every rank; pickled.
        num_ranks: how many processes.
        timeout_s: longest wait of a rank for another one, in seconds.
        on_event: called with every event, in order, in this thread.
        silence_s: longest time without an event, in seconds; None: any.

    Returns:
        What the function returned on rank 0.

    Raises:
        RankError: a rank failed (the first one is named; the cause is its error, if that is one of
            this package), or there was no event for too long.
    """
    with _leaving_on_sigterm(), TemporaryDirectory(prefix="dist-ckpt-ranks-") as directory:
        scratch = Path(directory)
        job = (num_ranks, directory, timeout_s, function, task)
        with _started(num_ranks, scratch, job) as processes:
            running: dict[Any, int] = {one: rank for rank, one in enumerate(processes)}
            found: dict[str, dict[int, Any]] = {"result": {}, "failure": {}}
            has_failed = False
            # After a failure only what the others have sent before.
            while running and (ready := wait([*running], 0.0 if has_failed else silence_s)):
                connection: Any
                for connection in ready:
                    try:
                        kind, content = connection.recv()
                    except (EOFError, ConnectionError):  # its process has ended
                        del running[connection]
                        has_failed |= bool(processes[connection].wait())
                        continue
                    if kind == "event":
                        on_event(content)
                    else:
                        found[kind][running[connection]] = content
            if has_failed:
                raise _failure([*processes.values()], found["failure"], scratch)
            if running:
                names = ", ".join(map(str, running.values()))
                text = f"rank(s) {names} still running, but nothing happened for {silence_s:g} s"
                raise _noted(RankError(text), scratch, min(running.values()))
        return found["result"][0]


def _failure(
    processes: list[_Process], failures: Mapping[int, _Failure], scratch: Path
) -> RankError:
    """The failure of the rank that failed first: ended by a signal, or with the earliest record.

    A rank records its failure before it ends, and the failures that this causes on others come
    later; so the earliest record is the cause, whichever process ended first.
    """
    codes = {rank: code for rank, process in enumerate(processes) if (code := process.poll())}
    killed = [rank for rank, code in codes.items() if code < 0]
    if killed or not failures:
        first = min(killed or codes)
        error = RankError(f"rank {first} failed (exit status {codes[first]})")
    else:
        first = min(failures, key=lambda rank: failures[rank][0])
        _, text, cause = failures[first]
        error = RankError(f"rank {first}: {text}")
        error.__cause__ = cause
    return _noted(error, scratch, first)


def _noted(error: RankError, scratch: Path, rank: int) -> RankError:
    output = _log_path(scratch, rank).read_text(encoding="utf-8", errors="replace")
    tail = "\n".join(output.splitlines()[-_NUM_TAIL_LINES:])
    for shown in filter(None, (error, error.__cause__)):
        shown.add_note(f"the end of the output of rank {rank}:\n{tail}")
    return error


def _log_path(scratch: Path, rank: int) -> Path:
    return scratch / f"rank{rank}.log"


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
def _started(num_ranks: int, scratch: Path, job: tuple[Any, ...]) -> Iterator[dict[Any, _Process]]:
    """The processes of all ranks, by the connections to them; on leaving none is left."""
    processes: dict[Any, _Process] = {}
    try:
        for rank in range(num_ranks):
            ours, theirs = Pipe()
            with theirs, _log_path(scratch, rank).open("wb") as log:
                processes[ours] = subprocess.Popen(  # noqa: S603 - our own interpreter and module
                    # -P: a file of the user's working directory must not pass for a module.
                    [sys.executable, "-P", "-m", __name__, str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=_rank_environment(),
                )
            with suppress(ConnectionError):  # it has ended, which is noticed later
                ours.send((rank, *job))
        yield processes
    finally:
        for connection in processes:
            connection.close()
        deadline = time.monotonic() + _STOP_TIMEOUT_S
        for process in processes.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            process.kill()
            process.wait()


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


def main(connection: Connection) -> None:
    """Be one rank: call the function in its world, and send the result or the failure."""
    # A session of our own: Ctrl-C reaches the parent alone, which then stops its ranks.
    os.setsid()
    warnings.simplefilter("ignore")
    rank, num_ranks, scratch, timeout_s, function, task = connection.recv()
    threading.Thread(target=_end_with_parent, args=(connection,), daemon=True).start()

    def report(event: str, **fields: Any) -> None:
        if rank == 0:
            connection.send(("event", {"event": event, **fields}))

    try:
        import torch  # noqa: PLC0415 - the parent does without
        from torch._C._distributed_c10d import FileStore  # noqa: PLC0415

        torch.set_num_threads(1)
        call = resolve_name(function)
        store = FileStore(f"{scratch}/store", num_ranks)
        start_s = max(_START_S, timeout_s)
        with open_world(rank, num_ranks, store, start_s=start_s, timeout_s=timeout_s) as comm:
            result = call(task, comm, report)
        connection.send(("result", result if rank == 0 else None))
    except BaseException as error:
        cause = error if isinstance(error, CheckpointError) else None
        connection.send(("failure", (time.monotonic(), f"{type(error).__name__}: {error}", cause)))
        raise


def _end_with_parent(connection: Connection) -> None:
    """End this process, and all that it has started, when the parent closes its end or dies."""
    with suppress(EOFError, OSError):
        connection.recv()
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(Connection(int(sys.argv[1])))
