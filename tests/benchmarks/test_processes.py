from __future__ import annotations

import os
import time
from dataclasses import dataclass

import pytest

from benchmarks.common.processes import RankContext, RankFailedError, Ranks
from benchmarks.common.rounds import alternate

pytestmark = pytest.mark.multiprocess

MODULE = "tests.benchmarks.test_processes"


@dataclass(frozen=True)
class Worker:
    context: RankContext

    def number(self) -> int:
        return self.context.global_rank

    def wait(self, seconds: float) -> None:
        time.sleep(seconds * self.context.global_rank)

    def break_one(self) -> None:
        if self.context.global_rank == 1:
            raise ValueError("tape is torn")
        time.sleep(200)

    def die(self) -> None:
        os._exit(3)


def make_worker(context: RankContext) -> Worker:
    return Worker(context)


def test_a_step_returns_what_each_rank_says() -> None:
    with Ranks(2, MODULE, timeout_s=150) as ranks:
        assert ranks.step("number").values == (0, 1)


def test_a_step_lasts_until_its_slowest_rank_is_done() -> None:
    with Ranks(2, MODULE, timeout_s=150) as ranks:
        assert 0.3 <= ranks.step("wait", 0.3).seconds < 60


def test_a_failing_rank_is_reported_while_others_still_wait() -> None:
    started = time.monotonic()
    with (
        pytest.raises(RankFailedError, match=r"break_one: rank 1 failed[\s\S]*tape is torn"),
        Ranks(2, MODULE, timeout_s=150) as ranks,
    ):
        ranks.step("break_one")
    assert time.monotonic() - started < 150


def test_a_rank_that_dies_is_reported() -> None:
    with (
        pytest.raises(RankFailedError, match=r"die: rank [01] died"),
        Ranks(2, MODULE, timeout_s=150) as ranks,
    ):
        ranks.step("die")


def test_a_rank_that_does_not_answer_is_reported() -> None:
    with (
        pytest.raises(RankFailedError, match=r"no answer from ranks \[1\] within 10 s"),
        Ranks(2, MODULE, timeout_s=10) as ranks,
    ):
        ranks.step("wait", 200.0)


def test_alternation_turns_round_after_each_repetition() -> None:
    assert list(alternate(["a", "b"], 2)) == [(0, "a"), (0, "b"), (1, "b"), (1, "a")]
