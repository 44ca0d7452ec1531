"""Shards and objects that a rank lacks, from the ranks that hold them."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dist_ckpt_strategies.comm.base import Communicator
from dist_ckpt_strategies.comm.collective import (
    run_and_gather,
    run_and_gather_bytes,
    run_collectively,
)
from dist_ckpt_strategies.comm.exchange import Blocks, Incoming, Outgoing, exchange
from dist_ckpt_strategies.config import options_from_environment
from dist_ckpt_strategies.core.array import ObjectId, ShardId, ShardSpec
from dist_ckpt_strategies.device import TensorBytes, torch_dtype
from dist_ckpt_strategies.errors import ArrayNotFoundError
from dist_ckpt_strategies.local.plan import ShardSlice, build_reshard_plan
from dist_ckpt_strategies.megatron.shards import (
    StateDict,
    message_of,
    object_from_message,
    shard_from_message,
    sharded_values,
    value_from_message,
)


def stored_keys(comm: Communicator, sharded: StateDict) -> StateDict:
    """A sharded value, without data, for every key that some rank holds. Collective."""

    def describe() -> list[Any]:
        first = {value.key: value for value in reversed(list(sharded_values(sharded)))}
        return [message_of(value) for value in first.values()]

    everyone = run_and_gather(comm, describe)
    found = (value_from_message(one) for messages in everyone for one in messages)
    return {value.key: value for value in found}


def tensor_specs(messages: Sequence[Any]) -> list[ShardSpec]:
    """The specs of the ShardedTensors among what ``message_of`` described."""
    specs = map(shard_from_message, messages)
    return [spec for spec in specs if spec is not None]


def retrieved_objects(
    comm: Communicator, held: Mapping[Any, Any], missing: Sequence[Sequence[Any]]
) -> dict[ObjectId, Any]:
    """Objects that some rank wants and does not hold, from the first rank that does. Collective.

    ``held`` is what this rank has; ``missing``, what each rank lacks, as ``message_of`` describes
    it. Where no rank holds one of them it is an ArrayNotFoundError.
    """
    wanted = {
        object_from_message(message): rank
        for rank, messages in reversed(list(enumerate(missing)))
        for message in messages
        if shard_from_message(message) is None
    }
    if not wanted:
        return {}
    names = sorted(wanted)
    contents = run_and_gather_bytes(
        comm, lambda: pickle.dumps({name: held[name] for name in names if name in held})
    )

    def take() -> dict[ObjectId, Any]:
        found: dict[ObjectId, Any] = {}
        for content in contents:
            held = pickle.loads(content)  # noqa: S301 - of a rank of this job
            found = {**held, **found}
        for name in names:
            if name not in found:
                raise ArrayNotFoundError(
                    f"{name.unique_key}: rank {comm.global_rank(wanted[name])} wants this object, "
                    "which no local shard of the checkpoint holds",
                    key=name.key,
                )
        return found

    return run_collectively(comm, take)


def retrieved_shards(
    comm: Communicator,
    held: Mapping[Any, Any],
    own: Sequence[Any],
    missing: Sequence[Sequence[Any]],
) -> dict[ShardId, torch.Tensor]:
    """What this rank lacks, from the ranks that hold it. Collective.

    Of ``held``, what this rank has, ``own`` are the tensors. They, and what each rank lacks, are as
    ``message_of`` describes them.
    """
    wanted = list(map(tensor_specs, missing))
    if not any(wanted):
        return {}
    everyone = run_and_gather(comm, lambda: [options_from_environment().max_inflight_bytes, own])
    targets: dict[ShardId, torch.Tensor] = {}

    def prepare() -> Blocks:
        found = [tensor_specs(messages) for _, messages in everyone]
        slices = build_reshard_plan(found, wanted)
        dtypes = {spec.key: spec.dtype for specs in found for spec in specs}
        first = next(iter(found[comm.rank]), None)
        device = torch.device("cpu") if first is None else held[first.id].device
        for spec in wanted[comm.rank]:
            dtype = torch_dtype(dtypes[spec.key])
            targets[spec.id] = torch.empty(spec.region.shape, dtype=dtype, device=device)
        outgoing, incoming = [], []
        for one in slices:
            if one.sender == comm.rank:
                part = TensorBytes([_part(one, one.source, held)])
                outgoing.append(Outgoing(one.target.key, one.receiver, part.nbytes, part.read))
            if one.receiver == comm.rank:
                incoming.append(_incoming(one, targets))
        return outgoing, incoming

    exchange(comm, prepare, max_inflight_nbytes=min(bound for bound, _ in everyone))
    return targets


def _incoming(one: ShardSlice, targets: Mapping[ShardId, torch.Tensor]) -> Incoming:
    target = TensorBytes([_part(one, one.target, targets)])

    def take(start: int, content: torch.Tensor) -> None:
        target.write(start, content)
        if start + content.numel() == target.nbytes:
            target.write_back()

    return Incoming(one.target.key, one.sender, target.nbytes, take, key=one.target.key)


def _part(one: ShardSlice, shard: ShardId, tensors: Mapping[ShardId, torch.Tensor]) -> torch.Tensor:
    """The elements of a slice, as a view of the tensor of a shard."""
    return tensors[shard].detach()[one.region.within(shard.region).slices()]
