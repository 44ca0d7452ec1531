"""Sharded values in another layout: what a rank does not hold comes from the memory of others.

The wanted values, their matching with what is held, and how tensors are filled are as in a load of
a global checkpoint.
"""

from __future__ import annotations

import pickle
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
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
from dist_ckpt_strategies.comm.tensor_bytes import TensorBytes
from dist_ckpt_strategies.config import Options
from dist_ckpt_strategies.core.array import ArraySpec, ObjectId, Region, ShardId, ShardSpec
from dist_ckpt_strategies.core.blocks import ArrayFacts, BlockTable, overlaps
from dist_ckpt_strategies.device import torch_dtype
from dist_ckpt_strategies.errors import ArrayNotFoundError, CoverageError, PlanError
from dist_ckpt_strategies.local.plan import least_loaded
from dist_ckpt_strategies.megatron.shards import (
    StateDict,
    mapped_values,
    message_of,
    object_from_message,
    object_id,
    shard_data,
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


@dataclass(frozen=True, slots=True)
class ShardSlice:
    """A part of a shard, from a rank that holds it to one that wants something around it.

    ``region`` is what the held shard, ``source``, and the wanted one, ``target``, share. Sender and
    receiver, within the group, may be the same.
    """

    source: ShardId
    target: ShardId
    region: Region
    sender: int
    receiver: int


def build_reshard_plan(
    held: Sequence[Sequence[ShardSpec]], wanted: Sequence[Sequence[ShardSpec]]
) -> list[ShardSlice]:
    """Cover every wanted shard by parts of held ones, from the rank itself if possible.

    For each rank there is what it holds, replicas are welcome, and what it wants and does not hold
    as it is; array shapes are equal. A shard that is held whole comes from there, else it comes
    from all that it meets.

    Raises:
        CoverageError: no rank holds a part of something that is wanted.
        PlanError: ranks hold an array in different shapes or dtypes.
    """
    holders: defaultdict[ShardId, list[int]] = defaultdict(list)
    arrays: dict[str, ArrayFacts] = {}
    for rank, specs in enumerate(held):
        for spec in specs:
            facts = ArrayFacts(spec.dtype.value, spec.array_shape)
            if arrays.setdefault(spec.key, facts) != facts:
                raise PlanError(f"{spec.key}: ranks hold it as {arrays[spec.key]} and as {facts}")
            holders[spec.id].append(rank)
    wants = [
        (spec, rank)
        for rank, specs in enumerate(wanted)
        for spec in sorted(specs, key=lambda spec: spec.id)
    ]
    load: Counter[int] = Counter()
    slices: list[ShardSlice] = []
    for (spec, rank), sources in zip(wants, _meeting(arrays, holders, wants), strict=True):
        covered = 0
        for source in sources:
            region = source.region.intersect(spec.region)
            if region is not None:
                sender = least_loaded(holders[source], load, rank)
                load[sender] += region.numel * spec.dtype.itemsize * (sender != rank)
                covered += region.numel
                slices.append(ShardSlice(source, spec.id, region, sender, rank))
        if covered != spec.region.numel or spec.key not in arrays:
            raise CoverageError(
                f"{spec.key}: rank {rank} wants {spec.region}, of {spec.region.numel} elements; the"
                f" checkpoint's local shards hold {covered} of them",
                key=spec.key,
            )
    return slices


def _meeting(
    arrays: Mapping[str, ArrayFacts],
    held: Collection[ShardId],
    wants: Sequence[tuple[ShardSpec, int]],
) -> list[list[ShardId]]:
    """For each wanted shard the held ones that it takes: itself, or those that it may meet."""
    blocks, keys = sorted(held), sorted(arrays)
    table = BlockTable.of({key: arrays[key] for key in keys}, blocks, [(0, 0, 0)] * len(blocks))
    sources = [[spec.id] if spec.id in held else [] for spec, _ in wants]
    parts = [n for n, (spec, _) in enumerate(wants) if not sources[n] and spec.key in arrays]
    regions = [wants[n][0].region for n in parts]
    numbers = [bisect_left(keys, wants[n][0].key) for n in parts]
    rows, of_region, *_ = overlaps(table, numbers, regions)
    for row, number in zip(rows.tolist(), of_region.tolist(), strict=True):
        sources[parts[number]].append(blocks[row])
    return sources


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
    begun: list[tuple[dict[Any, Any], list[Message], list[Any]]] = []

    def describe() -> list[Message]:
        held, own = _taken_apart(held_state)
        values = list(sharded_values(wanted))
        begun.append((held, own, [v for v in values if isinstance(v, ShardedTensor)]))
        return [message_of(value) for value in values if _id_of(value) not in held]

    missing = run_and_gather(comm, describe)
    ((held, own, tensors),) = begun
    found = held | _retrieved_objects(comm, held, missing)
    is_any_missing = any(map(tensor_specs, missing))
    everyone = run_and_gather(comm, lambda: own) if is_any_missing else [own]
    shards = list(map(tensor_specs, everyone))
    reads: dict[int, ReadItem] = {}

    def match() -> Message:
        converted, lacking = _match(tensors, shards, held, reads, is_strict=options.strict_dtype)
        if fills:
            require_fillable(tensors)
        return [converted, lacking]

    converted, lacking = zip(*run_and_gather(comm, match), strict=True)
    if any(lacking):
        wishes = list(map(tensor_specs, lacking))
        found |= _retrieved_tensors(comm, held, shards, wishes, options.max_inflight_bytes)

    def give(value: Any) -> Any:
        if isinstance(value, ShardedObject):
            return found[object_id(value)]
        return _given(value, reads[id(value)], found, fills=fills)

    given = run_collectively(comm, lambda: mapped_values(give, wanted))
    warn_of_conversions(comm, name, list(converted))
    return given


def _taken_apart(state: StateDict) -> tuple[dict[Any, Any], list[Message]]:
    """Tensors and objects that a state holds, by id, and messages about the tensors."""
    held: dict[Any, Any] = {}
    messages = []
    for value in sharded_values(state):
        if isinstance(value, ShardedObject):
            held[object_id(value)] = value.data
        elif value.data is not None:
            held[shard_spec(value).id] = shard_data(value)
            messages.append(message_of(value))
    return held, messages


def _match(
    tensors: Sequence[Any],
    shards: Sequence[Sequence[ShardSpec]],
    held: Mapping[Any, Any],
    reads: dict[int, ReadItem],
    *,
    is_strict: bool,
) -> tuple[Conversions, list[Message]]:
    """Note in ``reads`` how each ShardedTensor is filled, by ``id``; conversions, and what lacks.

    ``shards`` is what each rank has, ``held`` what this one has.
    """
    stored = {
        spec.key: ArraySpec(spec.key, spec.array_shape, spec.dtype, spec.array_shape)
        for spec in chain.from_iterable(shards)
    }
    there = [tensor for tensor in tensors if tensor.key in stored]
    items, converted = matched(there, map(shard_spec, there), stored, is_strict=is_strict)
    reads.update(zip(map(id, there), items, strict=True))
    lacking = [message_of(tensor) for tensor in tensors if tensor.key not in stored]
    for array, source in ((read.array, read.source) for read in items):
        if source is not None and (array.key, source) not in held:  # as message_of has it
            where = [array.key, array.shape, source.offset, 0, array.dtype.value]
            lacking.append([*where, source.shape, None, 0, False])
    return converted, lacking


def _given(
    tensor: Any, read: ReadItem, found: Mapping[Any, torch.Tensor], *, fills: bool
) -> torch.Tensor:
    """The result for a ShardedTensor: what was found, zeros where nothing is stored."""
    loaded = None if read.source is None else found[ShardId(tensor.key, read.source)]
    if not (fills or loaded is None or read.is_padded):
        dtype = tensor.dtype if tensor.data is None else tensor.data.dtype
        return loaded.reshape(tuple(tensor.local_shape)).to(dtype)
    target = destination(tensor if fills else tensor.without_data())
    if read.is_padded:
        target.detach().zero_()
    if loaded is not None:
        read.part_of(target, tensor.prepend_axis_num).copy_(loaded)
    return target


def _id_of(value: Any) -> ObjectId | ShardId:
    return object_id(value) if isinstance(value, ShardedObject) else shard_spec(value).id


def tensor_specs(messages: Sequence[Any]) -> list[ShardSpec]:
    """The specs of the ShardedTensors among what ``message_of`` described."""
    return [spec for spec in map(shard_from_message, messages) if spec is not None]


def _retrieved_tensors(
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
        for part in slices:
            key, region = part.target.key, part.region
            if part.sender == comm.rank:
                view = held[part.source][region.within(part.source.region).slices()]
                outgoing.append(Outgoing.of(key, part.receiver, TensorBytes([view])))
            if part.receiver == comm.rank:
                view = found[part.target][region.within(part.target.region).slices()]
                target = TensorBytes([view])
                incoming.append(Incoming.of(key, part.sender, target, comm.device, key))
        return outgoing, incoming

    exchange(comm, prepare, max_inflight_nbytes=max_inflight_nbytes)
    return found


def _retrieved_objects(
    comm: Communicator, held: Mapping[Any, Any], missing: Sequence[Sequence[Any]]
) -> dict[Any, Any]:
    """Objects that some rank lacks, from the first rank that holds them. Collective."""
    wanted = {
        object_from_message(message): comm.global_ranks[rank]
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
                f"{name.unique_key}: rank {wanted[name]} wants this object, which no local shard "
                "of the checkpoint holds",
                key=name.key,
            )
        return found

    return run_collectively(comm, take)
