"""The main rank of a shard is one that holds it, and all are main ranks of about as much."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_ckpt_strategies.core.array import Region, ShardId
from dist_ckpt_strategies.errors import PlanError
from dist_ckpt_strategies.local.plan import build_distribution


def shard(number: int) -> ShardId:
    return ShardId(f"w{number}", Region((0,), (4,)))


@given(st.lists(st.sets(st.integers(0, 3), min_size=1), max_size=20))
def test_a_main_rank_is_a_holder(held: list[set[int]]) -> None:
    holders = {shard(number): sorted(ranks) for number, ranks in enumerate(held)}
    main_ranks = build_distribution(holders, dict.fromkeys(holders, 8))

    assert main_ranks.keys() == holders.keys()
    assert all(main_ranks[one] in holders[one] for one in holders)


def test_a_shard_that_nobody_holds_is_named() -> None:
    with pytest.raises(PlanError, match="w1: no rank holds"):
        build_distribution({shard(1): []}, {shard(1): 4})
