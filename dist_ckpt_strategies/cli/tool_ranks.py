"""Verify, convert and diff on several processes: the ranks of torchrun, or some that are started.

A process that the command starts runs ``python -m dist_ckpt_strategies.cli.tool_ranks RANK TASK``.
It prints nothing: the process of the command is rank 0, shows progress and reports.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from dist_ckpt_strategies.cli.ranks import (
    child_environment,
    end_with_parent,
    rank_commands,
    started,
    stop,
    task_of,
)
from dist_ckpt_strategies.comm.shared_work import open_world
from dist_ckpt_strategies.config import (
    options_from_environment,
    rank_from_environment,
    update_environment,
)
from dist_ckpt_strategies.errors import CheckpointError, PeerLostError, PlanError
from dist_ckpt_strategies.formats.issues import Watch

if TYPE_CHECKING:  # torch takes a while to import, and one process goes without
    from dist_ckpt_strategies.comm.base import Communicator

WatchOf = Callable[[str], Watch | None]
"""Opens a progress bar with a description; gives None on ranks that show none."""

Tool = Callable[..., Any]
Processes = Sequence[subprocess.Popen[bytes]]
T = TypeVar("T")

_HOST = "127.0.0.1"
_START_S = 120.0
"""Longest time until all processes have imported torch and found each other."""

_PAUSE_S = 0.05
_END_S = 3.0


def reports(nproc: int | None) -> bool:
    """Whether this process prints what a tool has found; other ranks of torchrun do not."""
    return nproc is not None or rank_from_environment()[0] == 0


def run_tool(tool: str, arguments: Mapping[str, Any], nproc: int | None, watch_of: WatchOf) -> Any:
    """Run a tool on all ranks, and return its result. No process is left when this returns.

    Collective under torchrun.

    Args:
        tool: its name.
        arguments: plain values.
        nproc: processes of this node; None: the ranks of torchrun, else this process alone.
        watch_of: for progress, on the first rank.

    Raises:
        PlanError: torchrun has started several ranks, and ``nproc`` asks for more.
        PeerLostError: a process could not be started, or has ended.
    """
    rank, size = rank_from_environment()
    if size > 1 and nproc is not None and nproc > 1:
        raise PlanError(
            f"--nproc {nproc}: WORLD_SIZE says that this is one of {size} ranks already; leave "
            "--nproc out, or unset RANK and WORLD_SIZE"
        )
    if (nproc or size) == 1:
        return _function(tool)(**arguments, comm=None, watch_of=watch_of)
    if nproc is not None:
        with _started_group(tool, arguments, nproc) as (comm, processes):
            return _interruptible(
                lambda: _function(tool)(**arguments, comm=comm, watch_of=watch_of),
                lambda: stop(processes),
            )
    watch_of = watch_of if rank == 0 else _no_watch
    with _world(rank, size) as comm:
        return _interruptible(
            lambda: _function(tool)(**arguments, comm=comm, watch_of=watch_of), lambda: None
        )


def _function(tool: str) -> Tool:
    if tool == "verify":
        from dist_ckpt_strategies.cli.inspect import verified  # noqa: PLC0415

        return verified
    from dist_ckpt_strategies.cli import convert  # noqa: PLC0415

    return convert.TOOLS[tool]


def _no_watch(_description: str) -> None:
    """No progress is shown on this rank."""


def _interruptible(step: Callable[[], T], on_interrupt: Callable[[], None]) -> T:
    """The result of a step, from a thread of its own: Ctrl-C does not reach into a wait of gloo."""
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(step())
        except BaseException as error:  # noqa: BLE001 - ``result`` raises it
            outcome.set_exception(error)

    thread = threading.Thread(target=run, name="dist-ckpt-tool", daemon=True)
    thread.start()
    try:
        while thread.is_alive():  # with a limit, or a signal that another thread gets is not seen
            thread.join(_PAUSE_S)
        return outcome.result()
    except KeyboardInterrupt:
        on_interrupt()
        thread.join(_END_S)
        raise


@contextmanager
def _started_group(
    tool: str, arguments: Mapping[str, Any], nproc: int
) -> Iterator[tuple[Communicator, Processes]]:
    """This process as rank 0, and others that are started for the tool, and ended after it."""
    from torch._C._distributed_c10d import TCPStore  # noqa: PLC0415

    update_environment({"GLOO_SOCKET_IFNAME": child_environment()["GLOO_SOCKET_IFNAME"]})
    store = TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
    task = {"tool": tool, "arguments": arguments, "port": store.port, "size": nproc}
    commands = rank_commands(__name__, nproc, task)[1:]
    outputs = [subprocess.DEVNULL] * len(commands)
    with started(commands, outputs, stderr=None) as processes:
        _wait_until_ready(store, processes)
        with _world(0, nproc, store) as comm:
            yield comm, processes
            _wait_until_ended(processes)


def _wait_until_ready(store: Any, processes: Processes) -> None:
    deadline = time.monotonic() + _START_S
    while not store.check([f"ready/{rank}" for rank in range(1, len(processes) + 1)]):
        for rank, process in enumerate(processes, start=1):
            if process.poll() is not None:
                text = f"its process ended with status {process.returncode} before it was ready"
                raise PeerLostError(rank, text)
        if time.monotonic() > deadline:
            raise PeerLostError(None, f"not all processes were ready within {_START_S:g} s")
        time.sleep(_PAUSE_S)


def _wait_until_ended(processes: Processes) -> None:
    """Give processes that are done the time to end by themselves."""
    deadline = time.monotonic() + _END_S
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        time.sleep(_PAUSE_S)


def _world(rank: int, size: int, store: Any = None) -> AbstractContextManager[Communicator]:
    timeout_s = options_from_environment().timeout_s
    return open_world(rank, size, store, start_s=_START_S, timeout_s=timeout_s)


def main(arguments: Sequence[str]) -> int:
    """Take part in a tool, as one of the processes that the command has started.

    Args:
        arguments: the rank, and the task.
    """
    end_with_parent()
    warnings.simplefilter("ignore")
    import torch  # noqa: PLC0415
    from torch._C._distributed_c10d import TCPStore  # noqa: PLC0415

    rank, task = task_of(arguments)
    torch.set_num_threads(1)
    function = _function(task["tool"])
    store = TCPStore(_HOST, task["port"], is_master=False)
    store.set(f"ready/{rank}", "")
    try:
        with _world(rank, task["size"], store) as comm:
            function(**task["arguments"], comm=comm, watch_of=_no_watch)
    except CheckpointError:
        return 1  # the first rank reports it
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
