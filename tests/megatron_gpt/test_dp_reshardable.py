"""A real GPT with the distributed optimizer, ``dp_reshardable``, at a changed number of ranks.

Megatron cuts this form of the optimizer's state along its flat buffers: shards of every length,
no regular grid, and other cuts for every data-parallel size. The sizes below give parameters
whose length is no multiple of 64, so that the buffers hold padding between them as well.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from dist_ckpt_strategies.cli.demo.main import (
    ModelSize,
    ParallelLayout,
    RankTask,
    Training,
    compare_digests,
)
from tests.support.demo_ranks import run_task_forked

TRAINING = Training(
    size=ModelSize(
        num_layers=2,
        hidden=40,
        num_heads=4,
        num_query_groups=2,
        ffn_hidden=72,
        sequence_length=16,
    ),
    global_batch=8,
    num_before_save=3,
    num_after_save=2,
    sharding_type="dp_reshardable",
)


@pytest.mark.multiprocess
@pytest.mark.timeout(330)
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        (ParallelLayout(tp=1, dp=4), ParallelLayout(tp=1, dp=2)),
        (ParallelLayout(tp=2, dp=1), ParallelLayout(tp=2, dp=2)),
    ],
    ids=str,
)
def test_optimizer_state_is_bit_identical_at_another_data_parallel_size(
    saved: ParallelLayout, loaded: ParallelLayout, tmp_path: Path
) -> None:
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    before = run_task_forked(RankTask(saved, TRAINING, checkpoint))
    after = run_task_forked(RankTask(loaded, TRAINING, checkpoint, resumes=True))

    kinds = ("weights", "exp_avg", "exp_avg_sq", "fp32 master")
    assert compare_digests(before.digests, after.digests) == dict.fromkeys(kinds, (17, []))
    assert sorted(after.losses) == [3, 4]
    assert all(abs(loss - before.losses[n]) < 0.02 for n, loss in after.losses.items())
    stored = {path.name for path in checkpoint.iterdir() if (path / ".zarray").exists()}
    assert any(name.startswith("optimizer.distributed.dp_group_idx_0.gbuf") for name in stored)
