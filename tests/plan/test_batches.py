"""Transfers are cut into batches that fit a memory budget."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dist_ckpt_strategies.sharded.plan_load import build_batches

sizes = st.lists(st.integers(0, 50), max_size=30)


@given(sizes, st.integers(1, 120))
def test_every_transfer_is_in_exactly_one_batch(staged: list[int], budget: int) -> None:
    batches = build_batches(staged, budget)

    assert sorted(number for batch in batches for number in batch) == list(range(len(staged)))
    assert all(batches)


@given(sizes, st.integers(1, 120))
def test_a_batch_exceeds_the_budget_only_by_a_single_larger_transfer(
    staged: list[int], budget: int
) -> None:
    for batch in build_batches(staged, budget):
        needed = [staged[number] for number in batch if staged[number]]
        assert sum(needed) <= budget or len(needed) == 1


@given(sizes, st.integers(1, 120))
def test_what_needs_no_memory_is_issued_at_once(staged: list[int], budget: int) -> None:
    batches = build_batches(staged, budget)

    for batch in batches[1:]:
        assert all(staged[number] for number in batch)


@given(sizes, st.integers(1, 120))
def test_batches_are_as_few_as_order_allows(staged: list[int], budget: int) -> None:
    batches = build_batches(staged, budget)
    loads = [sum(staged[number] for number in batch) for batch in batches]

    for load, following in zip(loads, batches[1:], strict=False):
        assert load + staged[following[0]] > budget


@given(sizes, st.integers(1, 120))
def test_staged_transfers_keep_their_order(staged: list[int], budget: int) -> None:
    order = [number for batch in build_batches(staged, budget) for number in batch]
    copied = [number for number in order if staged[number]]

    assert copied == sorted(copied)


def test_nothing_to_transfer_is_no_batch() -> None:
    assert build_batches([], 10) == ()
