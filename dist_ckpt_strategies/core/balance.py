"""Assign items to ranks, so that all ranks get about as many bytes: LPT, after Graham 1969."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping, Sequence

from dist_ckpt_strategies.core.array import ShardId
from dist_ckpt_strategies.errors import PlanError


def build_spread(
    holders: Mapping[ShardId, Sequence[int]], nbytes: Mapping[ShardId, int]
) -> dict[ShardId, int]:
    """The rank that keeps each shard, one of its holders.

    Shards with few holders come first, since they leave the least choice, then the largest; each
    goes to the holder that has the least so far.

    Args:
        holders: for each shard the ranks that hold it.
        nbytes: size of each shard, in bytes.

    Raises:
        PlanError: no rank holds a shard.
    """
    load: Counter[int] = Counter()
    keepers: dict[ShardId, int] = {}
    for shard in sorted(holders, key=lambda s: (len(holders[s]), -nbytes[s], s)):
        if not holders[shard]:
            raise PlanError(f"{shard.key}: no rank holds {shard.region}", key=shard.key)
        keepers[shard] = min(holders[shard], key=lambda rank: (load[rank], rank))
        load[keepers[shard]] += nbytes[shard]
    return keepers


def assign_lpt(nbytes: Sequence[int], num_ranks: int) -> list[int]:
    """The rank that takes each item: the largest first, each to the rank that has the least."""
    loads = [(0, rank) for rank in range(num_ranks)]
    owners = [0] * len(nbytes)
    for item in sorted(range(len(nbytes)), key=lambda number: (-nbytes[number], number)):
        load, owners[item] = loads[0]
        heapq.heapreplace(loads, (load + nbytes[item], owners[item]))
    return owners
