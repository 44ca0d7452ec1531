"""Wait for many transfers, and report the first failure once none of them runs any more."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from dist_ckpt_strategies.errors import CheckpointError, StorageError, as_checkpoint_error
from dist_ckpt_strategies.storage.base import Transfer
from dist_ckpt_strategies.storage.disk.files import storage_error


class Waitable(Protocol):
    """What TensorStore's and Python's futures have in common."""

    def result(self, timeout: float | None = None) -> Any:
        """The outcome, or the error, within ``timeout`` seconds."""
        ...


@dataclass(frozen=True, slots=True)
class Pending:
    """One transfer under way.

    Attributes:
        name: what is transferred and where, for messages.
        future: its outcome.
        translate: turns the library's error into ours; our own pass through.
    """

    name: str
    future: Waitable
    translate: Callable[[Exception], CheckpointError]


@dataclass(frozen=True, slots=True)
class PendingTransfers:
    """A Transfer over any number of futures."""

    pendings: tuple[Pending, ...]

    def wait(self, timeout_s: float) -> None:
        """See Transfer."""
        deadline = time.monotonic() + timeout_s
        failures = [
            error for p in self.pendings if (error := _outcome(p, deadline, timeout_s)) is not None
        ]
        if failures:
            raise failures[0]


@dataclass(frozen=True, slots=True)
class Start:
    """A transfer that has not begun.

    Attributes:
        nbytes: memory that the library takes for it while it is under way.
        begin: begins it.
    """

    nbytes: int
    begin: Callable[[], Pending]


class BoundedTransfers:
    """A Transfer that has as much under way as fits a budget, in order; a larger one goes alone.

    What does not fit at once begins while somebody waits. After a failure nothing more begins.

    Args:
        starts: what to transfer.
        budget_nbytes: the bound.
    """

    def __init__(self, starts: Iterable[Start], budget_nbytes: int) -> None:
        self._budget_nbytes = budget_nbytes
        self._starts = deque(starts)
        self._under_way: deque[tuple[int, Pending]] = deque()
        self._held_nbytes = 0
        self._begin_what_fits()

    def wait(self, timeout_s: float) -> None:
        """See Transfer."""
        deadline = time.monotonic() + timeout_s
        failures: list[CheckpointError] = []
        while self._under_way:
            nbytes, pending = self._under_way.popleft()
            error = _outcome(pending, deadline, timeout_s)
            self._held_nbytes -= nbytes
            if error is not None:
                failures.append(error)
                self._starts.clear()
            self._begin_what_fits()
        if failures:
            raise failures[0]

    def _begin_what_fits(self) -> None:
        while self._starts:
            nbytes = self._starts[0].nbytes
            if self._under_way and self._held_nbytes + nbytes > self._budget_nbytes:
                return
            start = self._starts.popleft()
            self._held_nbytes += nbytes
            self._under_way.append((nbytes, _begun(start)))


def _begun(start: Start) -> Pending:
    """The transfer; where it cannot begin that is its outcome, since others are under way."""
    try:
        return start.begin()
    except Exception as error:  # noqa: BLE001 - raised again where it is waited for
        return _outcome_of(as_checkpoint_error(error))


@dataclass(frozen=True, slots=True)
class Job:
    """A blocking transfer of one array's data, to be run on a thread."""

    key: str
    path: Path | str
    run: Callable[[], None]


@dataclass(frozen=True, slots=True)
class PooledTransfers:
    """A Transfer whose jobs are taken from one queue by a few threads of its own.

    A job costs little more than its system calls: one future for each thread, none for each job.
    """

    jobs: deque[Job]
    running: dict[int, Job]
    workers: tuple[Future[CheckpointError | None], ...]

    def wait(self, timeout_s: float) -> None:
        """See Transfer."""
        deadline = time.monotonic() + timeout_s
        found = [self._outcome(worker, deadline, timeout_s) for worker in self.workers]
        failures = [error for error in found if error is not None]
        if failures:
            raise failures[0]

    def _outcome(
        self, worker: Future[CheckpointError | None], deadline: float, timeout_s: float
    ) -> CheckpointError | None:
        try:
            return worker.result(timeout=max(0.0, deadline - time.monotonic()))
        except FutureTimeoutError:
            self.jobs.clear()
            return _no_answer(list(self.running.values()), timeout_s)


