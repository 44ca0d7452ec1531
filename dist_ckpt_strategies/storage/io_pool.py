"""Calls that may block on storage: time limits, cancel flags, threads, and errors that name a file.

The limit and the cancel flags are context variables: the strategies of Megatron-Core have no
argument for them. Threads run in a copy of the context of the thread that starts them.
"""

from __future__ import annotations

import errno
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent import futures
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from queue import SimpleQueue
from threading import Event
from typing import Any, ParamSpec, TypeVar

from dist_ckpt_strategies.errors import (
    CheckpointError,
    IncompleteCheckpointError,
    StorageError,
    StorageTimeoutError,
)

T = TypeVar("T")
P = ParamSpec("P")

MAX_SLICE_NBYTES = 16 << 20
"""One system call moves at most this much, so that a transfer that was given up soon ends."""

OPENING, WORK, ENDING, ALL = 1 / 4, 1 / 2, 1 / 4, 3 / 4
"""Shares of ``timeout_s`` for storage: of a call before its first collective, and after it; of the
end of a save in the background; of a call without such parts. Peers wait for all of ``timeout_s``:
they learn of a failure before they give up on this rank."""

_LONGEST_WAIT_S = 1e9
"""Some 30 years, where there is no limit: more than that overflows."""

_REMEDY = {
    errno.ENOSPC: "no space left; free some, or save elsewhere",
    errno.EDQUOT: "disk quota used up; free some, or save elsewhere",
    errno.EACCES: "permission denied",
    errno.EROFS: "the file system is read-only",
    errno.ENAMETOOLONG: "the name is too long for the file system; shorten the key",
    errno.EMFILE: "too many open files; raise the limit (ulimit -n) or lower io_threads",
}


def storage_error(
    key: str | None,
    path: Path | str,
    error: BaseException,
    *,
    not_found: type[StorageError] = IncompleteCheckpointError,
) -> StorageError:
    """What an OSError on a file of a checkpoint means, in our own terms."""
    lead = f"{key}: " if key else ""
    if isinstance(error, FileNotFoundError):
        return not_found(f"{lead}{path} does not exist", key=key, path=str(path))
    text = str(error)
    if isinstance(error, OSError):
        text = _REMEDY.get(error.errno or 0, error.strerror or text)
    return StorageError(f"{lead}{path}: {text}", key=key, path=str(path))


@dataclass(slots=True)
class _Limit:
    """A limit in seconds, when it is over, the next one in seconds, and the limit around it."""

    seconds: float
    deadline: float
    next_s: float
    outer: _Limit | None


_limit: ContextVar[_Limit | None] = ContextVar("dist_ckpt_time_limit", default=None)
_cancel_flags: ContextVar[tuple[Event, ...]] = ContextVar("dist_ckpt_cancel_flags", default=())
"""Of the transfer or call that this thread works for, and of those whose jobs started it."""


def is_cancelled() -> bool:
    """Whether the transfer that this thread works for was given up."""
    return any(flag.is_set() for flag in _cancel_flags.get())


def raise_if_cancelled() -> None:
    """Raise if the transfer that this thread works for was given up; else return.

    Call it after every system call that may block, before anything else is changed. The error goes
    nowhere: the call that started the transfer has raised already.
    """
    if is_cancelled():
        raise StorageError("the transfer was given up")


@contextmanager
def time_limit(timeout_s: float, share: float = ALL, *, then: float = 0.0) -> Iterator[None]:
    """All storage work that is waited for within the block shares one limit.

    An outer block with less time left prevails.

    Args:
        timeout_s: what peers wait for, in seconds.
        share: of it, for the storage.
        then: the share from ``restart_limit`` on.
    """
    seconds = share * timeout_s
    limit = _Limit(seconds, time.monotonic() + seconds, then * timeout_s, _limit.get())
    token = _limit.set(limit)
    try:
        yield
    finally:
        _limit.reset(token)


@contextmanager
def clean_up_limit() -> Iterator[None]:
    """What is left to do after a failure has a quarter of the limit, even where that is over."""
    limit = _limit.get()
    if limit is not None:
        seconds = limit.seconds / 4
        limit = _Limit(seconds, time.monotonic() + seconds, 0.0, None)
    token = _limit.set(limit)
    try:
        yield
    finally:
        _limit.reset(token)


def restart_limit() -> None:
    """Begin the second part of the innermost block's limit: the first collective is over.

    What a rank waited for others to begin is not the storage's fault.
    """
    limit = _limit.get()
    if limit is not None and limit.next_s:
        limit.seconds = limit.next_s
        limit.deadline = time.monotonic() + limit.seconds


