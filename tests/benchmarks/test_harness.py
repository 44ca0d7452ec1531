from __future__ import annotations

import os
import time
from dataclasses import dataclass

import pytest

from benchmarks.measuring.harness import (
    RankContext,
    RankFailedError,
    Ranks,
    alternate,
    paired_ratio,
)

pytestmark = pytest.mark.multiprocess

PRELOAD = ("benchmarks.measuring.harness",)
"""Ranks that are forked from where that is imported begin at once."""


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


def test_a_step_returns_what_each_rank_says() -> None:
    with Ranks(2, Worker, timeout_s=150) as ranks:
        assert ranks.step("number").values == (0, 1)


def test_a_step_lasts_until_its_slowest_rank_is_done() -> None:
    with Ranks(2, Worker, timeout_s=150) as ranks:
        assert 0.3 <= ranks.step("wait", 0.3).seconds < 60


def test_a_failing_rank_is_reported_while_others_still_wait() -> None:
    started = time.monotonic()
    with (
        pytest.raises(RankFailedError, match=r"break_one: rank 1 failed[\s\S]*tape is torn"),
        Ranks(2, Worker, timeout_s=150) as ranks,
    ):
        ranks.step("break_one")
    assert time.monotonic() - started < 150


def test_a_rank_that_dies_is_reported() -> None:
    with (
        pytest.raises(RankFailedError, match=r"die: rank [01] died"),
        Ranks(2, Worker, timeout_s=150) as ranks,
    ):
        ranks.step("die")


def test_a_rank_that_does_not_answer_is_reported() -> None:
    with (
        pytest.raises(RankFailedError, match=r"no answer from ranks \[1\] within 10 s"),
        Ranks(2, Worker, timeout_s=10, preload=PRELOAD) as ranks,
    ):
        ranks.step("wait", 200.0)


def test_alternation_turns_round_after_each_repetition() -> None:
    assert list(alternate(["a", "b"], 2)) == [(0, "a"), (0, "b"), (1, "b"), (1, "a")]


def test_a_slow_repetition_cancels_out_of_the_ratio() -> None:
    assert paired_ratio([2.0, 20.0, 4.0], [1.0, 10.0, 2.0]) == 2.0


def test_a_rank_can_be_killed_in_a_step_that_the_others_end() -> None:
    with Ranks(3, Worker, timeout_s=150, preload=PRELOAD) as ranks:
        assert ranks.step("number").values == (0, 1, 2)
        ended = ranks.step_killing(2, 0.3, "wait", 0.5)
        assert (ended.values, ended.was_done) == ({0: None, 1: None}, False)


def test_a_rank_that_is_killed_at_once_keeps_nobody_from_beginning() -> None:
    with Ranks(2, Worker, timeout_s=150, preload=PRELOAD) as ranks:
        assert ranks.step_killing(0, 0.0, "wait", 0.1).values == {1: None}


def test_a_rank_that_was_done_before_it_was_killed_is_told_from_others() -> None:
    with Ranks(2, Worker, timeout_s=150, preload=PRELOAD) as ranks:
        assert ranks.step_killing(0, 3.0, "wait", 0.1).was_done


def test_a_rank_that_hangs_after_a_kill_is_a_failure() -> None:
    with (
        Ranks(2, Worker, timeout_s=5, preload=PRELOAD) as ranks,
        pytest.raises(RankFailedError, match="no answer from ranks"),
    ):
        ranks.step_killing(0, 0.1, "wait", 200)
