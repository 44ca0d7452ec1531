"""What is removed once a save is complete."""

from __future__ import annotations

from dist_ckpt_strategies.local.plan import build_retention
from dist_ckpt_strategies.local.shard_format import SaveId

A, B, C = SaveId(10, "a"), SaveId(20, "b"), SaveId(30, "c")


def test_the_newest_is_kept_and_as_many_before_it_as_asked_for() -> None:
    assert build_retention([A, B, C], C, 1) == {C}
    assert build_retention([A, B, C], C, 2) == {B, C}
    assert build_retention([A, B, C], C, 9) == {A, B, C}


def test_an_incomplete_save_takes_no_place() -> None:
    assert build_retention([A, C], C, 2) == {A, C}


def test_later_iterations_of_a_run_that_went_back_are_not_kept() -> None:
    again = SaveId(20, "d")

    assert build_retention([A, B, C, again], again, 3) == {A, again}


def test_of_two_saves_of_one_iteration_the_later_is_kept() -> None:
    again = SaveId(10, "b")

    assert build_retention([A, again, C], C, 2) == {again, C}
