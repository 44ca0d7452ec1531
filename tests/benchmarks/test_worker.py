from __future__ import annotations

import pytest
import torch

from benchmarks.ranks.one_state import Target

WANTED = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)


def test_a_load_that_does_nothing_is_found_out() -> None:
    target = Target({"w": WANTED.clone()})
    target.clear()
    with pytest.raises(ValueError, match=r"w: tape loaded other values than were saved"):
        target.check("tape")


def test_new_tensors_are_copied_into_the_target() -> None:
    held = WANTED.clone()
    target = Target({"w": held})
    target.clear()
    target.accept({"w": WANTED, "more": torch.zeros(1)})
    target.check("tape")
    assert torch.equal(held, WANTED)


def test_a_target_that_was_loaded_in_place_is_left_alone() -> None:
    held = WANTED.clone()
    target = Target({"w": held})
    target.accept({"w": held})
    target.check("tape")
