"""Two replicas of a Megatron-Core GPT over two ranks each: killed ranks come back, bit for bit."""

import os
import warnings
from pathlib import Path

import pytest

from dist_ckpt_strategies.cli.demo.cpu_stand_ins import cpu_stand_ins
from dist_ckpt_strategies.inprocess import (
    CheckpointlessAbortManager,
    CheckpointlessFinalizeCleanup,
)
from dist_ckpt_strategies.recovery import CheckpointManager
from tests.recovery.megatron_training import FAULTS, NUM_STEPS, Task, train
from tests.support.restarts import Wrappers, run_respawned

pytest.importorskip("einops", reason="Megatron-Core needs it for instances of its optimizer")

SIZE = 4
LIMIT_S = 140


def on_rank(rank: int, wrappers: Wrappers, task: Task) -> dict[str, str]:
    """Body of a rank: what it has at the end."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    warnings.simplefilter("ignore")
    manager = CheckpointManager(enable_checksum=True, timeout_s=60)
    with cpu_stand_ins():
        wrapper = wrappers(
            abort=CheckpointlessAbortManager.get_default_checkpointless_abort(),
            finalize=CheckpointlessFinalizeCleanup(),
            checkpoint_manager=manager,
            max_idle_attempts=3,
        )
        found: dict[str, str] = wrapper(train)(task, manager)
        return found


@pytest.mark.multiprocess
@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)], ids=["TP2", "PP2"])
def test_killed_ranks_of_a_parallel_layout_come_back_bit_for_bit(
    tp: int, pp: int, tmp_path: Path
) -> None:
    quiet, disturbed = Task(tmp_path / "quiet", tp, pp, ()), Task(tmp_path / "disturbed", tp, pp)
    for task in (quiet, disturbed):
        task.directory.mkdir()

    expected, _ = run_respawned(SIZE, on_rank, quiet, timeout_s=LIMIT_S)
    found, died = run_respawned(SIZE, on_rank, disturbed, timeout_s=LIMIT_S)

    assert all(isinstance(one, dict) for one in (*expected, *found)), (expected, found)
    assert sorted(died) == sorted(rank for _, _, rank, what in FAULTS if what == "kill")
    assert found == expected
    assert disturbed.losses() == quiet.losses()
    assert len(quiet.losses()) == SIZE * NUM_STEPS
