"""Waiting for transfers: all of them, the first failure, and no longer than allowed."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dist_ckpt_strategies.errors import CheckpointError, CorruptCheckpointError, StorageError
from dist_ckpt_strategies.storage.io_pool import (
    AllTransfers,
    BoundedTransfers,
    Job,
    Pending,
    PendingTransfers,
    Start,
    run_pooled,
)
from tests.support.leaks import threads_left

LIMIT_S = 60.0


def translated(error: Exception) -> CheckpointError:
    return StorageError(f"translated: {error}")


def translated_job(job: Job, error: Exception) -> CheckpointError:
    return StorageError(f"{job.key}: translated: {error}", key=job.key, path=str(job.path))


def pending(name: str, outcome: object = None, *, done: bool = True) -> Pending:
    future: Future[Any] = Future()
    if isinstance(outcome, Exception):
        future.set_exception(outcome)
    elif done:
        future.set_result(outcome)
    return Pending(name, future, translated)


def job(key: str, run: Callable[[], Any]) -> Job:
    return Job(key, Path("/ckpt") / key, run)


def appending(to: list[int], number: int) -> Job:
    return job(str(number), partial(to.append, number))


def failing(error: Exception) -> Callable[[], None]:
    def run() -> None:
        raise error

    return run


# Futures


def test_nothing_to_wait_for_is_done() -> None:
    PendingTransfers(()).wait(0.0)
    PendingTransfers((pending("a"), pending("b"))).wait(0.0)


def test_the_first_failure_is_raised_translated_with_its_cause() -> None:
    causes = [ValueError("one"), ValueError("two")]
    transfers = PendingTransfers((pending("ok"), *(pending("x", cause) for cause in causes)))

    with pytest.raises(StorageError, match=r"^translated: one$") as caught:
        transfers.wait(LIMIT_S)
    assert caught.value.__cause__ is causes[0]


def test_our_own_errors_are_raised_as_they_are() -> None:
    ours = CorruptCheckpointError("w: broken", key="w")

    with pytest.raises(CorruptCheckpointError) as caught:
        PendingTransfers((pending("w", ours),)).wait(LIMIT_S)
    assert caught.value is ours


def test_what_does_not_end_is_named_after_the_timeout() -> None:
    started = time.monotonic()

    with pytest.raises(StorageError, match=r"^slow: storage did not answer within 0\.2 s"):
        PendingTransfers((pending("slow", done=False), pending("slower", done=False))).wait(0.2)
    assert time.monotonic() - started < LIMIT_S


# Jobs on threads


def test_every_job_is_done_once() -> None:
    done: list[int] = []
    jobs = [appending(done, number) for number in range(100)]
    run_pooled(jobs, 3, translated_job).wait(LIMIT_S)

    assert sorted(done) == list(range(100))


def test_one_thread_keeps_the_order() -> None:
    done: list[int] = []
    jobs = [appending(done, number) for number in range(100)]
    run_pooled(jobs, 1, translated_job).wait(LIMIT_S)

    assert done == list(range(100))


def test_as_many_jobs_run_at_once_as_there_are_threads() -> None:
    together = threading.Barrier(4, timeout=LIMIT_S)
    run_pooled([job(str(n), together.wait) for n in range(4)], 4, translated_job).wait(LIMIT_S)


def test_jobs_are_under_way_before_anybody_waits() -> None:
    begun = threading.Event()
    transfer = run_pooled([job("a", begun.set)], 1, translated_job)

    assert begun.wait(LIMIT_S)
    transfer.wait(LIMIT_S)


def test_no_job_is_no_thread() -> None:
    before = threading.enumerate()
    run_pooled([], 4, translated_job).wait(0.0)

    assert threads_left(before) == []


def test_a_failed_job_is_raised_translated_with_its_cause() -> None:
    cause = ValueError("broken")

    with pytest.raises(StorageError, match=r"^w: translated: broken$") as caught:
        run_pooled([job("w", failing(cause))], 2, translated_job).wait(LIMIT_S)
    assert caught.value.__cause__ is cause
    assert (caught.value.key, caught.value.path) == ("w", "/ckpt/w")


def test_our_own_errors_in_jobs_are_raised_as_they_are() -> None:
    ours = CorruptCheckpointError("w: broken", key="w")

    with pytest.raises(CorruptCheckpointError) as caught:
        run_pooled([job("w", failing(ours))], 2, translated_job).wait(LIMIT_S)
    assert caught.value is ours


def test_after_a_failure_no_further_job_is_started_and_those_under_way_have_ended() -> None:
    started, ended = [], []
    released = threading.Event()

    def slow() -> None:
        started.append("slow")
        released.set()
        time.sleep(0.2)
        ended.append("slow")

    def fails() -> None:
        released.wait(LIMIT_S)
        raise StorageError("broken")

    jobs = [job("slow", slow), job("fails", fails)]
    jobs += [job("later", lambda: started.append("later")) for _ in range(50)]
    with pytest.raises(StorageError, match="broken"):
        run_pooled(jobs, 2, translated_job).wait(LIMIT_S)

    assert ended == ["slow"]
    time.sleep(0.05)
    assert started == ["slow"]


def test_jobs_that_do_not_end_are_an_error_after_the_timeout_and_no_more_are_started() -> None:
    release, done = threading.Event(), threading.Event()
    started: list[str] = []

    def hangs() -> None:
        release.wait(LIMIT_S)
        done.set()

    jobs = [job("hangs", hangs)] + [job("later", lambda: started.append("later"))] * 5
    with pytest.raises(
        StorageError, match=r"hangs: .*: storage did not .* within 0\.2 s"
    ) as caught:
        run_pooled(jobs, 1, translated_job).wait(0.2)
    assert caught.value.key == "hangs"
    assert caught.value.path == str(jobs[0].path)
    release.set()

    assert done.wait(LIMIT_S)
    time.sleep(0.05)
    assert started == []


def test_storage_that_never_answers_does_not_keep_a_process_from_ending() -> None:
    script = (
        "import time\n"
        "from pathlib import Path\n"
        "from dist_ckpt_strategies.errors import StorageError\n"
        "from dist_ckpt_strategies.storage.io_pool import Job, run_pooled\n"
        "hangs = Job('w', Path('w/0'), lambda: time.sleep(300))\n"
        "try:\n"
        "    run_pooled([hangs], 1, lambda job, error: StorageError(str(error))).wait(0.1)\n"
        "except StorageError as error:\n"
        "    print(error)\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True, timeout=200
    )

    assert "w: w/0: storage did not answer" in found.stdout


def test_threads_end_with_their_jobs() -> None:
    before = threading.enumerate()
    for _ in range(5):
        run_pooled([job(str(n), lambda: None) for n in range(9)], 4, translated_job).wait(LIMIT_S)

    assert threads_left(before) == []


# Several as one


def test_every_part_is_waited_for_and_the_first_failure_is_raised() -> None:
    waited: list[str] = []

    class Part:
        def __init__(self, name: str, error: CheckpointError | None = None) -> None:
            self.name = name
            self.error = error

        def wait(self, timeout_s: float) -> None:
            waited.append(self.name)
            if self.error:
                raise self.error

    parts = (Part("a"), Part("b", StorageError("b")), Part("c", StorageError("c")), Part("d"))
    with pytest.raises(StorageError, match=r"^b$"):
        AllTransfers(parts).wait(LIMIT_S)
    assert waited == ["a", "b", "c", "d"]


# Under a budget


class Watched:
    """Futures that end when they are waited for, and what they take while they do not."""

    def __init__(self, failing: int | None = None) -> None:
        self.failing = failing
        self.held = self.most = 0
        self.begun: list[int] = []
        self.ended: list[int] = []

    def start(self, number: int, nbytes: int) -> Start:
        return Start(nbytes, partial(self._begin, number, nbytes))

    def _begin(self, number: int, nbytes: int) -> Pending:
        self.begun.append(number)
        self.held += nbytes
        self.most = max(self.most, self.held)
        return Pending(f"w{number}", _Ending(self, number, nbytes), translated)


class _Ending:
    def __init__(self, watched: Watched, number: int, nbytes: int) -> None:
        self.watched, self.number, self.nbytes = watched, number, nbytes

    def result(self, timeout: float | None = None) -> None:
        self.watched.held -= self.nbytes
        self.watched.ended.append(self.number)
        if self.number == self.watched.failing:
            raise ValueError(f"broken {self.number}")


def test_no_more_is_under_way_than_the_budget_allows() -> None:
    watched = Watched()
    transfer = BoundedTransfers([watched.start(n, 30) for n in range(10)], 100)
    begun_at_once = list(watched.begun)
    transfer.wait(LIMIT_S)

    assert begun_at_once == [0, 1, 2]
    assert watched.most == 90
    assert watched.begun == watched.ended == list(range(10))


def test_what_is_larger_than_the_budget_goes_alone() -> None:
    watched = Watched()
    BoundedTransfers([watched.start(n, size) for n, size in enumerate([10, 500, 10])], 100).wait(
        LIMIT_S
    )

    assert watched.most == 500
    assert watched.ended == [0, 1, 2]


def test_after_a_failure_what_is_under_way_is_waited_for_and_nothing_more_begins() -> None:
    watched = Watched(failing=0)
    transfer = BoundedTransfers([watched.start(n, 30) for n in range(10)], 100)

    with pytest.raises(StorageError, match="translated: broken 0"):
        transfer.wait(LIMIT_S)
    assert watched.begun == watched.ended == [0, 1, 2]


def test_nothing_to_transfer_is_done_at_once() -> None:
    BoundedTransfers([], 100).wait(0.0)


@pytest.mark.parametrize("first_that_fails", [1, 2, 3])
def test_work_goes_on_with_the_threads_that_there_are(
    first_that_fails: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[int] = []
    started: list[threading.Thread] = []
    real = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        started.append(thread)
        if len(started) >= first_that_fails:
            raise RuntimeError("can't start new thread")
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    transfer = run_pooled([appending(done, number) for number in range(20)], 4)

    if first_that_fails == 1:
        with pytest.raises(StorageError, match="no thread to read or write with"):
            transfer.wait(10)
        assert done == []
    else:
        transfer.wait(10)
        assert sorted(done) == list(range(20))


def test_a_transfer_that_cannot_begin_leaves_none_alone_that_has() -> None:
    slow: Future[None] = Future()

    def cannot_begin() -> Pending:
        raise MemoryError("none left")

    begun = BoundedTransfers(
        [Start(1, lambda: Pending("slow", slow, translated)), Start(1, cannot_begin)], 10
    )
    with pytest.raises(CheckpointError, match="storage did not answer"):
        begun.wait(0.05)

    slow.set_result(None)
    again = BoundedTransfers(
        [Start(1, lambda: Pending("slow", slow, translated)), Start(1, cannot_begin)], 10
    )
    with pytest.raises(CheckpointError, match="MemoryError: none left"):
        again.wait(10)