@contextmanager
def uncounted() -> Iterator[None]:
    """What is waited for within the block, such as an earlier save, has a limit of its own."""
    began = time.monotonic()
    try:
        yield
    finally:
        waited, limit = time.monotonic() - began, _limit.get()
        while limit is not None:
            limit.deadline += waited
            limit = limit.outer


def _time_left(timeout_s: float = math.inf) -> tuple[float, float]:
    """How long a wait for storage may take, and the limit for messages, both in seconds.

    ``timeout_s`` is the limit outside of any ``time_limit`` block.
    """
    now, limit = time.monotonic(), _limit.get()
    found = now + timeout_s, timeout_s
    while limit is not None:
        found = min(found, (limit.deadline, limit.seconds))
        limit = limit.outer
    return max(0.0, min(found[0] - now, _LONGEST_WAIT_S)), found[1]


def start_thread(work: Callable[[], T], cancel_flag: Event) -> Future[T]:
    """Run on a thread that does not keep the process from ending: storage may never answer.

    Args:
        work: what to run; ``raise_if_cancelled`` heeds the flag in it.
        cancel_flag: set once the result is no longer wanted.

    Raises:
        StorageError: the system starts no more threads.
    """
    future: Future[T] = Future()
    context = copy_context()
    context.run(_cancel_flags.set, (*_cancel_flags.get(), cancel_flag))
    run = partial(context.run, _settle, future, work)
    try:
        threading.Thread(target=run, name="dist-ckpt-io", daemon=True).start()
    except (RuntimeError, MemoryError) as error:
        raise StorageError(
            f"no thread for I/O can start: {error}; raise the limit of processes (ulimit -u), or "
            "lower io_threads"
        ) from error
    return future


def _settle(future: Future[T], work: Callable[[], T]) -> None:
    """Have a future hold what a call gives, or raises."""
    try:
        future.set_result(work())
    except BaseException as error:  # noqa: BLE001 - raised again where it is waited for
        future.set_exception(error)


def settled(future: Future[T], path: object) -> T:
    """What a call gives, within the limit of the block.

    Raises:
        StorageTimeoutError: it takes longer; names ``path``.
    """
    left_s, limit_s = _time_left()
    try:
        return future.result(timeout=left_s)
    except FutureTimeoutError:
        if future.done():
            raise
        raise StorageTimeoutError(
            f"{path}: storage did not answer within {limit_s:g} s; check this rank's disk or "
            "network, or raise timeout_s",
            path=str(path),
        ) from None


def run_with_limit(step: Callable[[], T], path: object) -> T:
    """What a step returns that may block on storage, within the limit of the call.

    It runs on a thread of its own, except within another transfer's job, and outside of any
    ``time_limit`` block.

    Args:
        step: what to do; it must not use a device or a process group.
        path: file or directory to name where it does not answer.

    Raises:
        StorageTimeoutError: it took longer. The step ends where it calls ``raise_if_cancelled``.
    """
    if _limit.get() is None or _cancel_flags.get():
        return step()
    cancelled = Event()
    future = start_thread(step, cancelled)
    try:
        return settled(future, path)
    except BaseException:  # an interruption too: nothing continues
        cancelled.set()
        raise


def limited(function: Callable[P, T]) -> Callable[P, T]:
    """The same function, run by ``run_with_limit``; its first argument is named in messages."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        return run_with_limit(partial(function, *args, **kwargs), args[0])

    return run


@dataclass(frozen=True, slots=True)
class Job:
    """A blocking transfer of one array's data, to be run on a thread."""

    key: str
    path: Path | str
    run: Callable[[], None]


