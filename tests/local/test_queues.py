"""Checkpoint queues take the requests of local saves, and tell when one has failed."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.multiprocess

SCRIPT = Path(__file__).with_name("megatron_queue.py")


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.mark.parametrize("mode", ["temporal", "persistent"])
def test_megatrons_queue_finalises_a_local_save(mode: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path), mode, str(free_port())],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(2):
        assert f"rank {rank}: finalised True, w [{float(rank)}]" in done.stdout
        assert f"rank {rank}: refused: rank 1: " in done.stdout
