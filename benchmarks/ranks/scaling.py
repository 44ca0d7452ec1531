"""What a rank does while bytes, arrays or ranks grow: it saves and loads arrays of equal size."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.contenders.one_state import MAKERS
from benchmarks.measuring.equal_arrays import Extent, build_equal_shards
from benchmarks.measuring.harness import RankContext, join_gloo
from benchmarks.ranks.one_state import Worker


def make_worker(extent: Extent, names: Sequence[str], context: RankContext) -> Worker:
    """One of the ranks that hold the arrays in equal parts. Collective."""
    join_gloo(context)
    shards = build_equal_shards(extent, context.global_rank)
    return Worker.over(context, shards, lambda name: MAKERS[name](shards), names)
