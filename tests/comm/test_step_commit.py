"""The random states that replicas give each other: whole, or not taken."""

from typing import Any

import pytest
import torch.distributed as dist

from dist_ckpt_strategies.comm.step_commit import StepCommit
from dist_ckpt_strategies.errors import RestartError
from tests.support.ranks import run_processes

pytestmark = pytest.mark.multiprocess


def replicate(rank: int) -> None:
    other, commit = 1 - rank, StepCommit(timeout_s=60)
    assert commit.replicate(b"of %d" % rank) == {other: b"of %d" % other}
    assert commit.replicate(b"longer %d" % rank) == {other: b"longer %d" % other}
    too_long = commit.replicate(b"x" * 1000 if rank == 0 else b"short")
    assert too_long == ({other: b"short"} if rank == 0 else {})

    exchange = dist.all_to_all_single

    def flip_a_bit(rows: Any, *args: Any, **options: Any) -> Any:
        work = exchange(rows, *args, **options)
        work.wait()
        rows[other][18] ^= 1  # a length and a digest come before the content
        return work

    with pytest.MonkeyPatch.context() as changes:
        changes.setattr(dist, "all_to_all_single", flip_a_bit)
        with pytest.raises(RestartError, match=f"states of rank {other} arrived damaged"):
            commit.replicate(b"of %d" % rank)


def test_content_arrives_whole_or_not_at_all() -> None:
    assert run_processes(2, replicate) == [None, None]
