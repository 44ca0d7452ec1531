"""Run the script of the queues' tests."""

import sys
from itertools import product
from pathlib import Path

from tests.support.ports import free_port
from tests.support.processes import finished

_SCRIPT = Path(__file__).with_name("queue_script.py")


def run_queue(directory: Path, owner: str, scope: str = "local") -> str:
    """What two ranks print that save through the queue of ``owner``."""
    return finished(sys.executable, _SCRIPT, directory, scope, owner, str(free_port())).stdout


def require_local_saves(directory: Path, owner: str) -> None:
    """The queue of ``owner`` finalises a local save, and all ranks hear that one has failed."""
    printed = run_queue(directory, owner)
    for mode, rank in product(("temporal", "persistent"), range(2)):
        assert f"{mode}, rank {rank}: finalised True, w [{float(rank)}]" in printed
        assert f"{mode}, rank {rank}: refused: rank 1: " in printed
