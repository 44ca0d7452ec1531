"""Sharded values in another layout: what a rank does not hold comes from the memory of others."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch

from dist_ckpt_strategies.comm.base import (
    Communicator,
    Message,
    run_and_gather,
    run_and_gather_bytes,
    run_collectively,
)
from dist_ckpt_strategies.comm.exchange import Blocks, Incoming, Outgoing, exchange
from dist_ckpt_strategies.config import Options
from dist_ckpt_strategies.core.array import ArraySpec, ObjectId, ShardId, ShardSpec
from dist_ckpt_strategies.device import TensorBytes, require_plain, torch_dtype
from dist_ckpt_strategies.errors import ArrayNotFoundError
from dist_ckpt_strategies.local.plan import ShardSlice, build_reshard_plan
from dist_ckpt_strategies.megatron.shards import (
    StateDict,
    mapped_values,
    message_of,
    object_from_message,
    object_id,
    shard_from_message,
    shard_spec,
    sharded_values,
)
from dist_ckpt_strategies.megatron.types import ShardedObject, ShardedTensor
from dist_ckpt_strategies.sharded.load import (
    Conversions,
    ReadItem,
    destination,
    matched,
    require_fillable,
    warn_of_conversions,
)


def resharded(
    comm: Communicator,
    held_state: StateDict,
    wanted: StateDict,
    options: Options,
    *,
    fills: bool,
    name: object = "a local checkpoint",
) -> StateDict:
    """The wanted ShardedTensors and ShardedObjects replaced by tensors and objects.

    Collective. ``held_state`` is what this rank has; what it lacks comes from the ranks that have
    it. With ``fills`` the data of ShardedTensors is filled, once all ranks know that it can be.
    Warnings call the checkpoint ``name``. Errors are those of
    ``MCoreTensorAwareStateDict.to_state_dict``.
    """
    held: dict[Any, Any] = {}
    own: list[Any] = []

    def describe() -> list[Any]:
        for value in sharded_values(held_state):
            if isinstance(value, ShardedObject):
                held[object_id(value)] = value.data
            elif value.data is not None:
                require_plain(value.data, key=value.key)
                spec = shard_spec(value)
                held[spec.id] = value.data.detach().reshape(spec.region.shape)
                own.append(message_of(value))
        return [message_of(v) for v in sharded_values(wanted) if _id_of(v) not in held]

    missing = run_and_gather(comm, describe)
    found = held | _retrieved_objects(comm, held, missing)
    is_any_missing = any(map(tensor_specs, missing))
    everyone = run_and_gather(comm, lambda: own) if is_any_missing else [own]
    shards = list(map(tensor_specs, everyone))
    reads, converted, lacking = _matched(comm, held, shards, wanted, options, fills=fills)
    if any(lacking):
        found |= _retrieved(comm, held, shards, lacking, options.max_inflight_bytes)

    def give(value: Any) -> Any:
        if isinstance(value, ShardedObject):
            return found[object_id(value)]
        return _given(value, reads[id(value)], found, fills=fills)

    given = run_collectively(comm, lambda: mapped_values(give, wanted))
    warn_of_conversions(comm, name, converted)
    return given


def _given(
    tensor: Any, read: ReadItem, found: Mapping[Any, torch.Tensor], *, fills: bool
) -> torch.Tensor:
    """The result for a ShardedTensor: what was found, zeros where nothing is stored."""
    loaded = None if read.source is None else found[ShardId(tensor.key, read.source)]
    if not (fills or loaded is None or read.is_padded):
        dtype = tensor.dtype if tensor.data is None else tensor.data.dtype
        return loaded.reshape(tuple(tensor.local_shape)).to(dtype)
    target = destination(tensor if fills else tensor.without_data())
    view = target.detach()[(None,) * tensor.prepend_axis_num]
    if read.is_padded:
        view.zero_()
    if loaded is not None:
        view[... if read.target is None else read.target.slices()].copy_(loaded)
    return target


def _id_of(value: Any) -> ObjectId | ShardId:
    return object_id(value) if isinstance(value, ShardedObject) else shard_spec(value).id


def tensor_specs(messages: Sequence[Any]) -> list[ShardSpec]:
    """The specs of the ShardedTensors among what ``message_of`` described."""
    specs = map(shard_from_message, messages)
    return [spec for spec in specs if spec is not None]


def _matched(
    comm: Communicator,
    held: Mapping[Any, Any],
    shards: Sequence[Sequence[ShardSpec]],
    wanted: StateDict,
    options: Options,
    *,
    fills: bool,
) -> tuple[dict[int, ReadItem], list[Conversions], list[list[ShardSpec]]]:
    """How ShardedTensors are filled, by ``id``; what each rank converts, and lacks. Collective.

    ``held`` is what this rank has, ``shards`` what each rank has.
    """
    tensors = [value for value in sharded_values(wanted) if isinstance(value, ShardedTensor)]
    stored = {
        spec.key: ArraySpec(spec.key, spec.array_shape, spec.dtype, spec.array_shape)
        for spec in chain.from_iterable(shards)
    }
    reads: dict[int, ReadItem] = {}

    def match() -> Message:
        there = [tensor for tensor in tensors if tensor.key in stored]
        specs = map(shard_spec, there)
        items, converted = matched(there, specs, stored, is_strict=options.strict_dtype)
        reads.update(zip(map(id, there), items, strict=True))
        if fills:
            require_fillable(tensors)
        lacking = [message_of(tensor) for tensor in tensors if tensor.key not in stored]
        for array, source in ((read.array, read.source) for read in items):
            if source is not None and (array.key, source) not in held:  # as message_of has it
                where = [array.key, array.shape, source.offset, 0, array.dtype.value]
                lacking.append([*where, source.shape, None, 0, False])
        return [converted, lacking]

    converted, lacking = zip(*run_and_gather(comm, match), strict=True)
    return reads, list(converted), list(map(tensor_specs, lacking))


def _retrieved(
    comm: Communicator,
    held: Mapping[Any, Any],
    shards: Sequence[Sequence[ShardSpec]],
    wanted: Sequence[Sequence[ShardSpec]],
    max_inflight_nbytes: int,
) -> dict[Any, torch.Tensor]:
    """The regions that this rank lacks, from the ranks that hold them. Collective.

    ``held`` is what this rank has, ``shards`` what each rank has, ``wanted`` what each lacks.
    """
    found: dict[Any, torch.Tensor] = {}

    def prepare() -> Blocks:
        slices = build_reshard_plan(shards, wanted)
        first = next(iter(shards[comm.rank]), None)
        device = torch.device("cpu") if first is None else held[first.id].device
        for spec in wanted[comm.rank]:
            dtype = torch_dtype(spec.dtype)
            found[spec.id] = torch.empty(spec.region.shape, dtype=dtype, device=device)
        outgoing, incoming = [], []
        for one in slices:
            key = one.target.key
            if one.sender == comm.rank:
                source = TensorBytes([_part(one, one.source, held)])
                outgoing.append(Outgoing.of(key, one.receiver, source))
            if one.receiver == comm.rank:
                target = TensorBytes([_part(one, one.target, found)])
                incoming.append(Incoming.of(key, one.sender, target, comm.device, key))
        return outgoing, incoming

    exchange(comm, prepare, max_inflight_nbytes=max_inflight_nbytes)
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
                f"{name.unique_key}: rank {comm.global_ranks[wanted[name]]} wants this object, "
                "which no local shard of the checkpoint holds",
                key=name.key,
            )
        return found

    return run_collectively(comm, take)


def _part(one: ShardSlice, shard: ShardId, tensors: Mapping[Any, torch.Tensor]) -> torch.Tensor:
    """The elements of a slice, as a view of the tensor of a shard."""
    return tensors[shard].detach()[one.region.within(shard.region).slices()]
