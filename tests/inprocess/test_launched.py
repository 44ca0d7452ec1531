"""What a process takes from the variables that it was started with."""

import os
import threading

import pytest

from dist_ckpt_strategies.errors import StrategyError
from dist_ckpt_strategies.inprocess.launch import Launch, launch_from_environment
from dist_ckpt_strategies.inprocess.worker_process import start_heartbeat
from tests.support.leaks import threads_left

HEARTBEAT = "dist-ckpt-heartbeat"


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"WORLD_SIZE": "4"}, r"WORLD_SIZE is 4.*dist-ckpt run or torchrun"),
        *(
            ({"DIST_CKPT_RENDEZVOUS": address}, "DIST_CKPT_RENDEZVOUS: expected host:port")
            for address in ("here", "host:", ":1", "host:x")
        ),
    ],
)
def test_variables_that_make_no_sense_are_refused(
    variables: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", variables)
    with pytest.raises(StrategyError, match=words):
        launch_from_environment()


def test_the_variables_of_torchrun_are_those_of_the_first_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    variables = {
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "2",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29500",
        "RANK": "3",
    }
    expected = Launch(("10.0.0.1", 29500), "3", rank=3, attempt=2)
    monkeypatch.setattr(os, "environ", variables)
    assert launch_from_environment() == expected

    variables |= {"TORCHELASTIC_RESTART_COUNT": "77", "MASTER_PORT": "40000"}

    assert launch_from_environment() == expected


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
