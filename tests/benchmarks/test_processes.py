"""The rank processes of benchmarks: results by rank, and failures that name the rank."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import pytest

from benchmarks.common.processes import RankContext, RankFailedError, Ranks

pytestmark = pytest.mark.multiprocess


@dataclass(frozen=True)
class Worker:
    """What a rank is asked to do, by name."""

    context: RankContext

    def number(self) -> int:
        return self.context.global_rank

    def break_one(self) -> None:
        if self.context.global_rank == 1:
            raise ValueError("tape is torn")
        time.sleep(200)

    def die(self) -> None:
        os._exit(3)


def make_worker(context: RankContext) -> Worker:
    return Worker(context)


def take(step: str) -> None:
    with Ranks(2, "tests.benchmarks.test_processes", timeout_s=150) as ranks:
        assert ranks.step("number").values == (0, 1)
        ranks.step(step)


@pytest.mark.parametrize(
    ("step", "said"),
    [
        ("break_one", r"break_one: rank 1 failed[\s\S]*tape is torn"),
        ("die", r"die: rank [01] died"),
    ],
)
def test_a_step_returns_what_each_rank_says_and_a_rank_that_fails_is_named(
    step: str, said: str
) -> None:
    started = time.monotonic()
    with pytest.raises(RankFailedError, match=said):
        take(step)
    assert time.monotonic() - started < 150
