"""Run the scripts of the queues' tests."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.support.ports import free_port
from tests.support.processes import finished

_TESTS = Path(__file__).resolve().parents[1]
LOCAL = _TESTS / "local" / "queue_script.py"
GLOBAL = _TESTS / "strategies" / "queue_script.py"


def run_queue(directory: Path, owner: str, script: Path = LOCAL) -> str:
    """What two ranks print that save through the queue of ``owner``."""
    return finished(sys.executable, script, directory, owner, str(free_port())).stdout
