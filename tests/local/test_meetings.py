"""How often ranks meet in a local save and in a local load is what the page says."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from dist_ckpt_strategies.comm.torch_communicator import TorchCommunicator
from tests.local.clique_worlds import cliques, manager_of, run, state_of

pytestmark = pytest.mark.multiprocess

PAGE = Path(__file__).parents[2] / "docs" / "local.md"
WORDS = {"two": 2, "six": 6, "ten": 10}


def promised(step: str) -> int:
    """What the page's table of costs says of a step."""
    row = re.search(rf"^\| {step} \|.*?(\w+) meetings", PAGE.read_text(), re.MULTILINE)
    assert row is not None
    return WORDS[row[1]]


def counted(action: Callable[[], Any]) -> tuple[int, Any]:
    """How often this thread meets the others in it, and what it returns."""
    calls = [0]

    def watch(frame: FrameType, event: str, _argument: Any) -> None:
        calls[0] += event == "call" and frame.f_code is TorchCommunicator.all_gather.__code__

    sys.setprofile(watch)
    try:
        result = action()
    finally:
        sys.setprofile(None)
    return calls[0], result


def count_meetings(rank: int, root: str) -> tuple[int, int, int]:
    manager = manager_of(rank, root, cliques())
    in_save, _ = counted(lambda: manager.save(state_of(rank, 1), 1))
    while_training_waits, request = counted(
        lambda: manager.save(state_of(rank, 2), 2, is_async=True)
    )
    request.wait()
    in_load, _ = counted(manager.load)
    return in_save, while_training_waits, in_load


def test_a_save_and_a_load_meet_as_often_as_the_page_says(tmp_path: Path) -> None:
    steps = ("save", "blocking part", "load, recovery")

    assert run(4, count_meetings, tmp_path) == [tuple(map(promised, steps))] * 4
