"""A real GPT with the distributed optimizer, ``dp_reshardable``, at a changed number of ranks.

Megatron cuts this form of the optimizer's state along its flat buffers: shards of every length,
no regular grid, and other cuts for every data-parallel size. The sizes below give parameters
whose length is no multiple of 64, so that the buffers hold padding between them as well.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from dist_ckpt_strategies.cli.demo.main import StartRecord, compare_digests, largest_difference
from dist_ckpt_strategies.cli.demo.task import (
    ModelSize,
    ParallelLayout,
    RankTask,
    Role,
    Training,
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


def run_ranks_to_end(role: Role, layout: ParallelLayout, checkpoint: Path) -> StartRecord:
    scratch = checkpoint.parent / role
    scratch.mkdir()
    checkpoint.mkdir(exist_ok=True)
    record = StartRecord(layout)
    task = RankTask(role, layout, TRAINING, checkpoint, scratch, timeout_s=60.0)
    run_task_forked(task, record.add, 150.0)
    return record


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
    before = run_ranks_to_end(Role.TRAIN, saved, checkpoint)
    after = run_ranks_to_end(Role.RESUME, loaded, checkpoint)

    agreements = compare_digests(before.digests, after.digests)
    assert [(a.kind, a.num_expected) for a in agreements] == [
        ("weights", 17),
        ("exp_avg", 17),
        ("exp_avg_sq", 17),
        ("fp32 master", 17),
    ]
    assert not any(agreement.differing for agreement in agreements)
    assert sorted(after.losses) == [3, 4]
    assert largest_difference(before.losses, after.losses) < 0.02
    stored = {path.name for path in checkpoint.iterdir() if (path / ".zarray").exists()}
    assert any(name.startswith("optimizer.distributed.dp_group_idx_0.gbuf") for name in stored)
