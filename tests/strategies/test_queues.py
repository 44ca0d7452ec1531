"""Saves through the checkpoint queues of Megatron-Core and NVRx."""

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.ports import free_port
from tests.support.processes import finished

pytestmark = pytest.mark.multiprocess

SCRIPT = Path(__file__).with_name("queue_script.py")


def test_queues_finalise_saves_and_tell_when_one_has_failed(tmp_path: Path) -> None:
    """Two ranks and their queues' processes: all start once."""
    owners = ["megatron"] + ["nvrx"] * (find_spec("nvidia_resiliency_ext") is not None)

    finished(sys.executable, SCRIPT, tmp_path, str(free_port()), *owners, limit_s=550)
