"""Ranks as processes, for what threads cannot show: gloo, timeouts, killed peers."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import queue
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.strategies import filesystem_async
from torch._C._distributed_c10d import TCPStore

_HOST = "127.0.0.1"
_FAREWELL_S = 5.0
_END_S = 60.0  # from the end of a pipe to that of its process
_PRELOADED = (
    "tensorstore",
    "torch._dynamo",  # which the first call of an optimizer imports
    "dist_ckpt_strategies.comm.torch_communicator",
    "dist_ckpt_strategies.strategies.load",
    "dist_ckpt_strategies.strategies.local_replicated",
    "dist_ckpt_strategies.strategies.tensorstore",
    "dist_ckpt_strategies.cli.demo.rank",
    "dist_ckpt_strategies.inprocess.wrap",
    "dist_ckpt_strategies.inprocess.store_rendezvous",
    "dist_ckpt_strategies.local",
    "dist_ckpt_strategies.manager.manager",
    "hypothesis",
    "psutil",
    "pytest",
    "tests.support.entries",
    "tests.support.sharded_training",
    "tests.support.sharding",
    # The last: from then on the collector leaves alone what is there.
    "tests.support.frozen",
)
"""Imported once, in the server that ranks are forked from. Importing starts no thread; the server
never uses TensorStore or torch, which a fork would not survive."""


class RankDiedError(Exception):
    """The process of a rank ended without a result; ``exit_code`` is -9 after SIGKILL."""

    def __init__(self, exit_code: int | None) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code


_NUM_TRIES = 3
_NOT_CONNECTED = 75
"""With this a rank ends that gloo could not connect to the others, as happens now and then where
the machine is busy. The test's body has not begun."""


class _NotConnectedError(Exception):
    """A rank has ended so."""


@dataclass(frozen=True, slots=True)
class _Rendezvous:
    """What a rank needs to find the others."""

    size: int
    port: int
    timeout_s: float
    makes_group: bool


def run_processes(
    size: int,
    body: Callable[..., Any],
    *args: Any,
    timeout_s: float = 120.0,
    makes_group: bool = True,
    on_death: Callable[[int], None] | None = None,
) -> list[Any]:
    """What ``body(rank, *args)`` comes to in ``size`` processes, the world of a gloo group.

    The exception, as an object, where it raised; a RankDiedError where its process has ended. The
    processes stay until the last of them has a result, and none is left when this returns.

    Args:
        size: number of ranks.
        body: a function at the top level of its module.
        args: passed to it; they and the result are pickled.
        timeout_s: by which every rank has to be done; else a TimeoutError is raised.
        makes_group: False: the ranks make process groups themselves, and take them down.
        on_death: called with a rank whose process is gone, which is then begun anew.
    """
    tries_left = _NUM_TRIES
    while True:
        tries_left -= 1
        # As under torchrun, the store lives outside the ranks and outlasts each of them.
        store = TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
        processes, farewell_s = Processes(), 0.0
        rendezvous = _Rendezvous(size, store.port, timeout_s, makes_group)
        try:
            results = _results(processes, (rendezvous, body, args), on_death)
            farewell_s = _FAREWELL_S
        except _NotConnectedError:
            if not tries_left:
                raise
        else:
            return results
        finally:
            processes.end(*range(size), farewell_s=farewell_s)


