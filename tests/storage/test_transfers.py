"""Waiting for transfers: all of them, the first failure, and no longer than allowed."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dist_ckpt_strategies.errors import StorageError
from dist_ckpt_strategies.storage.io_pool import Job, Transfer

LIMIT_S = 60.0


def job(key: str, run: Callable[[], Any]) -> Job:
    return Job(key, Path("/ckpt") / key, run)


def appending(to: list[int], number: int) -> Job:
    return job(str(number), partial(to.append, number))


def failing(error: Exception) -> Callable[[], None]:
    def run() -> None:
        raise error

    return run


def test_a_failed_job_is_raised_translated_with_its_cause() -> None:
    cause = ValueError("broken")

    with pytest.raises(StorageError, match=r"^w: /ckpt/w: broken$") as caught:
        Transfer([job("w", failing(cause))], 2).wait(LIMIT_S)
    assert caught.value.__cause__ is cause
    assert (caught.value.key, caught.value.path) == ("w", "/ckpt/w")


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
        Transfer(jobs, 2).wait(LIMIT_S)

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
        Transfer(jobs, 1).wait(0.2)
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
        "from dist_ckpt_strategies.storage.io_pool import Job, Transfer\n"
        "hangs = Job('w', Path('w/0'), lambda: time.sleep(300))\n"
        "try:\n"
        "    Transfer([hangs], 1).wait(0.1)\n"
        "except StorageError as error:\n"
        "    print(error)\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True, timeout=200
    )

    assert "w: w/0: storage did not answer" in found.stdout


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
    transfer = Transfer([appending(done, number) for number in range(20)], 4)

    if first_that_fails == 1:
        with pytest.raises(StorageError, match="no thread to read or write with"):
            transfer.wait(10)
        assert done == []
    else:
        transfer.wait(10)
        assert sorted(done) == list(range(20))