class Transfer:
    """Reads or writes under way: jobs that a few threads of its own take from one queue.

    A job costs little more than its system calls: one future for each thread, none for each job.

    Args:
        jobs: what is begun at once, in this order; after a failure no further one is started.
        num_threads: how many threads to start at most. Where the system starts no more of them,
            those that run do all the work; without any the transfer has failed.
    """

    def __init__(self, jobs: Iterable[Job], num_threads: int) -> None:
        self._jobs = deque(jobs)
        self._running: dict[int, Job] = {}
        self._cancelled = Event()
        self._workers: list[Future[CheckpointError | None]] = []
        for _ in range(min(num_threads, len(self._jobs))):
            try:
                self._workers.append(start_thread(self._work_off, self._cancelled))
            except StorageError as error:
                if not self._workers:
                    self._workers.append(Future())
                    self._workers[0].set_result(error)
                break

    def wait(self, timeout_s: float) -> None:
        """Return once all are done.

        Raises:
            StorageError: one that failed, naming key and file. Those under way have ended then,
                further ones are not started: no memory of the caller is in use any more.
            StorageTimeoutError: one that did not end in time. It ends before its next slice, but
                the system call under way may still read or fill the caller's memory.
        """
        left_s, limit_s = _time_left(timeout_s)
        try:
            late = futures.wait(self._workers, left_s).not_done
        except BaseException:  # an interruption
            self._give_up()
            raise
        if late:
            running = list(self._running.values())
            self._give_up()
            raise _no_answer(running, limit_s)
        failures = [error for worker in self._workers if (error := worker.result()) is not None]
        # The first, but rather that storage did not answer: no fall-back follows that.
        for error in sorted(failures, key=lambda error: not isinstance(error, StorageTimeoutError)):
            raise error
        raise_if_cancelled()  # this thread may itself work for one that was given up

    def num_running_after(self, seconds: float) -> int:
        """Threads that still work when that time is over, or 0 as soon as none is left."""
        return len(futures.wait(self._workers, seconds).not_done)

    def stop(self, timeout_s: float) -> None:
        """Start no further job, and give those that are running some time to notice and end."""
        self._give_up()
        futures.wait(self._workers, timeout_s)

    def _give_up(self) -> None:
        self._cancelled.set()
        self._jobs.clear()

    def _work_off(self) -> CheckpointError | None:
        """Take jobs until none is left; the error of the one that failed, if any."""
        me = threading.get_ident()
        while not is_cancelled():
            try:
                job = self._running[me] = self._jobs.popleft()
            except IndexError:
                break
            error = _failure(job)
            del self._running[me]
            if error is not None:
                is_first = not is_cancelled()
                self._give_up()
                return error if is_first else None
        return None


def _failure(job: Job) -> CheckpointError | None:
    """What a job raises; returned, so that no traceback holds the transfer's memory."""
    try:
        job.run()
    except CheckpointError as error:
        return error
    except Exception as error:  # noqa: BLE001 - libraries raise what they like; named and re-raised
        translated = storage_error(job.key, job.path, error)
        translated.__cause__ = error
        return translated
    return None


def _no_answer(running: Sequence[Job], limit_s: float) -> StorageTimeoutError:
    text = f"storage did not answer within {limit_s:g} s"
    if not running:
        return StorageTimeoutError(text)
    job = running[0]
    more = f" (and {len(running) - 1} more)" if len(running) > 1 else ""
    lead = f"{job.key}: " if job.key else ""
    return StorageTimeoutError(f"{lead}{job.path}{more}: {text}", key=job.key, path=str(job.path))


@dataclass
class InFlight(AbstractContextManager["InFlight"]):
    """At most one transfer beside the one being prepared; leaving the block waits for the last."""

    timeout_s: float
    last: Transfer | None = None

    def follow_with(self, transfer: Transfer) -> None:
        """Wait for the transfer before, and keep this one until the next."""
        before, self.last = self.last, transfer
        if before is not None:
            before.wait(self.timeout_s)

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Wait, also after a failure: the transfer uses memory that is about to be freed."""
        last, self.last = self.last, None
        try:
            if last is not None:
                last.wait(self.timeout_s)
        except CheckpointError:
            if error is None:  # else the first failure is the one to report
                raise


class OrderedQueues(AbstractContextManager["OrderedQueues"]):
    """Threads that call what they are given, each in the order in which it is given; a context.

    All run already when this is made: where the system has none left, that shows here. Leaving
    gives up what is not done.

    Args:
        num_threads: how many.

    Raises:
        StorageError: the system starts no more threads.
    """

    def __init__(self, num_threads: int) -> None:
        self._cancelled = Event()
        self._queues: list[SimpleQueue[Callable[[], None] | None]] = []
        try:
            for _ in range(num_threads):
                self._queues.append(SimpleQueue())
                start_thread(partial(self._work_off, self._queues[-1]), self._cancelled)
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        """Give up what is not done; the threads end."""
        self._cancelled.set()
        for queue in self._queues:
            queue.put(None)

    def submit(self, number: int, call: Callable[..., T], *args: Any) -> Future[T]:
        """Have a thread call something; ``settled`` waits for it."""
        future: Future[T] = Future()
        self._queues[number].put(partial(_settle, future, partial(call, *args)))
        return future

    def _work_off(self, queue: SimpleQueue[Callable[[], None] | None]) -> None:
        while (run := queue.get()) is not None and not is_cancelled():
            run()


class ByteBudget:
    """At most so many bytes at the same time; a single larger demand is let through alone.

    Args:
        nbytes: the bound.
    """

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._held = 0
        self._changed = threading.Condition()

    @contextmanager
    def held(self, nbytes: int) -> Iterator[None]:
        """Within the block these bytes count; entering waits for others to leave."""
        with self._changed:
            self._changed.wait_for(lambda: not self._held or self._held + nbytes <= self._nbytes)
            self._held += nbytes
        try:
            yield
        finally:
            with self._changed:
                self._held -= nbytes
                self._changed.notify_all()
