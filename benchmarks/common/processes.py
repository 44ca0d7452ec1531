"""Rank processes that carry out the same steps at the same time."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection, get_context
from multiprocessing.synchronize import Barrier
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # bound at run time

HOST = "127.0.0.1"
_GRACE_S = 20.0
"""A rank that was told to end and has not by then is killed."""


class RankFailedError(RuntimeError):
    """A rank process raised, died, or did not answer in time."""


@dataclass(frozen=True, slots=True)
class RankContext:
    """What a rank process is told when it starts.

    Attributes:
        global_rank: its number.
        num_ranks: how many there are.
        store_port: where the parent's TCPStore listens on this host.
        timeout_s: longest wait for another rank.
    """

    global_rank: int
    num_ranks: int
    store_port: int
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Timed:
    """One step carried out by all ranks.

    Attributes:
        seconds: from the first rank's start to the last rank's end.
        values: what the step returned, for each rank.
    """

    seconds: float
    values: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class _Call:
    method: str
    args: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class _Reply:
    started: float
    ended: float
    value: Any


@dataclass(frozen=True, slots=True)
class _Failure:
    text: str


@contextlib.contextmanager
def quiet_imports() -> Iterator[None]:
    """Without Megatron-Core's warnings, of which there is one for each module."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


def join_gloo(context: RankContext) -> None:
    """Make this process a rank of the default gloo group, one thread for its sums. Collective."""
    torch.set_num_threads(1)
    timeout = timedelta(seconds=context.timeout_s)
    dist.init_process_group(
        "gloo",
        store=TCPStore(HOST, context.store_port, is_master=False, timeout=timeout),
        rank=context.global_rank,
        world_size=context.num_ranks,
        timeout=timeout,
    )


class Ranks(AbstractContextManager["Ranks"]):
    """Processes that carry out the same steps at the same time.

    Each process makes one worker and then waits; ``step`` names a method of it. Leaving the block
    ends the processes and whatever they have started, in every case.
    """

    def __init__(self, num_ranks: int, module: str, *args: Any, timeout_s: float) -> None:
        """Prepare the processes; entering the block starts them.

        Args:
            num_ranks: how many.
            module: its ``make_worker(*args, context)`` makes the worker in each process. They are
                forked from a server that has imported it, and has done nothing else.
            args: have to be picklable.
            timeout_s: longest wait for a step.
        """
        self._timeout_s = timeout_s
        # The store is kept for as long as the ranks may ask it.
        self._store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        start = get_context("forkserver")
        start.set_forkserver_preload([module])
        # Named semaphores live as long as the process that made them holds on to them.
        self._barrier = start.Barrier(num_ranks)
        self._pipes: list[connection.Connection] = []
        self._processes = []
        for rank in range(num_ranks):
            ours, theirs = start.Pipe()
            context = RankContext(rank, num_ranks, self._store.port, timeout_s)
            process = start.Process(
                target=_rank_main, args=(context, module, args, theirs, self._barrier)
            )
            self._pipes.append(ours)
            self._processes.append((process, theirs))

    def __enter__(self) -> Self:
        """Start the processes and wait until each has its worker.

        Raises:
            RankFailedError: a rank could not make its worker.
        """
        try:
            for process, theirs in self._processes:
                process.start()
                theirs.close()
            self._replies("start")
        except BaseException:
            self._stop(kindly=False)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the processes."""
        self._stop(kindly=error is None)

    def step(self, method: str, *args: Any) -> Timed:
        """Run ``worker.method(*args)`` on every rank; all of them start together.

        Raises:
            RankFailedError: with the traceback of the rank that failed first.
        """
        for pipe in self._pipes:
            pipe.send(_Call(method, args))
        replies = self._replies(method)
        seconds = max(r.ended for r in replies) - min(r.started for r in replies)
        return Timed(seconds, tuple(reply.value for reply in replies))

    def _replies(self, step: str) -> list[_Reply]:
        deadline = time.monotonic() + self._timeout_s
        replies: dict[int, _Reply] = {}
        while len(replies) < len(self._pipes):
            waiting = [rank for rank in range(len(self._pipes)) if rank not in replies]
            pipes = [self._pipes[rank] for rank in waiting]
            ready = connection.wait(pipes, max(0.0, deadline - time.monotonic()))
            if not ready:
                raise RankFailedError(
                    f"{step}: no answer from ranks {waiting} within {self._timeout_s:g} s"
                )
            for rank, pipe in zip(waiting, pipes, strict=True):
                if pipe in ready:
                    replies[rank] = _received(pipe, step, rank)
        return [replies[rank] for rank in sorted(replies)]

    def _stop(self, *, kindly: bool) -> None:
        started = [process for process, _ in self._processes if process.pid is not None]
        if kindly:
            for pipe in self._pipes:
                pipe.send(None)
            for process in started:
                process.join(_GRACE_S)
        for process in started:
            _kill_session(process.pid)
            process.kill()
            process.join()


def _received(pipe: connection.Connection, step: str, rank: int) -> _Reply:
    try:
        reply = pipe.recv()
    except (EOFError, ConnectionResetError):
        raise RankFailedError(f"{step}: rank {rank} died") from None
    if isinstance(reply, _Failure):
        raise RankFailedError(f"{step}: rank {rank} failed\n{reply.text}")
    assert isinstance(reply, _Reply)  # noqa: S101 - ranks send nothing else
    return reply


def _kill_session(pid: int | None) -> None:
    """Kill what a rank has started; it shares the session that the rank opened."""
    with contextlib.suppress(ProcessLookupError):
        if pid is not None:
            os.killpg(pid, signal.SIGKILL)


def _rank_main(
    context: RankContext,
    module: str,
    args: tuple[Any, ...],
    pipe: connection.Connection,
    barrier: Barrier,
) -> None:
    """Make the worker, then answer calls until the parent says stop or is gone."""
    os.setsid()
    try:
        worker: object = importlib.import_module(module).make_worker(*args, context)
        now = time.perf_counter()
        pipe.send(_Reply(now, now, None))
        while isinstance(call := pipe.recv(), _Call):
            barrier.wait(context.timeout_s)
            started = time.perf_counter()
            value = getattr(worker, call.method)(*call.args)
            pipe.send(_Reply(started, time.perf_counter(), value))
    except EOFError:
        return
    except BaseException:  # noqa: BLE001 - the edge of a process; reported, and the process ends
        pipe.send(_Failure(traceback.format_exc()))
