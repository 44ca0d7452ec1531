"""Workers that the kernel does not end: they read from a file system that does not answer."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.inprocess import stuck_file_system
from tests.inprocess.agents import Agents
from tests.support.processes import is_running, until

pytestmark = pytest.mark.long

STUCK = """
from dist_ckpt_strategies.inprocess import HPCallWrapper, HPWrapper
def read():
    Path(f"stuck.{{os.getpid()}}").touch()
    open("{0}/file", "rb", buffering=0).read(10)
@HPWrapper()
def train(call: HPCallWrapper):
    Path(f"train{{os.environ['RANK']}}.{{os.getpid()}}").touch()
    if os.environ["RANK"] == "1":
        read()
    wait_for("go", 200)
"""


@pytest.fixture
def mountpoint(tmp_path_factory: pytest.TempPathFactory, agents: Agents) -> Iterator[Path]:
    """Of the file system; its readers end with it, before the agents' workers are looked for."""
    directory = tmp_path_factory.mktemp("stuck")
    command = [sys.executable, stuck_file_system.__file__, str(directory)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    with server:
        assert server.stdout is not None
        line = server.stdout.readline()
        try:
            if line != "mounted\n":
                pytest.skip(f"no FUSE: {server.stdout.read().strip().rpartition(chr(10))[2]}")
            yield directory
        finally:
            server.kill()
            subprocess.run(["/bin/umount", "-l", str(directory)], check=False, capture_output=True)
            until(lambda: not any(map(is_running, agents.pids("stuck"))))


def test_a_node_whose_worker_does_not_end_leaves_the_job(agents: Agents, mountpoint: Path) -> None:
    agent = agents.start(
        f"{STUCK.format(mountpoint)}train()", "--nproc", "2", "--heartbeat-timeout", "3"
    )
    stuck = agents.worker("stuck")
    agents.worker("train0")
    until(Path(f"{mountpoint}.read").exists)
    os.kill(stuck, signal.SIGKILL)
    assert agents.code(agent) == 88
    assert "rank 1 is gone: it was killed" in agents.output(agent)
    assert "the kernel does not end it; this node leaves the job" in agents.output(agent)
    assert is_running(stuck)
    assert not is_running(agents.worker("train0"))
