"""Which coordinator a process gets, by how it was started."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

import pytest
from torch._C._distributed_c10d import TCPStore

from dist_ckpt_strategies.comm.job_store import JobStore, host_store
from dist_ckpt_strategies.config import Launch, launch_from_environment
from dist_ckpt_strategies.errors import StrategyError
from dist_ckpt_strategies.inprocess.coordinator import FaultMode, RankInfo
from dist_ckpt_strategies.inprocess.store_coordinator import (
    RestartState,
    coordinator_from_environment,
)
from dist_ckpt_strategies.inprocess.train_utils import wait_rank
from dist_ckpt_strategies.inprocess.worker_process import start_heartbeat
from tests.support.leaks import threads_left

HEARTBEAT = "dist-ckpt-heartbeat"
VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of how the tests were started, and nothing left of what they set."""
    monkeypatch.setattr(os, "environ", dict(os.environ))
    for name in list(os.environ):
        if name.startswith(("DIST_CKPT_", "TORCHELASTIC_")) or name in VARIABLES:
            del os.environ[name]


@pytest.fixture
def host() -> Iterator[TCPStore]:
    found = host_store()
    yield found
    time.sleep(0.05)


def test_a_script_started_on_its_own_is_a_world_of_one() -> None:
    me = coordinator_from_environment()

    assert me.wait_rank() == RankInfo(0, 0, 1, 1)
    first = me.barrier(60.0)
    me.report(0, first, FaultMode.EXCEPTION, "boom")
    fault = me.wait_fault(first, 60.0)
    assert fault is not None
    assert fault.why == "boom"
    second = me.barrier(60.0)
    assert (second, me.finish(second, 60.0)) == (first + 1, True)
    me.close()


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"WORLD_SIZE": "4"}, r"WORLD_SIZE is 4.*dist-ckpt run or torchrun"),
        *(
            ({"DIST_CKPT_COORDINATOR": address}, "DIST_CKPT_COORDINATOR: expected host:port")
            for address in ("here", "host:", ":1", "host:x")
        ),
    ],
)
def test_variables_that_make_no_sense_are_refused(variables: dict[str, str], words: str) -> None:
    with pytest.raises(StrategyError, match=words):
        launch_from_environment(variables)


def test_the_variables_of_torchrun_are_those_of_the_first_look() -> None:
    variables = {
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "2",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29500",
        "RANK": "3",
    }
    expected = Launch(("10.0.0.1", 29500), "3", rank=3, attempt=2)
    assert launch_from_environment(variables) == expected

    variables |= {"TORCHELASTIC_RESTART_COUNT": "77", "MASTER_PORT": "40000"}

    assert launch_from_environment(variables) == expected


def test_under_torchrun_each_start_has_epochs_of_its_own(host: TCPStore) -> None:
    os.environ |= {
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "1",
        "MASTER_ADDR": host.host,
        "MASTER_PORT": str(host.port),
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": "1",
    }
    me = coordinator_from_environment()

    epoch = me.barrier(60.0)

    assert epoch == 1_000_001
    assert me.finish(epoch, 60.0)
    me.close()


def test_wait_rank_sets_the_variables_that_the_supervisor_assigns(host: TCPStore) -> None:
    os.environ["DIST_CKPT_COORDINATOR"] = f"{host.host}:{host.port}"
    os.environ["DIST_CKPT_WORKER"] = "spare7"
    store = JobStore(host.host, host.port)
    place = RankInfo(3, 1, 8, 2, (("MASTER_ADDR", "10.0.0.1"), ("MASTER_PORT", "29500")))
    RestartState(store).assign("spare7", place)

    wait_rank()

    assert [os.environ[name] for name in VARIABLES] == ["3", "1", "8", "2", "10.0.0.1", "29500"]
    assert RestartState(store).is_ready("spare7")


def test_signs_of_life_go_to_the_pipe_of_this_process_and_to_nothing_else() -> None:
    ours, theirs = os.pipe()
    inode = os.fstat(theirs).st_ino
    before = threading.enumerate()

    start_heartbeat(Launch(heartbeat_pipe=(theirs, inode + 1), heartbeat_s=0.01))
    assert num_heartbeats() == 0
    start_heartbeat(Launch(heartbeat_pipe=(theirs, inode), heartbeat_s=0.01))
    start_heartbeat(Launch(heartbeat_pipe=(theirs, inode), heartbeat_s=0.01))

    assert num_heartbeats() == 1
    assert os.read(ours, 1) + os.read(ours, 1) + os.read(ours, 1) == b"..."
    os.close(ours)
    assert threads_left(before, prefix=HEARTBEAT) == []
    os.close(theirs)


def num_heartbeats() -> int:
    return [thread.name for thread in threading.enumerate()].count(HEARTBEAT)
