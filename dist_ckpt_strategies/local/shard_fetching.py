"""Shards and objects that a rank lacks, from the ranks that hold them."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from dist_ckpt_strategies.comm.agree import agree, agree_and_gather, agree_and_gather_bytes
from dist_ckpt_strategies.comm.base import Bytes, Communicator, Receive, Send
from dist_ckpt_strategies.config import options_from_environment
from dist_ckpt_strategies.core.array import (
    ObjectId,
    ShardId,
    ShardSpec,
    shard_from_wire,
    shard_to_wire,
)
from dist_ckpt_strategies.device import as_bytes, to_host, torch_dtype
from dist_ckpt_strategies.errors import ArrayNotFoundError
from dist_ckpt_strategies.local.plan_reshard import Piece, ReshardPlan, build_reshard_plan
from dist_ckpt_strategies.megatron.shards import (
    StateDict,
    message_of,
    object_id,
    shard_spec,
    sharded_values,
    value_from_message,
)
from dist_ckpt_strategies.megatron.types import ShardedObject, ShardedTensor

_Shards = Mapping[ShardId, torch.Tensor]
"""Tensors by shard, each shaped like its region."""


def tensors_at_hand(sharded: StateDict) -> dict[ShardSpec, torch.Tensor]:
    """Tensors at hand, each shaped like its region."""
    found: dict[ShardSpec, torch.Tensor] = {}
    for value in sharded_values(sharded):
        if isinstance(value, ShardedTensor) and value.data is not None:
            spec = shard_spec(value)
            found[spec] = value.data.detach().reshape(spec.region.shape)
    return found


def objects_at_hand(sharded: StateDict) -> dict[ObjectId, Any]:
    """What the ShardedObjects hold."""
    return {
        object_id(value): value.data
        for value in sharded_values(sharded)
        if isinstance(value, ShardedObject)
    }


def stored_keys(comm: Communicator, sharded: StateDict) -> StateDict:
    """A sharded value, without data, for every key that the parts of all ranks hold. Collective."""

    def describe() -> list[Any]:
        first = {value.key: value for value in reversed(list(sharded_values(sharded)))}
        return [message_of(value) for value in first.values()]

    everyone = agree_and_gather(comm, describe)
    found = (value_from_message(wire) for wires in everyone for wire in wires)
    return {value.key: value for value in found}


def fetched_objects(
    comm: Communicator,
    objects: Mapping[ObjectId, Any],
    lost: Sequence[Sequence[Any]],
) -> dict[ObjectId, Any]:
    """Objects that some rank wants and does not hold, from the first rank that does. Collective.

    Raises:
        ArrayNotFoundError: nobody holds one of them.
    """
    wanted = {
        ObjectId(key, tuple(offset), tuple(shape)): rank
        for rank, names in reversed(list(enumerate(lost)))
        for key, offset, shape in names
    }
    if not wanted:
        return {}
    names = sorted(wanted)
    holding = agree_and_gather(comm, lambda: [n for n, name in enumerate(names) if name in objects])

    def senders() -> dict[ObjectId, int]:
        able = _first_holders(holding)
        found = {}
        for number, name in enumerate(names):
            if number not in able:
                raise ArrayNotFoundError(
                    f"{name.unique_key}: rank {comm.global_rank(wanted[name])} wants this object, "
                    "which no part of the checkpoint holds",
                    key=name.key,
                )
            found[name] = able[number]
        return found

    planned = agree(comm, senders)
    mine = [name for name, rank in planned.items() if rank == comm.rank]
    contents = agree_and_gather_bytes(comm, lambda: pickle.dumps([objects[name] for name in mine]))

    def take() -> dict[ObjectId, Any]:
        found: dict[ObjectId, Any] = {}
        for rank, content in enumerate(contents):
            sent = [name for name, sender in planned.items() if sender == rank]
            held = pickle.loads(content)  # noqa: S301 - of a rank of this job
            found.update(zip(sent, held, strict=True))
        return found

    return agree(comm, take)


def _first_holders(holding: Sequence[Sequence[int]]) -> dict[int, int]:
    """The first rank that holds each object, by the objects' numbers."""
    found: dict[int, int] = {}
    for rank, held in enumerate(holding):
        for number in held:
            found.setdefault(number, rank)
    return found


def fetched_shards(
    comm: Communicator,
    held: Mapping[ShardSpec, torch.Tensor],
    missing: Sequence[Sequence[Any]],
) -> dict[ShardId, torch.Tensor]:
    """What this rank lacks, from the ranks that hold it. Collective.

    Args:
        comm: all ranks.
        held: what this rank has.
        missing: what each rank lacks, as ``shard_to_wire`` describes it.
    """

    def describe() -> list[Any]:
        bound = options_from_environment().max_inflight_bytes
        return [bound, [shard_to_wire(spec) for spec in held]]

    everyone = agree_and_gather(comm, describe)

    def prepare() -> tuple[ReshardPlan, dict[ShardId, torch.Tensor]]:
        bound = min(bound for bound, _ in everyone)
        found = [list(map(shard_from_wire, wires)) for _, wires in everyone]
        wanted = [list(map(shard_from_wire, wires)) for wires in missing]
        plan = build_reshard_plan(found, wanted, max_inflight_bytes=bound)
        device = next((tensor.device for tensor in held.values()), torch.device("cpu"))
        return plan, {
            spec.id: torch.empty(
                spec.region.shape, dtype=torch_dtype(plan.dtypes[spec.key]), device=device
            )
            for spec in wanted[comm.rank]
        }

    plan, targets = agree(comm, prepare)
    _run_reshard(plan, {spec.id: tensor for spec, tensor in held.items()}, targets, comm)
    return targets


def _run_reshard(plan: ReshardPlan, held: _Shards, targets: _Shards, comm: Communicator) -> None:
    """Fill every target from what the ranks hold. Collective, with an equal plan."""

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


def _fill(incoming: Sequence[Piece], buffers: Sequence[Bytes], targets: _Shards) -> None:
    """Put what has arrived in its places."""
    for piece, buffer in zip(incoming, buffers, strict=True):
        elements = torch.from_numpy(buffer).view(torch_dtype(piece.dtype))
        _part(piece, piece.target, targets).copy_(elements.reshape(piece.region.shape))


def _part(piece: Piece, shard: ShardId, tensors: _Shards) -> torch.Tensor:
    """The piece's elements, as a view of the tensor of a shard."""
    return tensors[shard].detach()[piece.region.within(shard.region).slices()]
