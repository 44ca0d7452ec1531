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
from dist_ckpt_strategies.core.array import ShardId, ShardSpec
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
    found = (value_from_message(wire) for wires in everyone for wire in wires)
    return {value.key: value for value in found}


def tensor_specs(messages: Sequence[Any]) -> list[ShardSpec]:
    """The specs of the ShardedTensors among what ``message_of`` described."""
    specs = map(shard_from_message, messages)
    return [spec for spec in specs if spec is not None]


def retrieved(
    comm: Communicator,
    held: Mapping[Any, Any],
    own: Sequence[Any],
    missing: Sequence[Sequence[Any]],
) -> dict[Any, Any]:
    """What this rank lacks, tensors and objects, from the ranks that hold it. Collective.

    Of ``held``, what this rank has, ``own`` are the tensors. They, and what each rank lacks, are as
    ``message_of`` describes them. Where no rank holds an object it is an ArrayNotFoundError.
    """
    found = _retrieved_objects(comm, held, missing)
    wanted = list(map(tensor_specs, missing))
    if not any(wanted):
        return found
    everyone = run_and_gather(comm, lambda: [options_from_environment().max_inflight_bytes, own])

    def prepare() -> Blocks:
        shards = [tensor_specs(messages) for _, messages in everyone]
        slices = build_reshard_plan(shards, wanted)
        dtypes = {spec.key: spec.dtype for specs in shards for spec in specs}
        first = next(iter(shards[comm.rank]), None)
        device = torch.device("cpu") if first is None else held[first.id].device
        for spec in wanted[comm.rank]:
            dtype = torch_dtype(dtypes[spec.key])
            found[spec.id] = torch.empty(spec.region.shape, dtype=dtype, device=device)
        outgoing, incoming = [], []
        for one in slices:
            if one.sender == comm.rank:
                sent = TensorBytes([_part(one, one.source, held)])
                outgoing.append(Outgoing(one.target.key, one.receiver, sent.nbytes, sent.read))
            if one.receiver == comm.rank:
                incoming.append(_incoming(one, found))
        return outgoing, incoming

    exchange(comm, prepare, max_inflight_nbytes=min(bound for bound, _ in everyone))
    return found


def _retrieved_objects(
    comm: Communicator, held: Mapping[Any, Any], missing: Sequence[Sequence[Any]]
) -> dict[Any, Any]:
    """Objects that some rank lacks, from the first rank that holds them. Collective."""
    wanted = {
        object_from_message(message): rank
        for rank, messages in reversed(list(enumerate(missing)))
        for message in messages
        if shard_from_message(message) is None
    }
    if not wanted:
        return {}
    contents = run_and_gather_bytes(
        comm, lambda: pickle.dumps({name: held[name] for name in wanted if name in held})
    )

    def take() -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        for content in reversed(contents):
            found.update(pickle.loads(content))  # noqa: S301 - of a rank of this job
        for name in sorted(wanted.keys() - found.keys()):
            raise ArrayNotFoundError(
                f"{name.unique_key}: rank {comm.global_rank(wanted[name])} wants this object, "
                "which no part of the checkpoint holds",
                key=name.key,
            )
        return found

    return run_collectively(comm, take)


def _incoming(one: ShardSlice, targets: Mapping[Any, torch.Tensor]) -> Incoming:
    target = TensorBytes([_part(one, one.target, targets)])

    def take(start: int, content: torch.Tensor) -> None:
        target.write(start, content)
        if start + content.numel() == target.nbytes:
            target.write_back()

    return Incoming(one.target.key, one.sender, target.nbytes, take, key=one.target.key)


def _part(one: ShardSlice, shard: ShardId, tensors: Mapping[Any, torch.Tensor]) -> torch.Tensor:
    """The elements of a slice, as a view of the tensor of a shard."""
    return tensors[shard].detach()[one.region.within(shard.region).slices()]
