"""What a group of ranks reads: a checkpoint of this package's, or what any strategy loads."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dist_ckpt_strategies.config import Options
from dist_ckpt_strategies.core.array import ArraySpec, ObjectId, Region
from dist_ckpt_strategies.device import to_host
from dist_ckpt_strategies.errors import PlanError
from dist_ckpt_strategies.formats.checkpoints import StoredCheckpoint
from dist_ckpt_strategies.formats.locations import OpenedSave
from dist_ckpt_strategies.formats.objects import dump_object, object_path
from dist_ckpt_strategies.megatron.shards import (
    StateDict,
    message_of,
    object_id,
    shard_spec,
    value_from_message,
)
from dist_ckpt_strategies.sharded.load import Conversions, destination, matched
from dist_ckpt_strategies.storage.io_pool import OPENING, Deadline, Transfer, run_within
from dist_ckpt_strategies.storage.store import ArrayRead, ArrayReader, HostArray
from dist_ckpt_strategies.two_stage.broadcast import READING, Target
from dist_ckpt_strategies.two_stage.plan import GroupPlan


@dataclass(frozen=True, slots=True)
class Matched:
    """How the ShardedTensors of one rank are filled.

    Attributes:
        results: what stands for each.
        targets: what is filled from storage.
        padding: what is filled with zeros.
        converted: arrays that are stored in another dtype than the one wanted.
    """

    results: Sequence[torch.Tensor]
    targets: Sequence[Target]
    padding: Sequence[torch.Tensor]
    converted: Conversions


@dataclass(frozen=True, slots=True)
class OwnSource:
    """A checkpoint that is read by this package: arrays are its arrays, read in any parts.

    Attributes:
        checkpoint: that is read.
        destination_of: the tensor to fill for a ShardedTensor.
        options: timeouts and memory bounds.
    """

    checkpoint: StoredCheckpoint
    destination_of: Callable[[Any], torch.Tensor]
    options: Options

    @property
    def save(self) -> Any:
        """See OpenedSave."""
        return self.checkpoint.save

    @property
    def identity(self) -> str:
        """Tells the checkpoint from others."""
        return self.checkpoint.identity

    def name(self, tensor: Any) -> str:
        """What a ShardedTensor is a part of, or all of."""
        return str(tensor.key)

    def find(self, names: Sequence[str]) -> list[ArraySpec]:
        """The arrays of these names. Rank-local."""
        deadline, checkpoint = Deadline.after(OPENING * self.options.timeout_s), self.checkpoint
        arrays = run_within(deadline, self.save.root, lambda: checkpoint.find(names))
        return [arrays[name] for name in names]

    def match(self, tensors: Sequence[Any], numbers: Sequence[int], arrays: Any) -> Matched:
        """How ShardedTensors are filled from arrays, each by its number. Rank-local.

        Raises:
            ShapeMismatchError, DTypeMismatchError: one cannot be.
        """
        stored = {arrays[number].key: arrays[number] for number in numbers}
        is_strict, specs = self.options.strict_dtype, map(shard_spec, tensors)
        reads, converted = matched(tensors, specs, stored, is_strict=is_strict)
        results = [self.destination_of(tensor) for tensor in tensors]
        targets, padding = [], []
        for number, read, tensor, result in zip(numbers, reads, tensors, results, strict=True):
            if read.source is not None:
                view = _in_array_dims(result, tensor)
                if read.target is not None:
                    view = view[read.target.slices()]
                targets.append(Target(number, read.source, view))
            if read.is_padded:
                padding.append(result.detach())
        return Matched(results, targets, padding, converted)

    def opened(self, load: GroupLoad) -> Opened:  # noqa: ARG002 - a protocol
        """What reads. Rank-local."""
        limit_s, checkpoint = READING * self.options.timeout_s, self.checkpoint

        def content(unique_key: str) -> bytes:
            name = ObjectId.parse(unique_key)
            assert name is not None  # noqa: S101 - made from an ObjectId on another rank
            read = lambda: checkpoint.object_content(name)  # noqa: E731
            return run_within(Deadline.after(limit_s), unique_key, read)

        def path(name: ObjectId) -> str:
            look = lambda: checkpoint.object_path(name)  # noqa: E731
            return run_within(Deadline.after(limit_s), name.unique_key, look)

        return Opened(checkpoint, content, path)


@dataclass(frozen=True, slots=True)
class StrategySource:
    """A checkpoint that any strategy loads, called once with all shards that this rank reads.

    Each distinct shard counts as an array of its own, which is read whole.

    Attributes:
        strategy: that loads.
        save: that is loaded.
        identity: tells the checkpoint from others.
    """

    strategy: Any
    save: OpenedSave
    identity: str

    def name(self, tensor: Any) -> str:
        """What describes the shard; replicas have the same."""
        shard_spec(tensor)  # raises if it is invalid
        message = message_of(tensor)
        message[3] = 0  # the replica
        return json.dumps(message)

    def find(self, names: Sequence[str]) -> list[ArraySpec]:
        """See OwnSource."""
        arrays = []
        for name in names:
            spec = shard_spec(value_from_message(json.loads(name)))
            shape = spec.region.shape
            chunk = tuple(max(1, size) for size in shape)
            arrays.append(ArraySpec(name, shape, spec.dtype, chunk, is_raw=False))
        return arrays

    def match(self, tensors: Sequence[Any], numbers: Sequence[int], arrays: Any) -> Matched:
        """See OwnSource. The strategy converts by itself."""
        results = [destination(tensor) for tensor in tensors]
        targets = [
            Target(number, Region.whole(arrays[number].shape), _in_array_dims(result, tensor))
            for number, tensor, result in zip(numbers, tensors, results, strict=True)
            if result.numel()
        ]
        return Matched(results, targets, (), [])

    def opened(self, load: GroupLoad) -> Opened:
        """What the strategy has loaded. Collective over the world."""
        root, plan, arrays = self.save.root, load.plan, load.arrays
        assert isinstance(root, Path)  # noqa: S101 - these strategies have no URLs
        batches = chain.from_iterable(plan.rounds)
        numbers = {s.array for b in batches if b.reader == load.rank for s in b.slices}
        targets = load.matched.targets
        numbers |= {t.array for t in targets if (t.array, t.region) not in plan.shared}
        requested = {self.name(tensor): tensor for tensor in load.tensors}
        # torch_dist changes the ShardedTensors that it is given, and loses empty nested dicts.
        own: StateDict = {n: copy.copy(requested[arrays[n].key]) for n in sorted(numbers)}
        objects = {object_id(value).unique_key: value for value in load.objects}
        own |= {key: objects[key] for key in load.objects_read()}
        loaded = self.strategy.load(own, root)
        memory = {arrays[n].key: _in_memory(arrays[n], loaded[n]) for n in sorted(numbers)}
        return Opened(
            _MemoryReader(memory),
            lambda key: dump_object(loaded[key], name=key),
            lambda name: str(object_path(root, name)),
        )


@dataclass(frozen=True, slots=True)
class Opened:
    """What reads arrays, the content of an object by its unique key, and where an object is."""

    reader: ArrayReader
    object_content: Callable[[str], bytes]
    object_path: Callable[[ObjectId], str]


Source = OwnSource | StrategySource


@dataclass(frozen=True, slots=True)
class GroupLoad:
    """What one rank of a group loads.

    Attributes:
        source: what is read.
        state: what is wanted.
        rank: this rank, in the group.
        tensors: the ShardedTensors of the state.
        objects: the ShardedObjects of the state.
        requesters: which ranks request each object, by its unique key.
        arrays: that ``plan`` and ``matched`` number.
        matched: how the tensors are filled.
        plan: of the group.
    """

    source: Source
    state: StateDict
    rank: int
    tensors: Sequence[Any]
    objects: Sequence[Any]
    requesters: Mapping[str, Sequence[int]]
    arrays: Sequence[ArraySpec]
    matched: Matched
    plan: GroupPlan

    def objects_read(self) -> list[str]:
        """The unique keys of the objects that this rank reads, sorted: requesters take turns."""
        requesters = enumerate(self.requesters.items())
        return [key for n, (key, ranks) in requesters if ranks[n % len(ranks)] == self.rank]


def _in_memory(array: ArraySpec, tensor: torch.Tensor) -> HostArray:
    """What a strategy has loaded for an array, on the host, as the array's type."""
    if tensor.numel() != math.prod(array.shape):
        key = json.loads(array.key)[0]
        raise PlanError(
            f"{key}: shape {tuple(tensor.shape)} loaded, {array.shape} expected", key=key
        )
    return to_host([tensor.to(getattr(torch, array.dtype.value)).reshape(array.shape)])[0]


class _MemoryReader:
    """An ArrayReader of arrays in memory, which are read whole."""

    def __init__(self, arrays: Mapping[str, HostArray]) -> None:
        self._arrays = arrays

    def begin_reads(self, reads: Iterable[ArrayRead]) -> Transfer:
        """See ArrayReader. An array that was loaded into the target's memory is not copied."""
        for read in reads:
            source = self._arrays[read.array.key]
            if source.ctypes.data != read.target.ctypes.data:
                np.copyto(read.target, source)
        return Transfer((), 0)


def _in_array_dims(result: torch.Tensor, tensor: Any) -> torch.Tensor:
    """The tensor with the dims that a ShardedTensor prepends."""
    return result.detach()[(None,) * tensor.prepend_axis_num]
