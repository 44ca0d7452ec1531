"""What a rank does while bytes, arrays or ranks grow: it saves and loads arrays of equal size."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from benchmarks.contenders.one_state import MAKERS
from benchmarks.measuring.gpt_state import Shard
from benchmarks.measuring.harness import RankContext, join_gloo
from benchmarks.ranks.one_state import Entrant, Target, Worker
from benchmarks.scaling import Extent

_NUM_COLUMNS = 256
_ITEMSIZE = 4


def build_equal_shards(extent: Extent, part: int) -> tuple[Shard, ...]:
    """One part of every array, with values of its own, the same in every process."""
    generator = torch.Generator().manual_seed(part)
    wanted = extent.nbytes / (extent.num_arrays * extent.num_ranks * _NUM_COLUMNS * _ITEMSIZE)
    shape = (max(1, round(wanted)), _NUM_COLUMNS)
    return tuple(
        Shard(
            f"layers.{number}.weight",
            0,
            part,
            extent.num_ranks,
            torch.empty(shape).normal_(generator=generator),
        )
        for number in range(extent.num_arrays)
    )


def build_scaling_worker(extent: Extent, names: Sequence[str], context: RankContext) -> Worker:
    """One of the ranks that hold the arrays in equal parts. Collective."""
    join_gloo(context)
    torch.set_num_threads(1)
    shards = build_equal_shards(extent, context.global_rank)
    target = Target({shard.key: shard.tensor for shard in shards})
    entrants = {name: Entrant(MAKERS[name](shards), target) for name in names}
    return Worker(context, sum(shard.tensor.nbytes for shard in shards), entrants)
