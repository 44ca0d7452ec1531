"""The position in the data, as the manager's page has it, at other numbers of ranks."""

from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedTensor
from torch.utils.data import DataLoader

from dist_ckpt_strategies import SavePolicy, TieredCheckpointManager
from tests.manager.test_manager import OPTIONS, in_threads
from tests.support.pages import ROOT, python_blocks
from tests.support.ranks import done_by

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(180)]

NUM_SAMPLES, BATCH_SIZE = 48, 2


def sampler_of_the_page() -> Any:
    (code,) = [c for c in python_blocks(ROOT / "docs/manager.md") if "class ResumableSampler" in c]
    found: dict[str, Any] = {"torch": torch}
    exec(code, found)  # noqa: S102 - it is what is tested
    return found["ResumableSampler"]


def trains(rank: int, root: str, num_steps: int) -> list[int]:
    """Body of a rank: so many steps from where the job before was; the samples that it trained on.

    The last step is not saved, as where the job is killed: the next one does it again.
    """
    in_threads()
    num_ranks, num_consumed, first = dist.get_world_size(), 0, 0
    rows, trained = torch.zeros(16 // num_ranks), list[int]()

    def state_dict() -> dict[str, Any]:
        sharded = ShardedTensor.from_rank_offsets("rows", rows, (0, rank, num_ranks))
        return {"rows": sharded, "num_consumed": num_consumed}

    policy = SavePolicy(every_steps=1)
    with TieredCheckpointManager(root, policy=policy, options=OPTIONS) as manager:
        loaded = manager.load_latest(state_dict)
        if loaded is not None:
            first, num_consumed = loaded.iteration, loaded.state["num_consumed"]
        sampler = sampler_of_the_page()(NUM_SAMPLES, num_consumed, rank, num_ranks)
        samples: Any = range(NUM_SAMPLES)
        batches: Any = DataLoader(samples, BATCH_SIZE, sampler=sampler)
        for step, batch in enumerate(islice(batches, num_steps), first):
            trained += batch.tolist()
            num_consumed += BATCH_SIZE * num_ranks
            if step < first + num_steps - 1:
                manager.save(step + 1, state_dict)
    return trained[: BATCH_SIZE * (num_steps - 1)]


def test_each_sample_is_seen_once_whatever_the_number_of_ranks(tmp_path: Path) -> None:
    """A job of R ranks and S steps, of which one is lost, consumes 2 R (S - 1) samples."""
    seen: Counter[int] = Counter()
    for size, num_steps in ((2, 5), (4, 4), (2, 3)):
        for samples in done_by(size, trains, str(tmp_path), num_steps):
            seen.update(samples)

    assert seen == Counter(range(NUM_SAMPLES))
