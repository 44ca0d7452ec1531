"""Calls that may block on storage: deadlines, cancel flags, threads, errors that name a file."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any, TypeVar

from dist_ckpt_strategies.errors import (
    CheckpointError,
    IncompleteCheckpointError,
    StorageError,
    StorageTimeoutError,
)

T = TypeVar("T")

MAX_SLICE_NBYTES = 16 << 20
"""One system call moves at most this much, so that a transfer that was given up soon ends."""

OPENING, WORK, ENDING, ALL, CLEAN_UP = 1 / 4, 1 / 2, 1 / 4, 3 / 4, 1 / 8
"""Shares of ``timeout_s`` for storage: of a call before its first collective, and after it; of the
end of a save; of a call without such parts; of what is removed after a failure. Peers wait for all
of ``timeout_s``: they learn of a failure before they give up on this rank."""

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
    """The StorageError for an OSError on a file of a checkpoint."""
    if isinstance(error, NotADirectoryError):
        path = error.filename or path
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
        space = os.statvfs(next(one for one in (path, *path.parents) if one.exists()))
        if space.f_files and not space.f_favail:
            what = f"inodes left, of {space.f_files}; remove files"
        free = f" ({space.f_bavail * space.f_frsize} bytes and {space.f_favail} inodes are free)"
    return f"no {what}, or save elsewhere{free}"


@dataclass(frozen=True, slots=True)
class Deadline:
    """When a wait ends, by ``time.monotonic``. An argument of all that may wait for storage."""

    at: float

    @classmethod
    def after(cls, seconds: float = _LONGEST_WAIT_S) -> Deadline:
        """The end of so many seconds from now; by default there is no limit."""
        return cls(time.monotonic() + seconds)

    @property
    def left_s(self) -> float:
        """Seconds until then; 0 once it is over."""
        return max(0.0, self.at - time.monotonic())


class _Worker(Thread):
    """A thread that works for a transfer, and for those whose jobs have started that one."""

    def __init__(self, target: Callable[[], None], flags: tuple[Event, ...]) -> None:
        super().__init__(target=target, name="dist-ckpt-io", daemon=True)
        self.flags = flags


def _cancel_flags() -> tuple[Event, ...]:
    """The flags of the transfers that this thread works for."""
    thread = threading.current_thread()
    return thread.flags if isinstance(thread, _Worker) else ()


def raise_if_cancelled() -> None:
    """Raise if the transfer that this thread works for was given up; else return.

    Call it after every system call that may block, before anything else is changed. The error goes
    nowhere: the call that started the transfer has raised already.
    """
    if any(flag.is_set() for flag in _cancel_flags()):
        raise StorageError("the transfer was given up")


@dataclass(frozen=True, slots=True)
class Job:
    """A call for a thread that may block on storage.

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
        flags = (*_cancel_flags(), self._cancelled)
        for _ in range(min(num_threads, len(self._jobs))):
            ended = Event()
            try:
                _Worker(partial(self._work_off, ended), flags).start()
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
            timeout_s: the longest wait, in seconds; by default there is no limit.

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
        try:
            num_running = self.num_running_after(timeout_s)
        except BaseException:  # an interruption
            self._give_up()
            raise
        if num_running:
            running = list(self._running.values())
            self._give_up()
            raise _no_answer(running, timeout_s)
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
    """The error for jobs that did not end in time."""
    key, path, lead = None, None, ""
    if running:
        key, path = running[0].key, str(running[0].path)
        more = f" (and {len(running) - 1} more)" if len(running) > 1 else ""
        lead = f"{key}: {path}{more}: " if key else f"{path}{more}: "
    return StorageTimeoutError(
        f"{lead}storage did not answer within {round(limit_s, 2):g} s; check this rank's disk or "
        "network, or raise timeout_s",
        key=key,
        path=path,
    )


def run_within(deadline: Deadline, path: object, step: Callable[[], T]) -> T:
    """Run a step that may block on storage on its own thread, and return its result.

    It uses no device and no process group. A step that is given up ends where it calls
    ``raise_if_cancelled``.

    Raises:
        StorageTimeoutError: it does not end in time; names ``path``.
    """
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


def settled(future: Future[T], path: object, deadline: Deadline) -> T:
    """The result of a call; a StorageTimeoutError with ``path`` if it does not end in time."""
    left_s = deadline.left_s
    try:
        return future.result(timeout=left_s)
    except FutureTimeoutError:
        if future.done():
            raise
        raise _no_answer([Job(None, path, future.result)], left_s) from None
