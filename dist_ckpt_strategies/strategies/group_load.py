"""Load of ("zarr", 1) by a group of ranks that share the reading."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dist_ckpt_strategies.comm.agree import agree, agree_and_gather
from dist_ckpt_strategies.comm.base import Bytes, Communicator, Receive, Send
from dist_ckpt_strategies.config import Options
from dist_ckpt_strategies.megatron.bases import ShardedObject, ShardedTensor
from dist_ckpt_strategies.megatron.shards import (
    StateDict,
    mapped_values,
    object_id,
    shard_spec,
    sharded_values,
)
from dist_ckpt_strategies.plan.broadcast import Box, build_broadcast_plan
from dist_ckpt_strategies.plan.load import LoadPlan, build_load_plan
from dist_ckpt_strategies.run.broadcast import BoxTarget, run_broadcast
from dist_ckpt_strategies.run.report import BroadcastReport
from dist_ckpt_strategies.spec.array import ArraySpec, array_from_wire, array_to_wire
from dist_ckpt_strategies.spec.object import ObjectId
from dist_ckpt_strategies.spec.region import Region
from dist_ckpt_strategies.storage.objects import Allowed, load_pickle, object_path, read_content
from dist_ckpt_strategies.storage.stores import open_array_store
from dist_ckpt_strategies.storage.zarr2 import Zarr2Layout
from dist_ckpt_strategies.strategies.format1 import destination, find_arrays


def load_format1_in_group(
    state_dict: StateDict,
    root: Path,
    comm: Communicator,
    options: Options,
    allowed: Callable[[], Allowed],
) -> tuple[StateDict, BroadcastReport]:
    """Read what the ranks of a group ask for, each box and object once, and share it out.

    Collective over the group. Every array's metadata is read by one rank too. A ShardedTensor with
    data of the stored dtype is filled in place.

    Raises:
        ShapeMismatchError, ArrayNotFoundError, StorageError: on every rank where one failed.
    """
    values = agree(comm, lambda: list(sharded_values(state_dict)))
    tensors = [value for value in values if isinstance(value, ShardedTensor)]
    objects = [value for value in values if isinstance(value, ShardedObject)]
    arrays = _shared_metadata({tensor.key for tensor in tensors}, root, comm, options)
    held: list[tuple[LoadPlan, list[torch.Tensor]]] = []

    def describe() -> list[Any]:
        load_plan = build_load_plan([shard_spec(tensor) for tensor in tensors], arrays)
        held.append((load_plan, [destination(t, arrays[t.key]) for t in tensors]))
        boxes = dict.fromkeys(
            Box(read.array.key, read.source) for read in load_plan.reads if read.source is not None
        )
        wires = [[box.key, list(box.region.offset), list(box.region.shape)] for box in boxes]
        return [wires, options.max_inflight_bytes]

    answers = agree_and_gather(comm, describe)
    wants = [[_box(*wire) for wire in wires] for wires, _ in answers]
    budget = min(budget for _, budget in answers)  # equal facts, an equal plan
    plan = build_broadcast_plan(wants, arrays, max_inflight_bytes=budget)
    load_plan, results = held[0]
    store = agree(comm, lambda: open_array_store(root, options))
    targets = agree(comm, lambda: _targets(load_plan, tensors, results))
    report = run_broadcast(plan, targets, store, comm, options)
    loaded: dict[int, Any] = {id(t): result for t, result in zip(tensors, results, strict=True)}
    loaded |= _shared_objects(objects, root, comm, allowed)
    return mapped_values(lambda value: loaded[id(value)], state_dict), report


def _box(key: str, offset: Sequence[int], shape: Sequence[int]) -> Box:
    return Box(key, Region(tuple(offset), tuple(shape)))


def _shared_metadata(
    keys: set[str], root: Path, comm: Communicator, options: Options
) -> Mapping[str, ArraySpec]:
    """The arrays that any rank of the group wants; each rank looks up its share."""
    everyone = agree_and_gather(comm, lambda: sorted(keys))
    wanted = sorted({key for keys_ in everyone for key in keys_})

    def look_up() -> list[Any]:
        found = find_arrays(Zarr2Layout(root), wanted[comm.rank :: comm.size], options)
        return [array_to_wire(array) for array in found.values()]

    shares = agree_and_gather(comm, look_up)
    return {array.key: array for share in shares for array in map(array_from_wire, share)}


def _targets(
    plan: LoadPlan, tensors: Sequence[Any], results: Sequence[torch.Tensor]
) -> list[BoxTarget]:
    """The parts of this rank's tensors that storage has something for; the rest becomes zero."""
    targets = []
    for read in plan.reads:
        tensor = results[read.number].detach()
        tensor = tensor[(None,) * tensors[read.number].prepend_axis_num]
        if read.is_padded:
            tensor.zero_()
        if read.source is not None and read.target is not None:
            part = tensor[read.target.slices()]
            targets.append(BoxTarget(Box(read.array.key, read.source), part))
    return targets


def _shared_objects(
    objects: Sequence[Any], root: Path, comm: Communicator, allowed: Callable[[], Allowed]
) -> dict[int, Any]:
    """Every object that this rank wants; each file is read by one rank, and its bytes are sent."""
    names = sorted({object_id(found) for found in objects})
    everyone = agree_and_gather(comm, lambda: [name.unique_key for name in names])
    wanted_by: dict[str, list[int]] = defaultdict(list)
    for rank, unique_keys in enumerate(everyone):
        for unique_key in unique_keys:
            wanted_by[unique_key].append(rank)
    if not wanted_by:
        return {}
    order = sorted(wanted_by)
    own = order[comm.rank :: comm.size]
    read: dict[str, bytes] = {}

    def read_share() -> list[int]:
        for unique_key in own:
            read[unique_key] = read_content(root, _named(unique_key))
        return [len(read[unique_key]) for unique_key in own]

    sizes = agree_and_gather(comm, read_share)
    reader = {key: n % comm.size for n, key in enumerate(order)}
    nbytes = {key: sizes[n % comm.size][n // comm.size] for n, key in enumerate(order)}
    sends = [
        Send(rank, np.frombuffer(bytearray(read[key]), np.uint8))
        for key in own
        for rank in wanted_by[key]
        if rank != comm.rank and nbytes[key]
    ]
    arrived: dict[str, Bytes] = {
        name.unique_key: np.empty(nbytes[name.unique_key], np.uint8)
        for name in names
        if reader[name.unique_key] != comm.rank
    }
    receives = [Receive(reader[key], into) for key, into in sorted(arrived.items()) if into.size]
    comm.exchange(sends, receives)

    def unpickle() -> dict[int, Any]:
        allow = allowed()
        contents = read | {key: content.tobytes() for key, content in arrived.items()}
        return {
            id(found): load_pickle(
                contents[object_id(found).unique_key],
                object_path(root, object_id(found)),
                object_id(found).unique_key,
                allow,
            )
            for found in objects
        }

    return agree(comm, unpickle)


def _named(unique_key: str) -> ObjectId:
    found = ObjectId.parse(unique_key)
    assert found is not None  # noqa: S101 - made from an ObjectId on another rank
    return found
