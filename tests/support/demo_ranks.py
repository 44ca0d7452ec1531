"""The demonstration's ranks, forked from a parent that has imported everything.

Started afresh, as the command does, each of them imports Megatron-Core for itself: seven seconds.
"""

import os

from dist_ckpt_strategies.cli.demo.main import Outcome, RankTask
from dist_ckpt_strategies.cli.demo.rank import carry_out
from dist_ckpt_strategies.cli.ranks import RankError
from tests.support.ranks import run_processes


def run_task_forked(task: RankTask) -> Outcome:
    """What ``cli.demo.main.run_task`` does."""
    results = run_processes(task.layout.num_ranks, _begin_and_carry_out, task, timeout_s=240.0)
    for rank, result in enumerate(results):
        if isinstance(result, Exception):
            raise RankError(
                f"{task.layout}: rank {rank}: {type(result).__name__}: {result}"
            ) from result
    outcome: Outcome = results[0]
    return outcome


def _begin_and_carry_out(_rank: int, task: RankTask) -> Outcome:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    return carry_out(task)
