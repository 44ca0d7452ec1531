"""Writing in a process of its own: what it writes, what it says, and when it ends."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import psutil  # type: ignore[import-untyped]
import pytest

from dist_ckpt_strategies.config import Options
from dist_ckpt_strategies.core.array import ArraySpec, DType, Region
from dist_ckpt_strategies.formats.arrays import DirectoryWriter
from dist_ckpt_strategies.formats.chunks import Digests
from dist_ckpt_strategies.sharded.writer_process import (
    SharedBytes,
    StagedWrite,
    WriteJob,
    WriterProcess,
    digests_from,
)
from dist_ckpt_strategies.storage.io_pool import Transfer
from dist_ckpt_strategies.storage.store import ArrayWriter

pytestmark = pytest.mark.multiprocess

OPTIONS = Options(timeout_s=100)
FORMATS = ("format1", "format2")
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


def array_of(name: str) -> ArraySpec:
    inner = (10, 20) if name == "format2" else None
    return ArraySpec("w", (30, 20), DType.FLOAT32, (30, 20), inner_shape=inner)


def job_of(
    name: str, shared: SharedBytes, open_writer: Callable[[], ArrayWriter], timeout_s: float = 20
) -> WriteJob:
    """One that writes a whole array, which lies some way into the memory."""
    array = array_of(name)
    values = np.arange(array.shape[0] * array.shape[1], dtype=np.float32)
    shared.memory[64 : 64 + values.nbytes] = values.tobytes()
    writes = (StagedWrite(array, Region.whole(array.shape), 64),)
    return WriteJob((array,), writes, open_writer, timeout_s)


def files_below(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


@pytest.fixture
def shared() -> SharedBytes:
    return SharedBytes(1 << 20)


@pytest.mark.parametrize("name", FORMATS)
def test_it_writes_what_a_thread_writes(name: str, shared: SharedBytes, tmp_path: Path) -> None:
    process = WriterProcess()
    found: list[Digests] = []
    for where in ("there", "again", "here"):
        (tmp_path / where).mkdir()
        job = job_of(name, shared, partial(DirectoryWriter, tmp_path / where, OPTIONS))
        if where != "here":
            found.append(digests_from(process.run(pickle.dumps(job), shared)))
        else:
            found.append(job.run(memoryview(shared.memory)))

    for where in ("there", "again"):
        assert files_below(tmp_path / where) == files_below(tmp_path / "here")
    assert found[0] == found[1] == found[2]
    assert bool(found[0]) is (name == "format2")


def _stuck(started: Path) -> ArrayWriter:
    return _Stuck(started)  # type: ignore[return-value]


def test_it_ends_with_its_object(shared: SharedBytes) -> None:
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