@dataclass(frozen=True, slots=True)
class AllTransfers:
    """Several transfers as one; every one is waited for, whichever fails."""

    parts: tuple[Transfer, ...]

    def wait(self, timeout_s: float) -> None:
        """See Transfer."""
        failures: list[CheckpointError] = []
        for part in self.parts:
            try:
                part.wait(timeout_s)
            except CheckpointError as error:
                failures.append(error)
        if failures:
            raise failures[0]


def job_error(job: Job, error: Exception) -> CheckpointError:
    """The error for what no part of this package raises on purpose."""
    return storage_error(job.key, job.path, error)


def run_pooled(
    jobs: Iterable[Job],
    num_threads: int,
    translate: Callable[[Job, Exception], CheckpointError] = job_error,
) -> Transfer:
    """Start the jobs, in their order, on at most ``num_threads`` threads.

    After a failure no further job is started. ``translate`` turns errors that are not ours. Where
    the system starts no more threads, those that run do all the work; without any the transfer has
    failed.
    """
    queue = deque(jobs)
    num_workers = min(num_threads, len(queue))
    if num_workers == 0:
        return PendingTransfers(())
    running: dict[int, Job] = {}
    workers: list[Future[CheckpointError | None]] = []
    for _ in range(num_workers):
        try:
            workers.append(_started(partial(_work_off, queue, running, translate)))
        except (RuntimeError, MemoryError) as error:
            if workers:
                break
            return _failed(StorageError(f"no thread to read or write with: {error}"))
    return PooledTransfers(queue, running, tuple(workers))


def _started(
    work: Callable[[], CheckpointError | None],
) -> Future[CheckpointError | None]:
    """Run on a thread that does not keep the process from ending: storage may never answer."""
    future: Future[CheckpointError | None] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised again where it is waited for
            future.set_exception(error)

    threading.Thread(target=run, name="dist-ckpt-io", daemon=True).start()
    return future


def _failed(error: CheckpointError) -> Transfer:
    """A transfer that could not begin."""
    return PendingTransfers((_outcome_of(error),))


def _outcome_of(error: CheckpointError) -> Pending:
    future: Future[Any] = Future()
    future.set_exception(error)
    return Pending("", future, as_checkpoint_error)


def _work_off(
    jobs: deque[Job],
    running: dict[int, Job],
    translate: Callable[[Job, Exception], CheckpointError],
) -> CheckpointError | None:
    """Take jobs until none is left; the error of the one that failed, if any."""
    me = threading.get_ident()
    while True:
        try:
            job = running[me] = jobs.popleft()
        except IndexError:
            return None
        error = _failure(job, translate)
        del running[me]
        if error is not None:
            jobs.clear()
            return error


def _no_answer(running: Sequence[Job], timeout_s: float) -> StorageError:
    text = f"storage did not answer within {timeout_s:g} s"
    if not running:
        return StorageError(text)
    job = running[0]
    more = f" (and {len(running) - 1} more)" if len(running) > 1 else ""
    lead = f"{job.key}: " if job.key else ""
    return StorageError(f"{lead}{job.path}{more}: {text}", key=job.key, path=str(job.path))


def _failure(
    job: Job, translate: Callable[[Job, Exception], CheckpointError]
) -> CheckpointError | None:
    try:
        job.run()
    except CheckpointError as error:
        return error
    except Exception as error:  # noqa: BLE001 - libraries raise what they like; named and re-raised
        translated = translate(job, error)
        translated.__cause__ = error
        return translated
    return None


def _outcome(pending: Pending, deadline: float, timeout_s: float) -> CheckpointError | None:
    try:
        pending.future.result(timeout=max(0.0, deadline - time.monotonic()))
    except CheckpointError as error:
        return error
    except (TimeoutError, FutureTimeoutError):
        return StorageError(f"{pending.name}: storage did not answer within {timeout_s:g} s")
    except Exception as error:  # noqa: BLE001 - libraries raise what they like; named and re-raised
        translated = pending.translate(error)
        translated.__cause__ = error
        return translated
    return None
