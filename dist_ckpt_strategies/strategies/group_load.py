"""Load of a checkpoint by a group of ranks that share the reading."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Self, overload

import torch

from dist_ckpt_strategies.comm.agree import agree
from dist_ckpt_strategies.comm.base import Communicator
from dist_ckpt_strategies.comm.gather import agree_and_gather_bytes
from dist_ckpt_strategies.config import Options
from dist_ckpt_strategies.megatron.bases import ShardedObject, ShardedTensor
from dist_ckpt_strategies.megatron.shards import (
    StateDict,
    mapped_values,
    shard_spec,
    sharded_values,
)
from dist_ckpt_strategies.plan.broadcast import BroadcastPlan, build_broadcast_plan
from dist_ckpt_strategies.plan.load import LoadPlan, build_load_plan
from dist_ckpt_strategies.run.broadcast import BoxTarget, run_broadcast
from dist_ckpt_strategies.run.report import BroadcastReport
from dist_ckpt_strategies.spec.array import ArraySpec, array_from_wire, array_to_wire
from dist_ckpt_strategies.spec.box import Box, BoxTable
from dist_ckpt_strategies.spec.object import ObjectId
from dist_ckpt_strategies.storage.base import ArrayReader, StoredCheckpoint
from dist_ckpt_strategies.storage.objects.pickled import Allowed
from dist_ckpt_strategies.strategies.group_objects import (
    NO_SHARES,
    send_objects,
    share_objects,
    unpickled,
)
from dist_ckpt_strategies.strategies.sharded_load import destination


def load_sharded_in_group(
    state_dict: StateDict,
    open_checkpoint: Callable[[], StoredCheckpoint],
    comm: Communicator,
    options: Options,
    allowed: Callable[[], Allowed],
    deliver: Callable[[Any, torch.Tensor], torch.Tensor],
) -> tuple[StateDict, BroadcastReport]:
    """Read what the ranks of a group ask for, each box and object once, and share it out.

    Collective over the group. Every array's metadata is read by one rank too. A ShardedTensor with
    data of the stored dtype is filled in place.

    Args:
        state_dict: what this rank wants.
        open_checkpoint: gives the checkpoint; may raise what its opening raises.
        comm: the group.
        options: timeout and memory budget; the smallest budget of the group counts.
        allowed: gives the classes that objects may be unpickled to.
        deliver: turns a ShardedTensor and what was loaded for it into the result.

    Raises:
        ShapeMismatchError, ArrayNotFoundError, StorageError: on every rank where one failed.
    """
    request, answers = _requested(state_dict, open_checkpoint, comm, options)
    checkpoint, tensors, objects = request.checkpoint, request.tensors, request.objects
    wanted, arrays = _looked_up(answers, checkpoint, comm)
    held: list[tuple[list[torch.Tensor], list[BoxTarget], ArrayReader]] = []

    def describe() -> bytes:
        stored = arrays.of({tensor.key for tensor in tensors})
        plan = build_load_plan([shard_spec(tensor) for tensor in tensors], stored)
        results = [destination(tensor, stored[tensor.key]) for tensor in tensors]
        targets = _targets(plan, tensors, results, arrays)
        held.append((results, targets, checkpoint.array_reader))
        return BoxTable.of(target.box for target in targets).to_bytes()

    wants = agree_and_gather_bytes(comm, describe)

    def prepare() -> BroadcastPlan:
        return build_broadcast_plan(_tables(wants), arrays, max_inflight_bytes=wanted.budget)

    plan = agree(comm, prepare)
    results, targets, reader = held[0]
    report = run_broadcast(plan, arrays, targets, reader, comm, options)
    shares = share_objects(objects, comm) if wanted.has_objects else NO_SHARES
    contents = send_objects(
        shares, comm, lambda: {k: _content(checkpoint, k) for k in shares.read_by(comm.rank)}
    )

    def finish() -> StateDict:
        loaded = unpickled(objects, contents, checkpoint.object_path, allowed)
        loaded |= {id(t): deliver(t, r) for t, r in zip(tensors, results, strict=True)}
        return mapped_values(lambda value: loaded[id(value)], state_dict)

    return agree(comm, finish), report


@dataclass(frozen=True, slots=True)
class _Request:
    """What this rank wants, and the checkpoint that has it."""

    checkpoint: StoredCheckpoint
    tensors: Sequence[Any]
    objects: Sequence[Any]

    @property
    def keys(self) -> list[str]:
        """Of the tensors, sorted."""
        return sorted({tensor.key for tensor in self.tensors})


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What the ranks of a group want, taken together.

    Attributes:
        keys: of all tensors, sorted.
        has_objects: whether any of them wants objects.
        budget: the smallest of the memory bounds.
    """

    keys: Sequence[str]
    has_objects: bool
    budget: int

    @classmethod
    def of(cls, answers: Iterable[bytes]) -> Self:
        """From what each rank says."""
        budgets, have_objects, keys = zip(*map(json.loads, set(answers)), strict=True)
        return cls(sorted(set(chain.from_iterable(keys))), any(have_objects), min(budgets))


