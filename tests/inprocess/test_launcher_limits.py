"""What the launcher refuses: scripts that cannot be continued; and slow readers, no store."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.ports import free_port
from tests.support.processes import until

pytestmark = pytest.mark.multiprocess

ROOT = Path(__file__).parents[2]
LIMIT_S = 150

TWO_BLOCKS = """
import os, signal
from dist_ckpt_strategies.inprocess import HPWrapper

@HPWrapper()
def first(): pass

@HPWrapper()
def second():
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)

first()
second()
"""
FAILS = """
raise SystemExit(3)
"""
STOPS = """
import os, signal, sys, time
from dist_ckpt_strategies.config import launch_from_environment
from dist_ckpt_strategies.inprocess.worker_process import start_heartbeat
start_heartbeat(launch_from_environment())
if os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGSTOP)
print("begun", file=sys.stderr, flush=True)
while True:
    print("x" * 4000, flush=True)
"""


@contextmanager
def started(directory: Path, body: str, *options: str) -> Iterator[subprocess.Popen[str]]:
    script = directory / "script.py"
    script.write_text(body)
    with subprocess.Popen(
        [sys.executable, "-m", "dist_ckpt_strategies.cli", "run", *options, str(script)],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(ROOT), "RES_OPTIONS": "attempts:0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as agent:
        try:
            yield agent
        finally:
            agent.kill()


def end_of(directory: Path, body: str, *options: str) -> tuple[int, str]:
    with started(directory, body, *options) as agent:
        _, err = agent.communicate(timeout=LIMIT_S)
    return agent.returncode, err


def test_no_rank_is_replaced_in_a_second_block(tmp_path: Path) -> None:
    """The new process would begin with the first one, beside others in the second."""
    code, err = end_of(tmp_path, TWO_BLOCKS, "--nproc", "2")

    assert code == 1
    assert "rank 1 died after a wrapped block had ended on all ranks: killed by SIGKILL" in err


def test_an_agent_without_a_store_ends_as_one_whose_job_lacks_a_node(tmp_path: Path) -> None:
    endpoint = f"192.0.2.1:{free_port()}"  # of documentation: no machine has it
    options = ("--nnodes", "2", "--rdzv-endpoint", endpoint, "--node-wait", "1", "--node-ttl", "2")

    code, err = end_of(tmp_path, FAILS, *options)

    assert code == 87
    assert re.search(r"192\.0\.2\.1.* has not come within --node-wait", err)


def test_a_reader_that_does_not_read_does_not_hold_up_a_signal(tmp_path: Path) -> None:
    with started(tmp_path, STOPS, "--nproc", "1") as agent:
        assert agent.stderr is not None
        assert any("begun" in line for line in agent.stderr)
        time.sleep(1.0)  # the pipe is full
        agent.send_signal(signal.SIGTERM)
        until(lambda: agent.poll() is not None, 60.0)

    assert agent.returncode == 128 + signal.SIGTERM


def test_a_slow_reader_does_not_hide_a_worker_that_hangs(tmp_path: Path) -> None:
    options = ("--nproc", "2", "--heartbeat-timeout", "3", "--max-restarts", "0")
    with started(tmp_path, STOPS, *options) as agent:
        assert agent.stdout is not None
        assert agent.stderr is not None
        deadline = time.monotonic() + LIMIT_S
        while agent.poll() is None and time.monotonic() < deadline:
            agent.stdout.read(4000)
            time.sleep(0.6)
        agent.kill()
        assert "rank 1: no heartbeat for 3 s" in agent.stderr.read()
