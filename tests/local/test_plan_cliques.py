"""Cliques are those of the documents, and where numbers do not fit, none is too small."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from dist_ckpt_strategies.errors import PlanError
from dist_ckpt_strategies.local.plan import build_cliques


def test_the_documented_example() -> None:
    cliques = build_cliques(32, 8, 2)

    assert cliques == (
        (0, 8), (1, 9), (2, 10), (3, 11), (4, 12), (5, 13), (6, 14), (7, 15),
        (16, 24), (17, 25), (18, 26), (19, 27), (20, 28), (21, 29), (22, 30), (23, 31),
    )  # fmt: skip


@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 4))
def test_even_cliques_are_those_of_the_formula(jump: int, factor: int, blocks: int) -> None:
    world_size = jump * factor * blocks
    formula = {
        tuple(a * jump * factor + b + copy * jump for copy in range(factor))
        for a in range(blocks)
        for b in range(jump)
    }

    assert set(build_cliques(world_size, jump, factor)) == formula


def test_twenty_ranks_on_nodes_of_eight_as_the_page_works_out() -> None:
    with pytest.raises(PlanError, match=r"20 is not divisible by .* = 16"):
        build_cliques(20, 8, 2)

    assert build_cliques(20, 8, 2, allow_uneven=True) == (
        (0, 8), (1, 9), (2, 10), (3, 11), (4, 12, 16), (5, 13, 17), (6, 14, 18), (7, 15, 19),
    )  # fmt: skip


@given(st.integers(1, 60), st.integers(1, 9), st.integers(1, 4))
def test_uneven_cliques_hold_every_rank_once_and_are_large_enough(
    world_size: int, jump: int, factor: int
) -> None:
    num_nodes = -(-world_size // jump)
    assume(num_nodes >= factor)
    cliques = build_cliques(world_size, jump, factor, allow_uneven=True)

    assert sorted(rank for clique in cliques for rank in clique) == list(range(world_size))
    for clique in cliques:
        assert len({rank // jump for rank in clique}) >= factor
    if world_size >= jump * factor:
        for clique in cliques:
            assert len({rank // jump for rank in clique}) == len(clique)


def test_too_few_nodes_is_an_error() -> None:
    with pytest.raises(PlanError, match=r"3 copies .* nodes of 8 .* makes 2"):
        build_cliques(16, 8, 3, allow_uneven=True)


@pytest.mark.parametrize("numbers", [(0, 1, 1), (4, 0, 2), (4, 1, 0), (4, -1, 2)])
def test_numbers_below_one_are_refused(numbers: tuple[int, int, int]) -> None:
    with pytest.raises(PlanError, match="expected 1 or more"):
        build_cliques(*numbers)
