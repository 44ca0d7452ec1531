"""The demonstration's ranks, forked from a parent that has imported everything.

Started afresh, as the command does, each of them imports Megatron-Core for itself: seven seconds.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable

from dist_ckpt_strategies.cli.demo.task import RankTask
from dist_ckpt_strategies.cli.demo.worker import carry_out
from dist_ckpt_strategies.cli.ranks import EVENTS_NAME, Event, RankError
from tests.support.ranks import run_processes


def run_task_forked(task: RankTask, on_event: Callable[[Event], None], timeout_s: float) -> None:
    """What ``cli.demo.main.run_task`` does; the events come at the end, all at once.

    Raises:
        RankError: ranks failed; the first of them is named.
    """
    results = run_processes(task.layout.num_ranks, _begin_and_carry_out, task, timeout_s=timeout_s)
    for rank, result in enumerate(results):
        if isinstance(result, Exception):
            raise RankError(f"rank {rank}: {type(result).__name__}: {result}") from result
    for line in (task.scratch / EVENTS_NAME).read_text(encoding="utf-8").splitlines():
        on_event(json.loads(line))


def _begin_and_carry_out(rank: int, task: RankTask) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    carry_out(rank, task)
