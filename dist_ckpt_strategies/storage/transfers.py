"""Wait for many transfers, and report the first failure once none of them runs any more."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from typing import Any, Protocol

from dist_ckpt_strategies.errors import CheckpointError, StorageError
from dist_ckpt_strategies.storage.base import Transfer


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
class PooledTransfers:
    """A Transfer whose futures run on a thread pool of its own."""

    inner: PendingTransfers
    pool: ThreadPoolExecutor

    def wait(self, timeout_s: float) -> None:
        """See Transfer."""
        try:
            self.inner.wait(timeout_s)
        finally:
            self.pool.shutdown(wait=False, cancel_futures=True)


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


def run_pooled(
    jobs: Sequence[tuple[str, Callable[[], None]]],
    num_threads: int,
    translate: Callable[[Exception], CheckpointError],
) -> Transfer:
    """Start each job on a pool of at most ``num_threads`` threads."""
    if not jobs:
        return PendingTransfers(())
    pool = ThreadPoolExecutor(min(num_threads, len(jobs)), thread_name_prefix="dist-ckpt-io")
    futures: list[Future[None]] = [pool.submit(job) for _, job in jobs]
    pendings = (
        Pending(name, future, translate) for (name, _), future in zip(jobs, futures, strict=True)
    )
    return PooledTransfers(PendingTransfers(tuple(pendings)), pool)


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
