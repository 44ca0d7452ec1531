"""Sources of a group load: checkpoints of this package, or any strategy."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dist_ckpt_strategies.config import Options
from dist_ckpt_strategies.core.array import ArraySpec, ObjectId, Region
from dist_ckpt_strategies.device import to_host
from dist_ckpt_strategies.errors import PlanError
from dist_ckpt_strategies.formats.checkpoints import StoredCheckpoint
from dist_ckpt_strategies.formats.objects import dump_object
from dist_ckpt_strategies.formats.pack_checkpoint import OpenedSave
from dist_ckpt_strategies.formats.zarr2 import object_path
from dist_ckpt_strategies.megatron.shards import message_of, shard_spec, value_from_message
from dist_ckpt_strategies.sharded.load import Conversions, destination, matched
from dist_ckpt_strategies.storage.io_pool import OPENING, Deadline, Transfer, run_within
from dist_ckpt_strategies.storage.store import ArrayRead, HostArray
from dist_ckpt_strategies.two_stage.broadcast import Target


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
        """The name of the array that a ShardedTensor is a part of."""
        return str(tensor.key)

    def find(self, names: Sequence[str]) -> list[ArraySpec]:
        """The arrays of these names. Rank-local."""
        deadline, checkpoint = Deadline.after(OPENING * self.options.timeout_s), self.checkpoint
        arrays = run_within(deadline, self.save.root, lambda: checkpoint.find(names))
        return [arrays[name] for name in names]

    def match(self, tensors: Sequence[Any], arrays: Sequence[ArraySpec]) -> Matched:
        """How ShardedTensors are filled from arrays. Rank-local.

        Raises:
            PlanError: one cannot be.
        """
        numbers = {array.key: number for number, array in enumerate(arrays)}
        stored = {tensor.key: arrays[numbers[tensor.key]] for tensor in tensors}
        is_strict, specs = self.options.strict_dtype, map(shard_spec, tensors)
        reads, converted = matched(tensors, specs, stored, is_strict=is_strict)
        results = [self.destination_of(tensor) for tensor in tensors]
        targets, padding = [], []
        for read, tensor, result in zip(reads, tensors, results, strict=True):
            if read.source is not None:
                part = read.part_of(result, tensor.prepend_axis_num)
                targets.append((numbers[tensor.key], read.source, part))
            if read.is_padded:
                padding.append(result.detach())
        return Matched(results, targets, padding, converted)

    def opened(self, tensors: Mapping[str, Any], objects: Mapping[str, Any]) -> StoredCheckpoint:  # noqa: ARG002
        """See StrategySource."""
        return self.checkpoint


@dataclass(frozen=True, slots=True)
class StrategySource:
    """A checkpoint that any strategy loads, called once with all shards that this rank reads.

    Each distinct shard counts as an array of its own, which is read whole. ``arrays`` and
    ``objects`` are those that this rank reads, once it is ``opened``.
    """

    strategy: Any
    save: OpenedSave
    identity: str
    arrays: Mapping[str, HostArray] = field(default_factory=dict)
    objects: Mapping[str, Any] = field(default_factory=dict)

    def name(self, tensor: Any) -> str:
        """A name for the shard, equal for replicas."""
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

    def match(self, tensors: Sequence[Any], arrays: Sequence[ArraySpec]) -> Matched:
        """See OwnSource. The strategy converts by itself."""
        results = [destination(tensor) for tensor in tensors]
        numbers = {array.key: number for number, array in enumerate(arrays)}
        targets = []
        for tensor, result in zip(tensors, results, strict=True):
            if result.numel():
                number = numbers[self.name(tensor)]
                whole = Region.whole(arrays[number].shape)
                targets.append((number, whole, result.detach()[(None,) * tensor.prepend_axis_num]))
        return Matched(results, targets, (), [])

    def opened(self, tensors: Mapping[str, Any], objects: Mapping[str, Any]) -> StrategySource:
        """This, with what this rank reads: ShardedTensors by name, ShardedObjects by unique key.

        Collective over the world, for the strategy is called.
        """
        # torch_dist changes the ShardedTensors that it is given, and loses empty nested dicts.
        wanted = {name: copy.copy(tensor) for name, tensor in tensors.items()}
        loaded = self.strategy.load({**wanted, **objects}, self.save.root)
        arrays = {a.key: _in_memory(a, loaded[a.key]) for a in self.find(list(tensors))}
        return replace(self, arrays=arrays, objects={key: loaded[key] for key in objects})

    def begin_reads(self, reads: Iterable[ArrayRead]) -> Transfer:
        """Copy whole arrays, but those that lie in the target's memory already."""
        for read in reads:
            source = self.arrays[read.array.key]
            if source.ctypes.data != read.target.ctypes.data:
                np.copyto(read.target, source)
        return Transfer((), 0)

    def object_path(self, name: ObjectId) -> str:
        """The path of Megatron-Core's file, for messages."""
        assert isinstance(self.save.root, Path)  # noqa: S101 - these strategies have no URLs
        return str(object_path(self.save.root, name))

    def object_content(self, name: ObjectId) -> bytes:
        """The object, pickled."""
        return dump_object(self.objects[name.unique_key], name=name.unique_key)


Source = OwnSource | StrategySource
Opened = StoredCheckpoint | StrategySource


def _in_memory(array: ArraySpec, tensor: torch.Tensor) -> HostArray:
    """A tensor that a strategy loaded for an array, on the host, in the array's dtype."""
    if tensor.numel() != math.prod(array.shape):
        key = json.loads(array.key)[0]
        raise PlanError(
            f"{key}: shape {tuple(tensor.shape)} loaded, {array.shape} expected", key=key
        )
    return to_host([tensor.to(getattr(torch, array.dtype.value)).reshape(array.shape)])[0]