def done_by(size: int, body: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
    """The results of ``run_processes``; what a rank raised is raised."""
    results = run_processes(size, body, *args, **options)
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def _results(
    processes: Processes, task: tuple[Any, ...], on_death: Callable[[int], None] | None
) -> list[Any]:
    size, limit_s = task[0].size, task[0].timeout_s
    for rank in range(size):
        processes.start(rank, _run_rank, *task)
    deadline = time.monotonic() + limit_s
    found: dict[int, Any] = {}
    while waiting := [rank for rank in range(size) if rank not in found]:
        came = processes.receive(waiting, max(0.0, deadline - time.monotonic()))
        if not came:
            raise TimeoutError(f"ranks {waiting} not done in {limit_s:g} s; the others: {found}")
        for rank, result in came.items():
            has_died = isinstance(result, RankDiedError)
            if has_died and result.exit_code == _NOT_CONNECTED:
                raise _NotConnectedError
            if has_died and on_death is not None:
                on_death(rank)
                processes.end(rank)
                processes.start(rank, _run_rank, *task)
            else:
                found[rank] = result
    return [found[rank] for rank in range(size)]


class Processes:
    """Processes of ranks, each at the end of a pipe."""

    def __init__(self) -> None:
        self._running: dict[int, tuple[Connection, ForkServerProcess]] = {}

    def start(self, rank: int, target: Callable[..., None], *args: Any) -> None:
        """Have a new process run ``target(rank, *args, pipe)``."""
        ours, theirs = forkserver().Pipe()
        process = forkserver().Process(target=target, args=(rank, *args, theirs), daemon=True)
        process.start()
        theirs.close()
        self._running[rank] = (ours, process)

    def ranks(self) -> set[int]:
        """Those that were started and not ended."""
        return set(self._running)

    def pid(self, rank: int) -> int:
        found = self._running[rank][1].pid
        assert found is not None
        return found

    def send(self, rank: int, item: Any) -> None:
        """Send something through the pipe; an ended process is noticed later."""
        with suppress(BrokenPipeError, ConnectionResetError):
            self._running[rank][0].send(item)

    def receive(self, ranks: list[int], timeout_s: float) -> dict[int, Any]:
        """What has come from some of them; a RankDiedError where a process has ended."""
        pipes = {self._running[rank][0]: rank for rank in ranks}
        found: dict[int, Any] = {}
        for pipe in wait(list(pipes), timeout=timeout_s):
            assert isinstance(pipe, Connection)
            rank = pipes[pipe]
            try:
                found[rank] = pipe.recv()
            except (EOFError, ConnectionResetError):
                process = self._running[rank][1]
                process.join(_END_S)
                found[rank] = RankDiedError(process.exitcode)
        return found

    def end(self, *ranks: int, farewell_s: float = 0.0) -> None:
        """Release those that wait for the others; kill what is still there later."""
        ended = [self._running.pop(rank) for rank in ranks if rank in self._running]
        deadline = time.monotonic() + farewell_s
        for pipe, _ in ended:
            pipe.close()
        for _, process in ended:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
            process.close()


@cache
def forkserver() -> ForkServerContext:
    """Starts processes within a tenth of a second, as everything is imported when it is there."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_PRELOADED))
    first = context.Process(daemon=True)
    first.start()
    first.join()
    first.close()
    return context


def allow_torch_dist() -> None:
    """Let this rank save as torch_dist, which starts processes of its own; daemons may not.

    One of them would only hold a queue of results, and import torch again for it: several seconds
    for each rank. A queue in this process does as long as saves are not asynchronous.
    """
    allow_processes()
    vars(filesystem_async)["_results_queue"] = queue.Queue()


def allow_processes() -> None:
    """Let this rank start processes; daemons may not. It has to end them."""
    vars(multiprocessing.current_process())["_config"]["daemon"] = False


def _run_rank(
    rank: int,
    rendezvous: _Rendezvous,
    body: Callable[..., Any],
    args: tuple[Any, ...],
    pipe: Connection,
) -> None:
    faulthandler.dump_traceback_later(max(0.1, rendezvous.timeout_s - 0.5))
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(rendezvous.size),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    torch.set_num_threads(1)
    if rendezvous.makes_group:
        _join(rank, rendezvous)
    try:
        pipe.send_bytes(_pickled(_outcome(rank, body, args)))
        # A rank that leaves early breaks its peers' connections, and what is still on the way.
        with suppress(EOFError, OSError):
            pipe.recv_bytes()
    finally:
        if rendezvous.makes_group:
            dist.destroy_process_group()
    faulthandler.cancel_dump_traceback_later()


def _outcome(rank: int, body: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    try:
        return body(rank, *args)
    except Exception as error:  # noqa: BLE001 - handed to the test, which looks at it
        error.add_note("".join(traceback.format_exception(error)))
        return error


def _join(rank: int, rendezvous: _Rendezvous) -> None:
    limit = timedelta(seconds=rendezvous.timeout_s)
    store = TCPStore(_HOST, rendezvous.port, is_master=False, timeout=limit)
    try:
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=rendezvous.size, timeout=limit
        )
    except RuntimeError as error:
        if "connectFullMesh" not in str(error):
            raise
        os._exit(_NOT_CONNECTED)


def _pickled(result: Any) -> bytes:
    try:
        content = pickle.dumps(result)
        pickle.loads(content)
    except Exception as error:  # noqa: BLE001 - whatever a foreign __reduce__ raises
        return pickle.dumps(TypeError(f"result {result!r} does not pickle: {error!r}"))
    return content
