"""Carry out a ReshardPlan: fill tensors from shards that other ranks hold in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import torch

from dist_ckpt_strategies.comm.agree import agree
from dist_ckpt_strategies.comm.base import Bytes, Communicator, Receive, Send
from dist_ckpt_strategies.core.array import ShardId
from dist_ckpt_strategies.device import as_bytes, to_host, torch_dtype
from dist_ckpt_strategies.local.plan_reshard import Piece, ReshardPlan

Shards = Mapping[ShardId, torch.Tensor]
"""Tensors by shard, each shaped like its region."""


def run_reshard(plan: ReshardPlan, held: Shards, targets: Shards, comm: Communicator) -> None:
    """Fill every target.

    Collective: every rank of ``comm`` calls this with an equal plan. Two meetings and an exchange
    for each round, and one meeting more.

    Args:
        plan: what moves where.
        held: what this rank holds; left as it is.
        targets: what this rank wants; overwritten.
        comm: the group that the plan was made for.
    """

    def copy_local() -> None:
        for piece in plan.local:
            if piece.receiver == comm.rank:
                _part(piece, piece.target, targets).copy_(_part(piece, piece.source, held))

    agree(comm, copy_local)
    for round_ in plan.rounds:
        outgoing = [piece for piece in round_ if piece.sender == comm.rank]
        incoming = [piece for piece in round_ if piece.receiver == comm.rank]

        def prepare(
            outgoing: list[Piece] = outgoing, incoming: list[Piece] = incoming
        ) -> tuple[list[Bytes], list[Bytes]]:
            sources = [_part(piece, piece.source, held).contiguous() for piece in outgoing]
            contents = to_host([as_bytes(source) for source in sources])
            return contents, [np.empty(piece.nbytes, np.uint8) for piece in incoming]

        contents, buffers = agree(comm, prepare)
        comm.exchange(
            [Send(p.receiver, content) for p, content in zip(outgoing, contents, strict=True)],
            [Receive(p.sender, buffer) for p, buffer in zip(incoming, buffers, strict=True)],
        )
        agree(comm, partial(_fill, incoming, buffers, targets))


def _fill(incoming: Sequence[Piece], buffers: Sequence[Bytes], targets: Shards) -> None:
    """Put what has arrived in its places."""
    for piece, buffer in zip(incoming, buffers, strict=True):
        elements = torch.from_numpy(buffer).view(torch_dtype(piece.dtype))
        _part(piece, piece.target, targets).copy_(elements.reshape(piece.region.shape))


def _part(piece: Piece, shard: ShardId, tensors: Shards) -> torch.Tensor:
    """The piece's elements, as a view of the tensor of a shard."""
    return tensors[shard].detach()[piece.region.within(shard.region).slices()]
