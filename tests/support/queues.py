"""Run the script of the queues' tests."""

import sys
from pathlib import Path

from tests.support.ports import free_port
from tests.support.processes import finished

_SCRIPT = Path(__file__).with_name("queue_script.py")


def run_queue(directory: Path, owner: str, scope: str = "local") -> None:
    """Two ranks save through the queue of ``owner``, and hear of it where one of them fails."""
    command = (sys.executable, _SCRIPT, directory, scope, owner, str(free_port()))
    finished(*command, limit_s=550)  # ten processes start in turn
