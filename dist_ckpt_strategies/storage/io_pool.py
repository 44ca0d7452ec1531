"""Wait for many transfers, and report the first failure once none of them runs any more."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent import futures
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import AbstractContextManager, contextmanager
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any, ParamSpec, Self, TypeVar

from dist_ckpt_strategies.errors import (
    CheckpointError,
    StorageError,
    StorageTimeoutError,
)
from dist_ckpt_strategies.storage.files import storage_error
from dist_ckpt_strategies.storage.time_limit import (
    CancelFlag,
    deadline_of,
    needs_thread,
    raise_if_cancelled,
)

T = TypeVar("T")
P = ParamSpec("P")


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
        self._cancelled = CancelFlag()
        self._workers: list[Future[CheckpointError | None]] = []
        for _ in range(min(num_threads, len(self._jobs))):
            try:
                self._workers.append(start_thread(self._work_off))
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
        deadline, limit_s = deadline_of(timeout_s)
        failures: list[CheckpointError] = []
        for worker in self._workers:
            try:
                error = worker.result(timeout=max(0.0, deadline - time.monotonic()))
            except FutureTimeoutError:
                error = _no_answer(list(self._running.values()), limit_s)
                self._give_up()
            except BaseException:  # an interruption
                self._give_up()
                raise
            if error is not None:
                failures.append(error)
        # The first, but rather that storage did not answer: no fall-back follows that.
        for error in sorted(failures, key=lambda error: not isinstance(error, StorageTimeoutError)):
            raise error
        raise_if_cancelled()  # this thread may itself work for one that was given up

    def num_running_after(self, seconds: float) -> int:
        """Threads that still work when that time is over, or 0 as soon as none does."""
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
        with self._cancelled.applied():
            while not self._cancelled.is_set():
                try:
                    job = self._running[me] = self._jobs.popleft()
                except IndexError:
                    break
                error = _failure(job)
                del self._running[me]
                if error is not None:
                    is_first = not self._cancelled.is_set()
                    self._give_up()
                    return error if is_first else None
        return None


class InFlight(AbstractContextManager["InFlight"]):
    """At most one transfer beside the one being prepared; leaving waits for the last."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._transfer: Transfer | None = None

    def follow_with(self, transfer: Transfer) -> None:
        """Wait for the transfer before, and keep this one until the next."""
        before, self._transfer = self._transfer, transfer
        if before is not None:
            before.wait(self._timeout_s)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Wait, also after a failure: the transfer uses memory that is about to be freed."""
        last, self._transfer = self._transfer, None
        if last is None:
            return
        try:
            last.wait(self._timeout_s)
        except CheckpointError:
            if error is None:  # else the first failure is the one to report
                raise


_LONGEST_WAIT_S = 1e9
"""Some 30 years, where there is no limit: more than that overflows."""


def run_with_limit(step: Callable[[], T], path: object) -> T:
    """What a step returns that may block on storage, within the limit of the call.

    It runs on a thread of its own, but for one that works for another transfer already, and
    outside of any ``time_limit`` block.

    Args:
        step: what to do; it must not use a device or a process group.
        path: file or directory to name where it does not answer.

    Raises:
        StorageTimeoutError: it took longer. The step ends where it calls ``raise_if_cancelled``.
    """
    if not needs_thread():
        return step()
    cancelled = CancelFlag()

    def run() -> T:
        with cancelled.applied():
            return step()

    future = start_thread(run)
    try:
        return settled(future, path)
    except BaseException:  # an interruption too: nothing goes on
        cancelled.set()
        raise


def limited(function: Callable[P, T]) -> Callable[P, T]:
    """The same function, run by ``run_with_limit``; its first argument is named in messages."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        return run_with_limit(partial(function, *args, **kwargs), args[0])

    return run


class OrderedQueues:
    """Threads that call what they are given, each in the order in which it is given; a context.

    All run already when this is made: where the system has none left, that shows here. Leaving
    gives up what is not done.

    Args:
        num_threads: how many.

    Raises:
        StorageError: the system starts no more threads.
    """

    def __init__(self, num_threads: int) -> None:
        self._cancelled = CancelFlag()
        self._queues: list[SimpleQueue[Callable[[], None] | None]] = []
        try:
            for _ in range(num_threads):
                self._queues.append(SimpleQueue())
                start_thread(partial(self._work_off, self._queues[-1]))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        """The queues themselves."""
        return self

    def __exit__(self, *_: object) -> None:
        """Give up what is not done."""
        self.close()

    def close(self) -> None:
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
        with self._cancelled.applied():
            while (run := queue.get()) is not None and not self._cancelled.is_set():
                run()


def settled(future: Future[T], path: object) -> T:
    """What a call gives, within the limit of the block.

    Raises:
        StorageTimeoutError: it takes longer; names ``path``.
    """
    deadline, limit_s = deadline_of()
    try:
        return future.result(timeout=max(0.0, min(deadline - time.monotonic(), _LONGEST_WAIT_S)))
    except FutureTimeoutError:
        if future.done():
            raise
        raise StorageTimeoutError(
            f"{path}: storage did not answer within {limit_s:g} s", path=str(path)
        ) from None


def start_thread(work: Callable[[], T]) -> Future[T]:
    """Run on a thread that does not keep the process from ending: storage may never answer.

    Raises:
        StorageError: the system starts no more threads.
    """
    future: Future[T] = Future()
    run = partial(copy_context().run, _settle, future, work)
    try:
        threading.Thread(target=run, name="dist-ckpt-io", daemon=True).start()
    except (RuntimeError, MemoryError) as error:
        raise StorageError(f"no thread to read or write with: {error}") from error
    return future


def _settle(future: Future[T], work: Callable[[], T]) -> None:
    """Have a future hold what a call gives, or raises."""
    try:
        future.set_result(work())
    except BaseException as error:  # noqa: BLE001 - raised again where it is waited for
        future.set_exception(error)


def _no_answer(running: Sequence[Job], limit_s: float) -> StorageTimeoutError:
    text = f"storage did not answer within {limit_s:g} s"
    if not running:
        return StorageTimeoutError(text)
    job = running[0]
    more = f" (and {len(running) - 1} more)" if len(running) > 1 else ""
    lead = f"{job.key}: " if job.key else ""
    return StorageTimeoutError(f"{lead}{job.path}{more}: {text}", key=job.key, path=str(job.path))


def _failure(job: Job) -> CheckpointError | None:
    try:
        job.run()
    except CheckpointError as error:
        return error
    except Exception as error:  # noqa: BLE001 - libraries raise what they like; named and re-raised
        translated = storage_error(job.key, job.path, error)
        translated.__cause__ = error
        return translated
    return None


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
