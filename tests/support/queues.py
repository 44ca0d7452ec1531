"""Run the script of the queues' tests."""

import sys
from pathlib import Path

from tests.support.ports import free_port
from tests.support.processes import finished

_SCRIPT = Path(__file__).with_name("queue_script.py")


def run_queue(directory: Path, owner: str, scope: str = "local") -> str:
    """What two ranks print that save through the queue of ``owner``."""
    return finished(sys.executable, _SCRIPT, directory, scope, owner, str(free_port())).stdout
