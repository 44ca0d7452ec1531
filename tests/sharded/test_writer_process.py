"""The process that writes for another ends with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from dist_ckpt_strategies.core.array import ArraySpec
from dist_ckpt_strategies.sharded.writer_process import (
    WriterProcess,
)
from dist_ckpt_strategies.storage.io_pool import Transfer
from dist_ckpt_strategies.storage.store import ArrayWriter

pytestmark = pytest.mark.multiprocess

ROOT = Path(__file__).parents[2]


class _Stuck:
    """A writer whose storage never answers."""

    def __init__(self, started: Path) -> None:
        self._started = started

    def begin_creates(self, _arrays: Sequence[ArraySpec]) -> Transfer:
        """Say so, and stay."""
        self._started.touch()
        time.sleep(200)
        raise AssertionError


def _stuck(started: Path) -> ArrayWriter:
    return _Stuck(started)  # type: ignore[return-value]


def test_it_ends_with_its_object() -> None:
    process = WriterProcess()
    pid = process.pid
    assert psutil.pid_exists(pid)
    del process

    assert not psutil.pid_exists(pid)


_PARENT = """
import pickle, sys
from functools import partial
from pathlib import Path
from dist_ckpt_strategies.sharded.writer_process import SharedBytes, WriteJob, WriterProcess
from tests.sharded.test_writer_process import _stuck
process = WriterProcess()
print(process.pid, flush=True)
job = WriteJob((), (), partial(_stuck, Path(sys.argv[1])), 100)
process.run(pickle.dumps(job), SharedBytes(10))
"""


def test_it_stops_writing_when_its_parent_is_killed(tmp_path: Path) -> None:
    started = tmp_path / "started"
    with subprocess.Popen(
        [sys.executable, "-c", _PARENT, str(started)],
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        await_that(started.exists)
        parent.send_signal(signal.SIGKILL)
        await_that(lambda: not _runs(pid))


def _runs(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def await_that(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 100
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_fork_does_not_take_it_for_its_own() -> None:
    process = WriterProcess()
    pid = os.fork()
    if pid == 0:
        os._exit(int(process.is_usable))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert process.is_usable
