"""What may be recovered, by what was done to the checkpoints."""

from __future__ import annotations

from itertools import product

import pytest

from tests.faults.judge import observed_copies, observed_global
from tests.faults.oracle import (
    CopyKey,
    Found,
    Ledger,
    Place,
    SaveKey,
    Standing,
    Tier,
)
from tests.faults.rank import SaveOrder, SaveResult
from tests.support.entries import Failure

EMPTY = Ledger(num_ranks=4, num_kept=2)
FAILURE = Failure(
    ("StorageError",),
    is_ours=True,
    is_megatrons=True,
    text="rank 1: full",
    global_rank=1,
    key=None,
    path=None,
    seconds=0.1,
)


def copies_of(iteration: int, name: str = "a") -> set[CopyKey]:
    """With cliques of ranks 0 and 1, 2 and 3."""
    save = SaveKey(iteration, name)
    pairs = [(0, 0), (0, 1), (1, 0), (1, 1), (2, 2), (2, 3), (3, 2), (3, 3)]
    return {CopyKey(save, owner, holder) for owner, holder in pairs}


def local(iteration: int) -> Found:
    return Found(iteration, Tier.LOCAL)


def global_(iteration: int) -> Found:
    return Found(iteration, Tier.GLOBAL)


def results(order: SaveOrder, failure: Failure | None = None) -> dict[int, SaveResult]:
    return {rank: SaveResult(order, 7, failure) for rank in range(4)}


def test_a_node_that_is_lost_costs_nothing_and_a_clique_all() -> None:
    ledger = EMPTY.with_copies(copies_of(5))

    assert ledger.without_node(0).newest_whole() == local(5)
    assert ledger.without_node(0).without_node(2).newest_whole() == local(5)
    assert ledger.without_node(0).without_node(1).newest_whole() is None


@pytest.mark.parametrize("place", [Place.HEADER, Place.TENSOR])
def test_a_part_is_lost_with_its_last_good_copy(place: Place) -> None:
    ledger = EMPTY.with_copies(copies_of(5))
    one, other = (key for key in sorted(copies_of(5)) if key.owner == 3)

    damaged = ledger.damaged_copy(one, place)

    assert damaged.newest_whole() == local(5)
    assert damaged.damaged_copy(other, place).newest_whole() is None
    assert damaged.damaged_copy(other, place).acceptable() == set()


def test_what_may_or_may_not_be_loaded_is_neither_due_nor_refused() -> None:
    ledger = EMPTY.with_copies(copies_of(5)).with_global("g3", 3, Standing.WHOLE)
    for key in copies_of(5):
        ledger = ledger.damaged_copy(key, Place.PADDING)

    assert ledger.newest_whole() == global_(3)
    assert ledger.acceptable() == {global_(3), local(5)}


def test_what_is_kept_is_the_newest_and_the_one_that_was_complete_before_it() -> None:
    seen = copies_of(3) | copies_of(5) | copies_of(7, "b")
    ledger = EMPTY.with_copies(seen)

    assert ledger.kept_copies(SaveKey(7, "b")) == copies_of(5) | copies_of(7, "b")
    for key in copies_of(5):
        if key.owner == 2:
            ledger = ledger.damaged_copy(key, Place.HEADER)
    assert ledger.kept_copies(SaveKey(7, "b")) == copies_of(3) | copies_of(7, "b")


LOCAL_SAVE = SaveOrder(Tier.LOCAL, 0, is_async=True)
GLOBAL_SAVE = SaveOrder(Tier.GLOBAL, 0, is_async=True, directory="g7")


def test_a_local_save_that_succeeded_has_to_have_left_every_copy() -> None:
    saves = {LOCAL_SAVE: results(LOCAL_SAVE)}
    whole = copies_of(7)

    after, wrong = observed_copies(EMPTY, saves, whole, 1, may_differ=False)
    assert (after.newest_whole(), wrong) == (local(7), [])
    for missing in whole:
        _, wrong = observed_copies(EMPTY, saves, whole - {missing}, 1, may_differ=False)
        assert wrong


def test_a_local_save_that_failed_has_to_leave_what_was_there() -> None:
    before = EMPTY.with_copies(copies_of(3) | copies_of(5))
    saves = {LOCAL_SAVE: results(LOCAL_SAVE, FAILURE)}

    _, wrong = observed_copies(before, saves, before.copies, 1, may_differ=False)
    assert wrong == []
    _, wrong = observed_copies(before, saves, copies_of(5), 1, may_differ=False)
    assert "copies are gone" in wrong[0]
    _, wrong = observed_copies(before, saves, copies_of(5) | copies_of(7), 1, may_differ=False)
    assert wrong == []


@pytest.mark.parametrize(
    ("fails", "is_finished", "was_there"), list(product([False, True], repeat=3))
)
def test_a_global_save_is_visible_when_it_has_succeeded_and_only_then(
    fails: bool, is_finished: bool, was_there: bool
) -> None:
    before = EMPTY.with_global("g7", 7, Standing.BROKEN) if was_there else EMPTY
    saves = {GLOBAL_SAVE: results(GLOBAL_SAVE, FAILURE if fails else None)}
    finished = {"g7": 7} if is_finished else {}

    after, wrong = observed_global(before, saves, finished, may_differ=False)

    is_right = is_finished != fails or (was_there and fails)
    assert (wrong == []) == is_right
    expected = {True: Standing.UNSURE, False: Standing.WHOLE}[was_there and fails]
    assert after.global_.get("g7") == ((7, expected) if is_finished else None)
    assert observed_global(before, saves, finished, may_differ=True)[1] == []
