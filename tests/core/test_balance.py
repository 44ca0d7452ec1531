"""Every shard is kept by one that holds it, and all keep about as much."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_ckpt_strategies.core.array import Region, ShardId
from dist_ckpt_strategies.errors import PlanError
from dist_ckpt_strategies.local.plan import build_spread


def shard(number: int) -> ShardId:
    return ShardId(f"w{number}", Region((0,), (4,)))


@given(st.lists(st.sets(st.integers(0, 3), min_size=1), max_size=20))
def test_a_keeper_is_a_holder(held: list[set[int]]) -> None:
    holders = {shard(number): sorted(ranks) for number, ranks in enumerate(held)}
    keepers = build_spread(holders, dict.fromkeys(holders, 8))

    assert keepers.keys() == holders.keys()
    assert all(keepers[one] in holders[one] for one in holders)


def test_a_shard_that_nobody_holds_is_named() -> None:
    with pytest.raises(PlanError, match="w1: no rank holds"):
        build_spread({shard(1): []}, {shard(1): 4})
