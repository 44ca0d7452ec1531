"""The position in the data, as the manager's page has it, at other numbers of ranks."""

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedTensor

from dist_ckpt_strategies import SavePolicy, TieredCheckpointManager
from tests.manager.test_manager import in_threads
from tests.support.pages import ROOT, python_blocks
from tests.support.ranks import done_by

pytestmark = pytest.mark.multiprocess

NUM_SAMPLES, BATCH_SIZE = 50, 2


class Samples(list[int]):
    """Notes those that are read."""

    def __init__(self) -> None:
        super().__init__(range(NUM_SAMPLES))
        self.read = list[int]()

    def __getitem__(self, index: Any) -> Any:
        self.read.append(index)
        return super().__getitem__(index)


def trains(_rank: int, root: str, num_steps: int) -> list[int]:
    """Body of a rank: the page's training from where the job before was; the samples it read."""
    in_threads()
    os.chdir(root)
    rows = torch.zeros(12 // dist.get_world_size())
    key = "rows", rows, (0, dist.get_rank(), dist.get_world_size())
    page: dict[str, Any] = {
        "torch": torch,
        "dist": dist,
        "SavePolicy": SavePolicy,
        "TieredCheckpointManager": TieredCheckpointManager,
        "state_dict": lambda: {"rows": ShardedTensor.from_rank_offsets(*key)},
    }
    for code in python_blocks(ROOT / "docs/manager.md"):
        if "ResumableSampler" in code:
            exec(code.partition("\nprint(")[0], page)  # noqa: S102 - it is what is tested
    samples = Samples()
    page["train"](num_steps, samples, BATCH_SIZE)
    return samples.read


def test_each_sample_is_read_once_in_an_epoch_whatever_the_number_of_ranks(tmp_path: Path) -> None:
    """All of an epoch that its end allows: a step of R ranks reads 2 R samples."""
    seen = [Counter[int]() for _ in range(3)]
    jobs = ((3, 5, 0), (2, 10, 0), (3, 18, 1), (3, 19, 2))  # ranks, the last step, the epoch
    for size, num_steps, epoch in jobs:
        for samples in done_by(size, trains, str(tmp_path), num_steps):
            seen[epoch].update(samples)

    assert [epoch.total() for epoch in seen] == [50, 48, 6]
    assert all(set(epoch.values()) == {1} for epoch in seen)
