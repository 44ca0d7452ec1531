"""What every benchmark needs: rank processes, alternation and medians."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing import connection, get_context
from multiprocessing.context import ForkServerContext, SpawnContext
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


MakeWorker = Callable[[RankContext], object]


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
class Bereaved:
    """A step in which one rank was killed.

    Attributes:
        values: what the step returned, by rank, for those that outlived it.
        was_done: whether the killed rank was done with the step before; it counts as a survivor
            of the step then.
    """

    values: dict[int, Any]
    was_done: bool


@dataclass(frozen=True, slots=True)
class _Call:
    """What a rank is to do; it meets the others before, or else says that it begins."""

    method: str
    args: tuple[Any, ...]
    is_met: bool = True


@dataclass(frozen=True, slots=True)
class _Begun:
    """A rank begins with a call before which it meets nobody."""


@dataclass(frozen=True, slots=True)
class _Reply:
    started: float
    ended: float
    value: Any


@dataclass(frozen=True, slots=True)
class _Failure:
    text: str


def made_in(module: str, *args: Any) -> MakeWorker:
    """What makes a worker in its rank's process, where alone the module is imported.

    It calls the module's ``make_worker(*args, context)``.
    """
    return partial(_make_in, module, args)


def _make_in(module: str, args: tuple[Any, ...], context: RankContext) -> object:
    worker: object = importlib.import_module(module).make_worker(*args, context)
    return worker


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

    def __init__(
        self,
        num_ranks: int,
        make_worker: MakeWorker,
        *,
        timeout_s: float,
        preload: Sequence[str] = (),
    ) -> None:
        """Prepare the processes; entering the block starts them.

        Args:
            num_ranks: how many.
            make_worker: called in each process; has to be picklable.
            timeout_s: longest wait for a step.
            preload: fork the processes from a server that has imported these modules, once for
                all objects of this class, and has done nothing else; without any, each starts by
                itself. A script names a module that imports what it does: each process runs the
                script's imports again.
        """
        self._timeout_s = timeout_s
        self._is_bereaved = False
        # The store is kept for as long as the ranks may ask it.
        self._store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        start = _context(preload)
        # Named semaphores live as long as the process that made them holds on to them.
        self._barrier = start.Barrier(num_ranks)
        self._pipes: list[connection.Connection] = []
        self._processes = []
        for rank in range(num_ranks):
            ours, theirs = start.Pipe()
            context = RankContext(rank, num_ranks, self._store.port, timeout_s)
            args = (context, make_worker, theirs, self._barrier)
            process = start.Process(target=_rank_main, args=args)
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
        self._stop(kindly=error is None and not self._is_bereaved)

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

    def step_killing(self, victim: int, delay_s: float, method: str, *args: Any) -> Bereaved:
        """Like ``step``, but kill a rank some time after all began. The last step there can be.

        The others end as soon as they have answered, as they would: what still waits for them
        has to notice.

        Raises:
            RankFailedError: another rank failed, or did not end in time.
        """
        self._is_bereaved = True
        for pipe in self._pipes:
            pipe.send(_Call(method, args, is_met=False))
        for rank, pipe in enumerate(self._pipes):
            if not (pipe.poll(self._timeout_s) and isinstance(pipe.recv(), _Begun)):
                raise RankFailedError(f"{method}: rank {rank} did not begin")
        time.sleep(delay_s)
        process, _ = self._processes[victim]
        process.kill()
        process.join()
        was_done = self._pipes[victim].poll() and _has_reply(self._pipes[victim])
        others = [rank for rank in range(len(self._pipes)) if rank != victim]
        replies = self._replies(method, others, is_last=True)
        values = {rank: reply.value for rank, reply in zip(others, replies, strict=True)}
        return Bereaved(values, was_done)

    def _replies(
        self, step: str, ranks: Sequence[int] | None = None, *, is_last: bool = False
    ) -> list[_Reply]:
        deadline = time.monotonic() + self._timeout_s
        expected = range(len(self._pipes)) if ranks is None else ranks
        replies: dict[int, _Reply] = {}
        while len(replies) < len(expected):
            waiting = [rank for rank in expected if rank not in replies]
            pipes = [self._pipes[rank] for rank in waiting]
            ready = connection.wait(pipes, max(0.0, deadline - time.monotonic()))
            if not ready:
                raise RankFailedError(
                    f"{step}: no answer from ranks {waiting} within {self._timeout_s:g} s"
                )
            for rank, pipe in zip(waiting, pipes, strict=True):
                if pipe in ready:
                    replies[rank] = _received(pipe, step, rank)
                    if is_last:
                        self._processes[rank][0].kill()
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


def alternate(names: Sequence[str], repetitions: int) -> Iterator[tuple[int, str]]:
    """Every name once per repetition, forwards and backwards in turn; counting starts at 0.

    What the machine does meanwhile, and what each leaves behind for the next, then falls on all.
    """
    for repetition in range(repetitions):
        for name in names if repetition % 2 == 0 else reversed(names):
            yield repetition, name


def paired_ratio(values: Sequence[float], floor: Sequence[float]) -> float:
    """Median of the ratios within each repetition: what slows a whole repetition cancels out."""
    return statistics.median(a / b for a, b in zip(values, floor, strict=True))


def _received(pipe: connection.Connection, step: str, rank: int) -> _Reply:
    try:
        reply = pipe.recv()
    except (EOFError, ConnectionResetError):
        raise RankFailedError(f"{step}: rank {rank} died") from None
    if isinstance(reply, _Failure):
        raise RankFailedError(f"{step}: rank {rank} failed\n{reply.text}")
    assert isinstance(reply, _Reply)  # noqa: S101 - ranks send nothing else
    return reply


def _context(preload: Sequence[str]) -> SpawnContext | ForkServerContext:
    if not preload:
        return get_context("spawn")
    context = get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    return context


def _has_reply(pipe: connection.Connection) -> bool:
    """Whether a rank that is dead has sent its reply before."""
    try:
        return isinstance(pipe.recv(), _Reply)
    except (EOFError, ConnectionResetError):
        return False


def _kill_session(pid: int | None) -> None:
    """Kill what a rank has started; it shares the session that the rank opened."""
    with contextlib.suppress(ProcessLookupError):
        if pid is not None:
            os.killpg(pid, signal.SIGKILL)


def _rank_main(
    context: RankContext, make_worker: MakeWorker, pipe: connection.Connection, barrier: Barrier
) -> None:
    """Make the worker, then answer calls until the parent says stop or is gone."""
    os.setsid()
    try:
        worker = make_worker(context)
        now = time.perf_counter()
        pipe.send(_Reply(now, now, None))
        while isinstance(call := pipe.recv(), _Call):
            if call.is_met:
                barrier.wait(context.timeout_s)
            else:
                pipe.send(_Begun())
            started = time.perf_counter()
            value = getattr(worker, call.method)(*call.args)
            pipe.send(_Reply(started, time.perf_counter(), value))
    except EOFError:
        return
    except BaseException:  # noqa: BLE001 - the edge of a process; reported, and the process ends
        pipe.send(_Failure(traceback.format_exc()))
