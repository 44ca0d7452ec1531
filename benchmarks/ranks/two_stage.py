"""What a rank does that wants all of a state, as all others do."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import distributed as dist

from benchmarks.contenders.one_state import Raw
from benchmarks.contenders.replicas import GROUP_MAKERS, Sending
from benchmarks.contenders.roster import READ_SHARES, SEND_SHARES
from benchmarks.measuring.gpt_state import GptSize, Shard, build_shards
from benchmarks.measuring.harness import RankContext, join_gloo
from benchmarks.ranks.one_state import Entrant, Target, Worker


def make_worker(size: GptSize, names: Sequence[str], context: RankContext) -> Worker:
    """One of the ranks that each hold the whole state. Collective."""
    join_gloo(context)
    shards = build_shards(size, 0, 1)
    target = Target({shard.key: shard.tensor for shard in shards})
    entrants = _floors(shards) | {
        name: Entrant(GROUP_MAKERS[name](shards), target) for name in names if name in GROUP_MAKERS
    }
    return Worker(context, sum(shard.tensor.nbytes for shard in shards), entrants)


def _floors(shards: tuple[Shard, ...]) -> dict[str, Entrant]:
    """Read and exchange of the state as one run of bytes, of which each rank has a share.

    Nobody overwrites what a rank sends but the read, with what it has stored itself.
    """
    num_ranks = dist.get_world_size()
    state = torch.cat([shard.tensor.view(-1).view(torch.uint8) for shard in shards])
    shares = [
        Shard(f"share {rank}", 0, rank, num_ranks, part)
        for rank, part in enumerate(state.tensor_split(num_ranks))
    ]
    own = shares[dist.get_rank()]
    others = {share.key: share.tensor for share in shares if share is not own}
    return {
        READ_SHARES: Entrant(Raw((own,), flushes=True), Target({own.key: own.tensor})),
        SEND_SHARES: Entrant(Sending(shares), Target(others)),
    }
