"""Ranks that are replaced when they die, as under the launcher, but forked from a warmed parent.

Megatron-Core takes seven seconds to import; ``dist-ckpt run`` starts every worker afresh.
"""

from __future__ import annotations

import faulthandler
import os
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from typing import Any

import torch

from dist_ckpt_strategies.comm.job_store import JobStore, host_store
from dist_ckpt_strategies.inprocess.coordinator import Fault, FaultMode, RankInfo
from dist_ckpt_strategies.inprocess.store_coordinator import RestartState
from tests.support.ranks import forkserver
from tests.support.restarts import HOST, Wrappers

_MAX_DEATHS = 8


def run_respawned(
    size: int, body: Callable[..., Any], *args: Any, timeout_s: float = 120.0
) -> tuple[list[Any], list[int]]:
    """Call ``body(rank, wrappers, *args)`` in processes; one that dies is begun anew.

    Returns:
        What each rank returned, an exception where it raised; and the ranks that have died.

    Raises:
        TimeoutError: some rank had no result in time. None is left running, however this ends.
    """
    forkserver()
    host = host_store()
    world = _World(size, host.port, time.monotonic() + timeout_s, body, args)
    try:
        return world.run()
    finally:
        world.end()
        del host


class _World:
    def __init__(
        self, size: int, port: int, deadline: float, body: Callable[..., Any], args: tuple[Any, ...]
    ) -> None:
        self._task = (size, port, deadline, body, args)
        self._state = RestartState(JobStore(HOST, port))
        self._running: dict[Connection, tuple[int, str, ForkServerProcess]] = {}
        self._over: list[tuple[Connection, ForkServerProcess]] = []
        self._results: dict[int, Any] = {}
        self._died: list[int] = []
        self._num_started = 0
        for rank in range(size):
            self._start(rank)

    def run(self) -> tuple[list[Any], list[int]]:
        deadline = self._task[2]
        while self._running:
            ready = wait(list(self._running), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError(f"no result of {[r for r, _, _ in self._running.values()]}")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                self._hear(pipe)
        return [self._results[rank] for rank in sorted(self._results)], self._died

    def end(self) -> None:
        left = [(pipe, process) for pipe, (_, _, process) in self._running.items()] + self._over
        for pipe, _ in left:
            pipe.close()
        for pipe, process in left:
            if pipe in self._running:
                process.kill()
            process.join(5)
            process.kill()
            process.join()
            process.close()

    def _start(self, rank: int) -> None:
        worker = f"worker{self._num_started}"
        self._num_started += 1
        context = forkserver()
        ours, theirs = context.Pipe()
        process = context.Process(
            target=_on_rank, args=(rank, worker, theirs, self._task), daemon=True
        )
        process.start()
        theirs.close()
        self._running[ours] = (rank, worker, process)

    def _hear(self, pipe: Connection) -> None:
        rank, worker, process = self._running.pop(pipe)
        self._over.append((pipe, process))
        try:
            self._results[rank] = pipe.recv()
        except (EOFError, ConnectionResetError):
            self._replace(rank, worker)

    def _replace(self, rank: int, worker: str) -> None:
        """As the supervisor: first the end of what it had joined, then the new process."""
        self._died.append(rank)
        assert len(self._died) <= _MAX_DEATHS, self._died
        epoch = self._state.joined(worker)
        if epoch is not None:
            self._state.end(Fault(rank, epoch, FaultMode.DEATH, "the process is gone"))
        self._start(rank)


def _on_rank(rank: int, worker: str, pipe: Connection, task: tuple[Any, ...]) -> None:
    size, port, deadline, body, args = task
    faulthandler.dump_traceback_later(max(0.1, deadline - time.monotonic() - 0.5))
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "GLOO_SOCKET_IFNAME": "lo",
        "MASTER_ADDR": HOST,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    torch.set_num_threads(1)
    wrappers = Wrappers(worker, RankInfo(rank, rank, size, size), port)
    try:
        pipe.send(body(rank, wrappers, *args))
    except Exception as error:  # noqa: BLE001 - handed to the test, which looks at it
        pipe.send(RuntimeError(f"rank {rank}: {error!r}"))
    try:
        pipe.recv()
    except EOFError:
        return
