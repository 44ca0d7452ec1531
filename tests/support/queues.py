"""Run the scripts of the queues' tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.ports import free_port

_TESTS = Path(__file__).resolve().parents[1]
LOCAL = _TESTS / "local" / "queue_script.py"
GLOBAL = _TESTS / "strategies" / "queue_script.py"


def run_queue(directory: Path, owner: str, script: Path = LOCAL) -> str:
    """What two ranks print that save through the queue of ``owner``."""
    command = [sys.executable, str(script), str(directory), owner, str(free_port())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
