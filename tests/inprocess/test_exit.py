"""How a process ends after an attempt was interrupted: by its own code, never by an abort."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dist_ckpt_strategies.comm.job_store import host_store
from dist_ckpt_strategies.config import environment
from tests.support.restarts import HOST

pytestmark = pytest.mark.multiprocess

ROOT = Path(__file__).parents[2]

SCRIPT = """
import sys
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from dist_ckpt_strategies.errors import RestartLimitError
from dist_ckpt_strategies.inprocess import HPCallWrapper, HPWrapper

@HPWrapper(max_attempts=3)
def block(call: HPCallWrapper):
    dist.init_process_group("interruptible_gloo")
    model = DistributedDataParallel(torch.nn.Linear(8, 8))
    for step in range(1000):
        model(torch.ones(2, 8)).sum().backward()
        dist.all_reduce(torch.ones(2_000_000))
        if step == 2 and dist.get_rank() == 1:
            sys.exit(3) if call.num_attempts == 3 else [][1]

try:
    block()
except RestartLimitError as error:
    print(error, file=sys.stderr)
    sys.exit(7)
"""


def run_both(script: str) -> tuple[list[int], list[str]]:
    """The exit codes of two ranks, and what they say on stderr."""
    host = host_store()
    place = {"MASTER_ADDR": HOST, "MASTER_PORT": str(host.port), "GLOO_SOCKET_IFNAME": "lo"}
    agent = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    size = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "PYTHONPATH": str(ROOT)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script],
            env={**environment(), **place, **agent, **size, "RANK": rank, "LOCAL_RANK": rank},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in ("0", "1")
    ]
    try:
        texts = [process.communicate(timeout=200)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()

    return [process.returncode for process in processes], texts


def test_who_leaves_in_the_middle_of_the_block_says_why_and_ends_by_its_own_code() -> None:
    codes, texts = run_both(SCRIPT)

    assert codes == [7, 3], texts
    assert "rank 1: exception in epoch 3: SystemExit: 3" in texts[0]
    assert not any("terminate called" in text for text in texts), texts


STUCK = """
import threading
from dist_ckpt_strategies.inprocess import HPWrapper

start = threading.Thread.start
def no_room(thread):
    if thread.name == "dist_ckpt-abort":
        raise RuntimeError("can't start new thread")
    start(thread)
threading.Thread.start = no_room

@HPWrapper()
def block():
    raise ValueError("on purpose")

block()
"""


def test_a_process_that_cannot_stop_its_block_ends_and_says_why() -> None:
    found = subprocess.run(
        [sys.executable, "-c", STUCK],
        env={**environment(), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert found.returncode == 86, found.stderr
    assert "stopping the block failed: this process ends" in found.stderr
    assert "can't start new thread" in found.stderr
