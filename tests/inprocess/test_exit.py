"""How a process ends after an attempt was interrupted: by its own code, never by an abort."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dist_ckpt_strategies.comm.key_values import TcpHost
from dist_ckpt_strategies.config import environment
from tests.support.restarts import HOST

pytestmark = pytest.mark.multiprocess

ROOT = Path(__file__).parents[2]

SCRIPT = """
import sys, threading, time
import torch, torch.distributed as dist
from dist_ckpt_strategies.errors import RestartLimitError
from dist_ckpt_strategies.inprocess import HPCallWrapper, HPWrapper

@HPWrapper(max_attempts=3)
def block(call: HPCallWrapper):
    dist.init_process_group("interruptible_gloo")
    data = torch.ones(2_000_000)
    until = time.monotonic() + 0.05
    while dist.get_rank() or time.monotonic() < until:
        dist.all_reduce(data)
        dist.send(data, 1) if dist.get_rank() == 0 else dist.recv(data, 0)
    raise ValueError("in the middle")

try:
    block()
except RestartLimitError:
    sys.exit(7)
"""


def test_the_exit_code_is_the_scripts_own() -> None:
    host = TcpHost()
    place = {"MASTER_ADDR": HOST, "MASTER_PORT": str(host.port), "GLOO_SOCKET_IFNAME": "lo"}
    agent = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    size = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "PYTHONPATH": str(ROOT)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT],
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

    assert [process.returncode for process in processes] == [7, 7], texts
    assert not any("terminate called" in text for text in texts), texts
