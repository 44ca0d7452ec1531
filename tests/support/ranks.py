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
_END_S = 60.0
"""From the end of a pipe to that of its process."""
_PRELOADED = (
    "torch.distributed",
    "tensorstore",
    "megatron.core.dist_checkpointing",
    "dist_ckpt_strategies.comm.torch_communicator",
    "dist_ckpt_strategies.strategies.entry",
    "dist_ckpt_strategies.strategies.local_replicated",
    "dist_ckpt_strategies.strategies.tensorstore",
    "dist_ckpt_strategies.cli.demo.rank",
    "dist_ckpt_strategies.inprocess.wrap",
    "dist_ckpt_strategies.inprocess.store_coordinator",
    "dist_ckpt_strategies.local",
    "dist_ckpt_strategies.recovery.latest",
    "torch.distributed.checkpoint",
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
    """Call ``body(rank, *args)`` in ``size`` new processes, the world of a gloo process group.

    The default process group is initialised before ``body`` and destroyed after it; the processes
    stay until the last of them has a result, and none is left when this returns or raises.

    Args:
        size: number of ranks.
        body: a function at the top level of its module.
        args: passed to it; they and the result are pickled.
        timeout_s: by which every rank has to be done, in seconds.
        makes_group: False: the ranks make process groups themselves, and take them down.
        on_death: called with a rank whose process is gone, which is then begun anew; None: its
            result is a RankDiedError.

    Returns:
        By rank: what ``body`` returned; the exception, as an object, where it raised; a
        RankDiedError where the process ended by itself or was killed.

    Raises:
        TimeoutError: a rank was not done in time. All have been killed.
    """
    for _ in range(_NUM_TRIES - 1):
        with suppress(_NotConnectedError):
            return _run_once(size, body, args, timeout_s, on_death, makes_group=makes_group)
    return _run_once(size, body, args, timeout_s, on_death, makes_group=makes_group)


def _run_once(
    size: int,
    body: Callable[..., Any],
    args: tuple[Any, ...],
    timeout_s: float,
    on_death: Callable[[int], None] | None,
    *,
    makes_group: bool,
) -> list[Any]:
    # As under torchrun, the store lives outside the ranks and outlasts each of them.
    store = TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
    rendezvous = _Rendezvous(size, store.port, timeout_s, makes_group)
    processes = _Processes(rendezvous, body, args)
    farewell_s = 0.0
    try:
        for rank in range(size):
            processes.start(rank)
        results = processes.results(on_death)
        farewell_s = _FAREWELL_S
    finally:
        processes.end(farewell_s)
        del store
    return results


class _Processes:
    """The ranks of one world."""

    def __init__(
        self, rendezvous: _Rendezvous, body: Callable[..., Any], args: tuple[Any, ...]
    ) -> None:
        self._rendezvous, self._body, self._args = rendezvous, body, args
        self._started: list[tuple[Connection, int, ForkServerProcess]] = []

    def start(self, rank: int) -> None:
        """Begin a rank."""
        ours, theirs = forkserver().Pipe()
        task = (rank, self._rendezvous, theirs, self._body, self._args)
        process = forkserver().Process(target=_run_rank, args=task, daemon=True)
        process.start()
        theirs.close()
        self._started.append((ours, rank, process))

    def results(self, on_death: Callable[[int], None] | None) -> list[Any]:
        """What each rank came to; see ``run_processes``."""
        limit_s, deadline = (
            self._rendezvous.timeout_s,
            time.monotonic() + self._rendezvous.timeout_s,
        )
        found: dict[int, Any] = {}
        while len(found) < self._rendezvous.size:
            newest = {rank: (pipe, process) for pipe, rank, process in self._started}
            pipes = {pipe: rank for rank, (pipe, _) in newest.items() if rank not in found}
            ready = wait(list(pipes), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                late = sorted(pipes.values())
                raise TimeoutError(f"ranks {late} not done in {limit_s:g} s; the others: {found}")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = pipes[pipe]
                result = _result(pipe, newest[rank][1])
                if isinstance(result, RankDiedError) and on_death is not None:
                    on_death(rank)
                    self.start(rank)
                else:
                    found[rank] = result
        return [found[rank] for rank in range(self._rendezvous.size)]

    def end(self, farewell_s: float) -> None:
        """Release the ranks that wait for the others; kill what is still there later."""
        for pipe, _, _ in self._started:
            pipe.close()
        deadline = time.monotonic() + farewell_s
        for _, _, process in self._started:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
            process.close()


@cache
def forkserver() -> ForkServerContext:
    """Starts processes within a tenth of a second, with everything imported.

    The first time it returns once that is so: half a minute on a busy machine, which is not to
    count as time of the ranks.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_PRELOADED))
    first = context.Process(target=_nothing, daemon=True)
    first.start()
    first.join()
    first.close()
    return context


def _nothing() -> None:
    """What the first process does."""


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


def _result(pipe: Connection, process: ForkServerProcess) -> Any:
    try:
        return pickle.loads(pipe.recv_bytes())
    except (EOFError, ConnectionResetError):
        process.join(_END_S)
        if process.exitcode == _NOT_CONNECTED:
            raise _NotConnectedError from None
        return RankDiedError(process.exitcode)


def _run_rank(
    rank: int,
    rendezvous: _Rendezvous,
    pipe: Connection,
    body: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    faulthandler.dump_traceback_later(max(0.1, rendezvous.timeout_s - 0.5))
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(rendezvous.size),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    torch.set_num_threads(1)
    if not rendezvous.makes_group:
        pipe.send_bytes(_pickled(_outcome(rank, body, args)))
        _await_the_others(pipe)
        return
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
    try:
        pipe.send_bytes(_pickled(_outcome(rank, body, args)))
        _await_the_others(pipe)
    finally:
        dist.destroy_process_group()
    faulthandler.cancel_dump_traceback_later()


def _outcome(rank: int, body: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    try:
        return body(rank, *args)
    except Exception as error:  # noqa: BLE001 - handed to the test, which looks at it
        error.add_note("".join(traceback.format_exception(error)))
        return error


def _pickled(result: Any) -> bytes:
    try:
        content = pickle.dumps(result)
        pickle.loads(content)
    except Exception as error:  # noqa: BLE001 - whatever a foreign __reduce__ raises
        return pickle.dumps(TypeError(f"result {result!r} does not pickle: {error!r}"))
    return content


def _await_the_others(pipe: Connection) -> None:
    """A rank that leaves early breaks its peers' connections, and what is still on the way."""
    try:
        pipe.recv_bytes()
    except (EOFError, OSError):
        return