def _requested(
    state_dict: StateDict,
    open_checkpoint: Callable[[], StoredCheckpoint],
    comm: Communicator,
    options: Options,
) -> tuple[_Request, list[bytes]]:
    """What this rank wants, and what each rank says that it does. Collective."""
    held: list[_Request] = []

    def describe() -> bytes:
        checkpoint = open_checkpoint()
        values = list(sharded_values(state_dict))
        tensors = [value for value in values if isinstance(value, ShardedTensor)]
        objects = [value for value in values if isinstance(value, ShardedObject)]
        held.append(_Request(checkpoint, tensors, objects))
        told = [options.max_inflight_bytes, bool(objects), held[0].keys]
        return json.dumps(told).encode()

    answers = agree_and_gather_bytes(comm, describe)
    return held[0], answers


def _tables(contents: Sequence[bytes]) -> list[BoxTable]:
    """The table of each rank; equal ones are one object."""
    found = {content: BoxTable.from_bytes(content) for content in set(contents)}
    return [found[content] for content in contents]


class _Arrays(Sequence[ArraySpec]):
    """The arrays that the ranks of a group want, sorted by key; described where they are needed.

    Args:
        keys: of all arrays, sorted.
        lines: for each rank, one line for each array that it has looked up, in turn.
    """

    def __init__(self, keys: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
        self._numbers = {key: number for number, key in enumerate(keys)}
        self._lines = lines
        self._found: dict[int, ArraySpec] = {}

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, number: int) -> ArraySpec: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[ArraySpec]: ...
    def __getitem__(self, number: int | slice) -> ArraySpec | Sequence[ArraySpec]:
        if isinstance(number, slice):
            return [self[n] for n in range(*number.indices(len(self)))]
        found = self._found.get(number)
        if found is None:
            line = self._lines[number % len(self._lines)][number // len(self._lines)]
            found = self._found[number] = array_from_wire(json.loads(line))
        return found

    def number(self, key: str) -> int:
        """Its place among all keys."""
        return self._numbers[key]

    def of(self, keys: Iterable[str]) -> dict[str, ArraySpec]:
        """The arrays of some keys."""
        return {key: self[self._numbers[key]] for key in keys}


def _looked_up(
    answers: Sequence[bytes], checkpoint: StoredCheckpoint, comm: Communicator
) -> tuple[_Wanted, _Arrays]:
    """What the ranks of the group want, and its arrays. Collective; each looks up its share."""
    held: list[_Wanted] = []

    def look_up() -> bytes:
        wanted = _Wanted.of(answers)
        held.append(wanted)
        share = wanted.keys[comm.rank :: comm.size]
        found = checkpoint.find(share)
        return "\n".join(json.dumps(array_to_wire(found[key])) for key in share).encode()

    shares = agree_and_gather_bytes(comm, look_up)
    return held[0], _Arrays(held[0].keys, [share.decode().split("\n") for share in shares])


def _targets(
    plan: LoadPlan, tensors: Sequence[Any], results: Sequence[torch.Tensor], arrays: _Arrays
) -> list[BoxTarget]:
    """The parts of this rank's tensors that storage has something for; the rest becomes zero."""
    targets = []
    for read in plan.reads:
        tensor = results[read.number].detach()
        tensor = tensor[(None,) * tensors[read.number].prepend_axis_num]
        if read.is_padded:
            tensor.zero_()
        if read.source is not None and read.target is not None:
            number, itemsize = arrays.number(read.array.key), read.array.dtype.itemsize
            box = Box(number, itemsize, read.source)
            targets.append(BoxTarget(box, tensor[read.target.slices()]))
    return targets


def _content(checkpoint: StoredCheckpoint, unique_key: str) -> bytes:
    found = ObjectId.parse(unique_key)
    assert found is not None  # noqa: S101 - made from an ObjectId on another rank
    return checkpoint.object_content(found)
