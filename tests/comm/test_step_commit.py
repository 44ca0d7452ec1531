"""The collectives of a step, where communication is aborted under them as NCCL does it."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch.distributed as dist

from dist_ckpt_strategies.comm.step_commit import StepCommit
from dist_ckpt_strategies.comm.teardown import Communication
from tests.support.entries import outcome
from tests.support.nccl_rules import BACKEND, register
from tests.support.ranks import run_processes

pytestmark = pytest.mark.multiprocess


def abort_under_a_collective(rank: int, what: str) -> Any:
    """Rank 0 is in a collective that rank 1 never reaches when communication is ended."""
    register()
    store = dist.distributed_c10d._get_default_store()
    group = dist.new_group([0, 1], backend=BACKEND)
    commit = StepCommit(group, timeout_s=60)
    assert commit.should_commit(6)
    assert commit.replicate(b"of rank %d" % rank) == {1 - rank: b"of rank %d" % (1 - rank)}
    if rank:
        store.get("done")
        return None
    communication = Communication()
    ending = threading.Timer(0.5, communication.end)
    ending.start()
    if what == "commit":
        found = outcome(lambda: commit.should_commit(7))
    else:
        found = outcome(lambda: commit.replicate(b"of rank 0"))
    ending.join()
    later = outcome(lambda: commit.should_commit(7))
    store.set("done", "")
    return found, later


@pytest.mark.parametrize("what", ["commit", "replicate"])
def test_what_an_aborted_collective_leaves_is_no_result(what: str) -> None:
    (found, later), _ = run_processes(2, abort_under_a_collective, what)

    assert "WaitReleasedError" in found.kinds, found
    assert "WaitReleasedError" in later.kinds, later
