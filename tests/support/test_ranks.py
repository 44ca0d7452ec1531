"""The process-rank helper keeps its promises, so that other tests can rely on it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.support.processes import is_running
from tests.support.ranks import RankDiedError, run_processes

pytestmark = pytest.mark.multiprocess


def fails_or_dies(rank: int) -> int:
    if rank == 1:
        raise KeyError("lost")
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return rank


def one_rank_hangs(rank: int, pids: str) -> None:
    (Path(pids) / str(os.getpid())).touch()
    if rank == 0:
        time.sleep(600)


def test_exceptions_and_deaths_come_back_by_rank() -> None:
    fine, failed, died = run_processes(3, fails_or_dies)

    assert fine == 0
    assert isinstance(failed, KeyError)
    assert failed.args == ("lost",)
    assert "fails_or_dies" in failed.__notes__[0]
    assert isinstance(died, RankDiedError)
    assert died.exit_code == -signal.SIGKILL


def test_a_hanging_rank_is_named_and_all_are_killed(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError, match=r"ranks \[0\] not done in 2 s"):
        run_processes(2, one_rank_hangs, str(tmp_path), timeout_s=2.0)

    pids = [int(path.name) for path in tmp_path.iterdir()]
    assert len(pids) == 2
    assert not any(is_running(pid) for pid in pids)
