"""How often ranks meet in a save and in a load is what the page of the architecture says."""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing import ShardedTensor

import dist_ckpt_strategies
from dist_ckpt_strategies.comm.torch_communicator import TorchCommunicator
from tests.support.ranks import run_processes

PAGE = Path(__file__).parents[1] / "docs" / "architecture.md"


def promised_meetings(heading: str) -> int:
    """The sum of the last column of a table of the page, with one round of irregular chunks."""
    section = PAGE.read_text().partition(f"## {heading}\n")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| \d+ \|.*\| (\d+)[^|]*\|$", section, re.MULTILINE)
    assert cells
    return sum(map(int, cells))


def counted_meetings(rank: int, root: str) -> tuple[int, int]:
    """Body of a rank: how often it meets the others in a save, and in a load."""
    cut = 7
    data = torch.arange(cut if rank == 0 else 100 - cut, dtype=torch.float32)
    offset = (0,) if rank == 0 else (cut,)
    shape = tuple(data.shape)
    state = {"x": ShardedTensor("x", data, data.dtype, shape, (100,), offset, None)}
    meetings = {TorchCommunicator.all_gather.__code__, TorchCommunicator.exchange.__code__}
    counts: Counter[CodeType] = Counter()

    def watch(frame: FrameType, event: str, _argument: Any) -> None:
        if event == "call" and frame.f_code in meetings:
            counts[frame.f_code] += 1

    dist_ckpt_strategies.register()
    sys.setprofile(watch)
    dist_ckpt_strategies.save(state, root, ("zarr", 1))
    num_in_save = counts.total()
    dist_ckpt_strategies.load(state, root)
    sys.setprofile(None)
    return num_in_save, counts.total() - num_in_save


@pytest.mark.multiprocess
def test_a_save_and_a_load_meet_as_often_as_the_page_says(tmp_path: Path) -> None:
    promised = promised_meetings("The life of one save"), promised_meetings("The life of one load")

    assert run_processes(2, counted_meetings, str(tmp_path / "ckpt")) == [promised] * 2
