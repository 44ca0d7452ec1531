"""Load through any load strategy by a group of ranks that share the reading."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dist_ckpt_strategies.comm.agree import agree
from dist_ckpt_strategies.comm.base import Communicator
from dist_ckpt_strategies.comm.gather import agree_and_gather_bytes
from dist_ckpt_strategies.config import Options
from dist_ckpt_strategies.device import to_host
from dist_ckpt_strategies.errors import PlanError
from dist_ckpt_strategies.megatron.bases import ShardedObject, ShardedTensor
from dist_ckpt_strategies.megatron.shards import (
    StateDict,
    mapped_values,
    metadata_from_wire,
    metadata_to_wire,
    object_id,
    shard_spec,
    sharded_values,
)
from dist_ckpt_strategies.plan.broadcast import BroadcastPlan, build_broadcast_plan
from dist_ckpt_strategies.run.broadcast import BoxTarget, run_broadcast
from dist_ckpt_strategies.run.report import BroadcastReport
from dist_ckpt_strategies.spec.array import ArraySpec
from dist_ckpt_strategies.spec.box import Box, BoxTable
from dist_ckpt_strategies.storage.base import HostArray
from dist_ckpt_strategies.storage.loaded_boxes import LoadedBoxes
from dist_ckpt_strategies.storage.objects.pickled import Allowed, dump_object, object_path
from dist_ckpt_strategies.strategies.group_objects import (
    ObjectShares,
    send_objects,
    share_objects,
    unpickled,
)
from dist_ckpt_strategies.strategies.sharded_load import destination


@dataclass(frozen=True, slots=True)
class SharedRequest:
    """What a group has agreed to load: this rank's part of it, and the plan for all.

    Attributes:
        state_dict: what this rank wants.
        tensors: the ShardedTensors in it, by their descriptions.
        arrays: one for each description that the group wants, by number.
        own: this rank's part: the ShardedTensors that it reads, by number, and the ShardedObjects,
            by unique key. Flat: torch_dist loses dicts that are empty.
        plan: who sends what to whom.
        objects: who reads which objects.
    """

    state_dict: StateDict
    tensors: Mapping[int, Sequence[Any]]
    arrays: Sequence[ArraySpec]
    own: StateDict
    plan: BroadcastPlan
    objects: ObjectShares


def request_in_group(state_dict: StateDict, comm: Communicator, options: Options) -> SharedRequest:
    """Deal what the ranks of a group want out among them, each shard and object to one.

    Collective over the group.

    Raises:
        PlanError: a value is no ShardedTensor and no ShardedObject, or cannot be described.
    """
    values = agree(comm, lambda: list(sharded_values(state_dict)))
    tensors = [value for value in values if isinstance(value, ShardedTensor)]
    wanted: dict[str, list[Any]] = defaultdict(list)

    def describe() -> bytes:
        for tensor in tensors:
            wanted[_described(tensor)].append(tensor)
        return json.dumps([options.max_inflight_bytes, sorted(wanted)]).encode()

    answers = agree_and_gather_bytes(comm, describe)
    planned = agree(comm, lambda: _planned(answers))
    objects = [value for value in values if isinstance(value, ShardedObject)]
    shares = share_objects(objects, comm)

    def own_part() -> SharedRequest:
        by_number = {planned.numbers[line]: found for line, found in wanted.items()}
        read = {box.array for box in planned.plan.read_by(comm.rank)}
        own: StateDict = {
            number: by_number[number][0] if number in by_number else planned.shards[number]
            for number in sorted(read)
        }
        own |= _own_objects(objects, shares, comm.rank)
        return SharedRequest(state_dict, by_number, planned.arrays, own, planned.plan, shares)

    return agree(comm, own_part)


@dataclass(frozen=True, slots=True)
class _Planned:
    """What a group wants, by number, and who reads it.

    Attributes:
        numbers: of the descriptions.
        shards: one for each.
        arrays: one for each.
        plan: who sends what to whom.
    """

    numbers: Mapping[str, int]
    shards: Sequence[Any]
    arrays: Sequence[ArraySpec]
    plan: BroadcastPlan


def _planned(answers: Sequence[bytes]) -> _Planned:
    """What follows from what all ranks of a group want."""
    parsed = {answer: json.loads(answer) for answer in set(answers)}
    lines = sorted({line for _, found in parsed.values() for line in found})
    numbers = {line: number for number, line in enumerate(lines)}
    shards = [metadata_from_wire(json.loads(line)) for line in lines]
    arrays = [_as_array(shard) for shard in shards]
    boxes = [_as_box(number, shard) for number, shard in enumerate(shards)]
    tables = {
        answer: BoxTable.of(box for line in found if (box := boxes[numbers[line]]) is not None)
        for answer, (_, found) in parsed.items()
    }
    plan = build_broadcast_plan(
        [tables[answer] for answer in answers],
        arrays,
        max_inflight_bytes=min(budget for budget, _ in parsed.values()),
        is_cut=False,
    )
    return _Planned(numbers, shards, arrays, plan)


def share_in_group(
    request: SharedRequest,
    loaded: StateDict,
    root: Path,
    comm: Communicator,
    options: Options,
    allowed: Callable[[], Allowed],
) -> tuple[StateDict, BroadcastReport]:
    """Send what every rank has loaded to those that want it.

    Collective over the group.

    Args:
        request: from ``request_in_group``.
        loaded: what the base strategy gave for ``request.own``.
        root: the checkpoint directory, for messages.
        comm: the group.
        options: timeout.
        allowed: gives the classes that objects may be unpickled to.

    Returns:
        A state dict like the one that was asked for, and what was sent.
    """
    results: dict[int, Any] = {}

    def prepare() -> tuple[list[BoxTarget], LoadedBoxes]:
        return _targets(request, results), LoadedBoxes(_boxes(request, loaded))

    targets, boxes = agree(comm, prepare)
    report = run_broadcast(request.plan, request.arrays, targets, boxes, comm, options)

    def dumped() -> dict[str, bytes]:
        names = request.objects.read_by(comm.rank)
        return {name: dump_object(loaded[name], name=name) for name in names}

    contents = send_objects(request.objects, comm, dumped)
    objects = [v for v in sharded_values(request.state_dict) if isinstance(v, ShardedObject)]
    path_of = partial(object_path, root)
    results |= agree(comm, lambda: unpickled(objects, contents, lambda n: str(path_of(n)), allowed))
    return mapped_values(lambda value: results[id(value)], request.state_dict), report


def _described(tensor: Any) -> str:
    """What tells a shard apart; replicas of it have the same."""
    shard_spec(tensor)  # refuses what no plan can hold
    wire = metadata_to_wire(tensor)
    wire[3] = 0  # whichever replica
    return json.dumps(wire)


def _as_array(shard: Any) -> ArraySpec:
    """The array around a shard as the request sees it: one chunk is one shard."""
    spec = shard_spec(shard)
    chunk = tuple(max(1, extent) for extent in spec.region.shape)
    return ArraySpec(spec.key, spec.array_shape, spec.dtype, chunk)


def _as_box(number: int, shard: Any) -> Box | None:
    """The box of a shard; None where it has no element."""
    spec = shard_spec(shard)
    return Box(number, spec.dtype.itemsize, spec.region) if spec.region.numel else None


def _own_objects(objects: Sequence[Any], shares: ObjectShares, rank: int) -> StateDict:
    own = {object_id(found).unique_key: found for found in objects}
    return {
        name: own.get(name) or ShardedObject.empty_from_unique_key(name)
        for name in shares.read_by(rank)
    }


def _boxes(request: SharedRequest, loaded: StateDict) -> dict[tuple[ArraySpec, Any], HostArray]:
    """What this rank has loaded, in the shape and dtype of its boxes."""
    boxes = {box.array: box for box in request.plan.boxes}
    found = {}
    for number in (number for number in request.own if isinstance(number, int)):
        tensor: torch.Tensor = loaded[number]
        array, region = request.arrays[number], boxes[number].region
        if tensor.numel() != region.numel:
            raise PlanError(
                f"{array.key}: shape {tuple(tensor.shape)} loaded, {region.shape} expected",
                key=array.key,
            )
        shaped = tensor.to(getattr(torch, array.dtype.value)).reshape(region.shape)
        found[array, region] = to_host([shaped])[0]
    return found


def _targets(request: SharedRequest, results: dict[int, Any]) -> list[BoxTarget]:
    """This rank's tensors; what becomes of each ShardedTensor goes to the results."""
    boxes = {box.array: box for box in request.plan.boxes}
    targets = []
    for number, tensors in request.tensors.items():
        for tensor in tensors:
            result = destination(tensor, request.arrays[number])
            results[id(tensor)] = result
            if number in boxes:
                part = result.detach()[(None,) * tensor.prepend_axis_num]
                targets.append(BoxTarget(boxes[number], part))
    return targets
