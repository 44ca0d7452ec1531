"""The process-rank helper keeps its promises, so that other tests can rely on it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import RankDiedError, run_processes

pytestmark = pytest.mark.multiprocess


def sum_of_ranks(rank: int, factor: int) -> tuple[int, int, int]:
    total = torch.tensor([rank * factor])
    dist.all_reduce(total)
    return int(total), dist.get_world_size(), os.getpid()


def fails_or_dies(rank: int) -> int:
    if rank == 1:
        raise KeyError("lost")
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return rank


def returns_what_does_not_pickle(rank: int) -> object:
    return lambda: rank


def one_rank_hangs(rank: int, pids: str) -> None:
    (Path(pids) / str(os.getpid())).touch()
    if rank == 0:
        time.sleep(600)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_every_rank_takes_part_in_one_gloo_group_and_none_is_left() -> None:
    results = run_processes(3, sum_of_ranks, 10)

    assert [(total, size) for total, size, _ in results] == [(30, 3)] * 3
    assert not any(is_running(pid) for *_, pid in results)


def test_exceptions_and_deaths_come_back_by_rank() -> None:
    fine, failed, died = run_processes(3, fails_or_dies)

    assert fine == 0
    assert isinstance(failed, KeyError)
    assert failed.args == ("lost",)
    assert "fails_or_dies" in failed.__notes__[0]
    assert isinstance(died, RankDiedError)
    assert died.exit_code == -signal.SIGKILL


def test_a_result_that_does_not_pickle_is_said_so() -> None:
    (result,) = run_processes(1, returns_what_does_not_pickle)

    assert isinstance(result, TypeError)
    assert "does not pickle" in str(result)


def test_a_hanging_rank_is_named_and_all_are_killed(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError, match=r"ranks \[0\] not done in 2 s"):
        run_processes(2, one_rank_hangs, str(tmp_path), timeout_s=2.0)

    pids = [int(path.name) for path in tmp_path.iterdir()]
    assert len(pids) == 2
    assert not any(is_running(pid) for pid in pids)
