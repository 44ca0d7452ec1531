"""Calls that may block on storage: time limits, cancel flags, threads, and errors that name a file.

The limit and the cancel flags are context variables: the strategies of Megatron-Core have no
argument for them. Threads run in a copy of the context of the thread that starts them.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread
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
    errno.EDQUOT: "disk quota of space or inodes used up; remove files, or save elsewhere",
    errno.EACCES: "permission denied",
    errno.EROFS: "the file system is read-only",
    errno.ENAMETOOLONG: "the name is too long for the file system; shorten the key",
    errno.EMFILE: "too many open files; raise the limit (ulimit -n) or lower io_threads",
}


def storage_error(
    key: str | None,
    path: object,
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
        if error.errno == errno.ENOSPC:
            text = _no_space(Path(str(path)))
    return StorageError(f"{lead}{path}: {text}", key=key, path=str(path))


def _no_space(path: Path) -> str:
    """Which of space and inodes a file system lacks, and how much of both is free."""
    free, what = "", "space left; free some"
    with suppress(OSError):
        found = os.statvfs(next(one for one in (path, *path.parents) if one.exists()))
        if found.f_files and not found.f_favail:
            what = f"inodes left, of {found.f_files}; remove files"
        free = f" ({found.f_bavail * found.f_frsize} bytes and {found.f_favail} inodes are free)"
    return f"no {what}, or save elsewhere{free}"


@dataclass(frozen=True, slots=True)
class Deadline:
    """When a wait ends, by ``time.monotonic``. An argument of all that may wait for storage."""

    at: float

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        """The end of so many seconds from now."""
        return cls(time.monotonic() + seconds)

    @property
    def left_s(self) -> float:
        """Seconds until then; 0 once it is over."""
        return max(0.0, self.at - time.monotonic())


@dataclass(order=True, slots=True)
class _Limit:
    """When a limit is over, its length in seconds, and that of the second part, if it has one."""

    deadline: float
    seconds: float
    next_s: float = 0.0


_limits: ContextVar[tuple[_Limit, ...]] = ContextVar("dist_ckpt_time_limits", default=())
"""Those of the blocks around, the innermost last."""

_cancel_flags: ContextVar[tuple[Event, ...]] = ContextVar("dist_ckpt_cancel_flags", default=())
"""Of the transfer that this thread works for, and of those whose jobs started it."""


def raise_if_cancelled() -> None:
    """Raise if the transfer that this thread works for was given up; else return.

    Call it after every system call that may block, before anything else is changed. The error goes
    nowhere: the call that started the transfer has raised already.
    """
    if any(flag.is_set() for flag in _cancel_flags.get()):
        raise StorageError("the transfer was given up")


@contextmanager
def time_limit(timeout_s: float, share: float = ALL, *, then: float = 0.0) -> Iterator[None]:
    """All storage work that is waited for within the block shares one limit.

    It is ``share`` of ``timeout_s``, for which peers wait; from ``restart_limit`` on, ``then`` of
    it. An outer block with less time left prevails.
    """
    seconds = share * timeout_s
    limit = _Limit(time.monotonic() + seconds, seconds, then * timeout_s)
    token = _limits.set((*_limits.get(), limit))
    try:
        yield
    finally:
        _limits.reset(token)


@contextmanager
def clean_up_limit() -> Iterator[None]:
    """What is left to do after a failure has a quarter of the limit, even where that is over."""
    quarters = [limit.seconds / 4 for limit in _limits.get()[-1:]]
    token = _limits.set(tuple(_Limit(time.monotonic() + seconds, seconds) for seconds in quarters))
    try:
        yield
    finally:
        _limits.reset(token)


def restart_limit() -> None:
    """Begin the second part of the innermost block's limit: the first collective is over.

    What a rank waited for others to begin is not the storage's fault.
    """
    for limit in _limits.get()[-1:]:
        if limit.next_s:
            limit.deadline, limit.seconds = time.monotonic() + limit.next_s, limit.next_s


@contextmanager
def uncounted() -> Iterator[None]:
    """What is waited for within the block, such as an earlier save, has a limit of its own."""
    began = time.monotonic()
    try:
        yield
    finally:
        waited = time.monotonic() - began
        for limit in _limits.get():
            limit.deadline += waited


@dataclass(frozen=True, slots=True)
class Job:
    """What a thread is to do that may block on storage.

    Attributes:
        key: of the array, for messages; None where errors of ``run`` are raised as they are.
        path: the file or directory, for messages.
        run: does it; uses no device and no process group.
    """

    key: str | None
    path: object
    run: Callable[[], object]


class Transfer:
    """Reads or writes under way: jobs that a few threads of its own take from one queue.

    The threads do not keep the process from ending: storage may never answer.

    Args:
        jobs: what is begun at once, in this order; after a failure no further one is started.
        num_threads: how many threads to start at most. Where the system starts no more of them,
            those that run do all the work; without any the transfer has failed.

    Attributes:
        lacking: why fewer threads run; None where all do.
    """

    def __init__(self, jobs: Iterable[Job], num_threads: int) -> None:
        self._jobs = deque(jobs)
        self._running: dict[int, Job] = {}
        self._failures: list[tuple[Job, BaseException]] = []
        self._cancelled = Event()
        # Of each thread. One whose ``join`` was interrupted counts as ended, though it may run.
        self._ended: list[Event] = []
        self.lacking: StorageError | None = None
        context = copy_context()
        context.run(_cancel_flags.set, (*_cancel_flags.get(), self._cancelled))
        for _ in range(min(num_threads, len(self._jobs))):
            ended = Event()
            run = partial(context.copy().run, self._work_off, ended)
            thread = Thread(target=run, name="dist-ckpt-io", daemon=True)
            try:
                thread.start()
            except (RuntimeError, MemoryError) as error:
                self.lacking = StorageError(
                    f"no thread for I/O can start: {error}; raise the limit of processes (ulimit "
                    "-u), or lower io_threads"
                )
                break
            self._ended.append(ended)

    def wait(self, timeout_s: float = _LONGEST_WAIT_S) -> None:
        """Return once all are done. Call it once.

        Args:
            timeout_s: the limit where no ``time_limit`` block around ends earlier.

        Raises:
            StorageError: one that failed, naming key and file. Those under way have ended then,
                further ones are not started: no memory of the caller is in use any more.
            StorageTimeoutError: one that did not end in time. It ends before its next slice, but
                the system call under way may still read or fill the caller's memory.
        """
        if self.lacking is not None and not self._ended:
            if "interpreter shutdown" not in str(self.lacking):
                raise self.lacking
            self._work_off(Event())  # from Python 3.12 on no thread starts at the end of a script
        now = time.monotonic()
        limit = min((*_limits.get(), _Limit(now + timeout_s, timeout_s)))
        try:
            num_running = self.num_running_after(limit.deadline - now)
        except BaseException:  # an interruption
            self._give_up()
            raise
        if num_running:
            running = list(self._running.values())
            self._give_up()
            raise _no_answer(running, limit.seconds)
        if self._failures:
            # The first, but rather that storage did not answer: no fall-back follows that.
            job, error = min(
                self._failures, key=lambda f: not isinstance(f[1], StorageTimeoutError)
            )
            self._failures.clear()
            try:
                if job.key is None or isinstance(error, CheckpointError):
                    raise error
                raise storage_error(job.key, job.path, error) from error
            finally:
                del job, error  # or the traceback would refer to itself, and to memory
        raise_if_cancelled()  # this thread may itself work for one that was given up

    def num_running_after(self, seconds: float) -> int:
        """Threads that still work when that time is over, or 0 as soon as none is left."""
        deadline = time.monotonic() + seconds
        for ended in self._ended:
            ended.wait(max(0.0, deadline - time.monotonic()))
        return sum(not ended.is_set() for ended in self._ended)

    def stop(self, timeout_s: float) -> None:
        """Start no further job, and give those that are running some time to notice and end."""
        self._give_up()
        self.num_running_after(timeout_s)

    def _give_up(self) -> None:
        self._cancelled.set()
        self._jobs.clear()

    def _work_off(self, ended: Event) -> None:
        """Take jobs until none is left, or one has failed."""
        me = threading.get_ident()
        while not self._cancelled.is_set():
            try:
                job = self._running[me] = self._jobs.popleft()
            except IndexError:
                break
            try:
                raise_if_cancelled()  # what this transfer is a part of
                job.run()
            except BaseException as error:  # noqa: BLE001 - raised again by ``wait``
                if not self._cancelled.is_set():  # else it was given up
                    self._failures.append((job, error))
                self._give_up()
            finally:
                del self._running[me], job
        ended.set()


def _no_answer(running: Sequence[Job], limit_s: float) -> StorageTimeoutError:
    """What is raised where jobs did not end in time."""
    key, path, lead = None, None, ""
    if running:
        key, path = running[0].key, str(running[0].path)
        more = f" (and {len(running) - 1} more)" if len(running) > 1 else ""
        lead = f"{key}: {path}{more}: " if key else f"{path}{more}: "
    return StorageTimeoutError(
        f"{lead}storage did not answer within {limit_s:g} s; check this rank's disk or network, or "
        "raise timeout_s",
        key=key,
        path=path,
    )


def wait_in_turn(transfers: Iterable[Transfer], timeout_s: float) -> None:
    """Wait for transfers, each of which is begun while the one before is under way.

    After a failure too the last is waited for: it uses memory that is about to be freed.
    """
    last = Transfer((), 0)
    try:
        for transfer in transfers:
            before, last = last, transfer
            before.wait(timeout_s)
    except BaseException:
        with suppress(CheckpointError):  # the first failure is the one to report
            last.wait(timeout_s)
        raise
    last.wait(timeout_s)


def limited(function: Callable[P, T]) -> Callable[P, T]:
    """The same function, which may block on storage, within the limit of the block around.

    It runs on a thread of its own, except within another transfer's job, and outside of any
    ``time_limit`` block. It must not use a device or a process group. Its first argument is the
    file or directory to name where it does not answer: a StorageTimeoutError then. It ends where
    it calls ``raise_if_cancelled``.
    """

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        if not _limits.get() or _cancel_flags.get():
            return function(*args, **kwargs)
        found: list[T] = []
        job = Job(None, args[0], lambda: found.append(function(*args, **kwargs)))
        Transfer([job], 1).wait()
        return found[0]

    return run


def run_with_limit(step: Callable[[], T], path: object) -> T:
    """What a step returns, run like a ``limited`` function; ``path`` is named in messages."""
    return limited(lambda _path: step())(path)


def run_within(deadline: Deadline, path: object, step: Callable[[], T]) -> T:
    """What a step returns that may block on storage; ``path`` is named where it takes too long."""
    results: list[T] = []
    Transfer([Job(None, path, lambda: results.append(step()))], 1).wait(deadline.left_s)
    return results[0]


class OrderedQueues(AbstractContextManager["OrderedQueues"]):
    """Threads that call what they are given, each in the order in which it is given; a context.

    All run already when this is made: it raises StorageError if the system starts no more threads.
    Leaving gives up what is not done.
    """

    def __init__(self, num_threads: int) -> None:
        self._queues = [SimpleQueue[Callable[[], None] | None]() for _ in range(num_threads)]
        jobs = [Job(None, "", partial(self._work_off, queue)) for queue in self._queues]
        self._threads = Transfer(jobs, num_threads)
        if self._threads.lacking is not None:
            self.__exit__()
            raise self._threads.lacking

    def __exit__(self, *_: object) -> None:
        """Give up what is not done; the threads end."""
        self._threads.stop(0.0)
        for queue in self._queues:
            queue.put(None)

    def submit(self, number: int, call: Callable[..., T], *args: Any) -> Future[T]:
        """Have a thread call something; ``settled`` waits for it."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(call(*args))
            except BaseException as error:  # noqa: BLE001 - raised again where it is waited for
                future.set_exception(error)

        self._queues[number].put(run)
        return future

    def submit_to_all(self, call: Callable[[], object]) -> None:
        """Have every thread call something."""
        for number in range(len(self._queues)):
            self.submit(number, call)

    @staticmethod
    def _work_off(queue: SimpleQueue[Callable[[], None] | None]) -> None:
        while (run := queue.get()) is not None:
            raise_if_cancelled()
            run()


def settled(future: Future[T], path: object) -> T:
    """What a call gives, within the limit of the block; StorageTimeoutError names ``path``."""
    now = time.monotonic()
    limit = min((*_limits.get(), _Limit(now + _LONGEST_WAIT_S, _LONGEST_WAIT_S)))
    try:
        return future.result(timeout=limit.deadline - now)
    except FutureTimeoutError:
        if future.done():
            raise
        raise _no_answer([Job(None, path, future.result)], limit.seconds) from None


class ByteBudget:
    """At most so many bytes at the same time; a single larger demand is let through alone."""

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
