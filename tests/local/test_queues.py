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
    arguments = [str(SCRIPT), str(tmp_path), mode, str(free_port())]
    ranks = [
        subprocess.Popen(
            [sys.executable, *arguments, str(rank)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=200) for rank in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()

    assert [process.returncode for process in ranks] == [0, 0], outputs
    for rank, (out, _) in enumerate(outputs):
        assert f"rank {rank}: finalised True, w [{float(rank)}]" in out
        assert f"rank {rank}: refused: rank 1: " in out
