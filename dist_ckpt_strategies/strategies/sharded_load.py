"""Load between Megatron-Core's types and the plan and its runner, from any format."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from dist_ckpt_strategies.comm.agree import agree
from dist_ckpt_strategies.comm.base import Communicator
from dist_ckpt_strategies.config import Options
from dist_ckpt_strategies.device import may_overlap, require_plain, torch_dtype
from dist_ckpt_strategies.errors import ShapeMismatchError, StrategyError
from dist_ckpt_strategies.megatron.bases import ShardedObject, ShardedTensor
from dist_ckpt_strategies.megatron.shards import (
    StateDict,
    mapped_values,
    object_id,
    shard_spec,
    sharded_values,
)
from dist_ckpt_strategies.plan.load import build_load_plan
from dist_ckpt_strategies.run.load import run_load
from dist_ckpt_strategies.run.report import LoadReport
from dist_ckpt_strategies.spec.array import ArraySpec
from dist_ckpt_strategies.storage.base import StoredCheckpoint
from dist_ckpt_strategies.storage.objects.pickled import Allowed, load_content
from dist_ckpt_strategies.storage.transfers import Job, run_pooled

Deliver = Callable[[Any, torch.Tensor], torch.Tensor]
"""Turns a ShardedTensor and what was loaded for it into the result."""


def load_sharded(
    state_dict: StateDict,
    open_checkpoint: Callable[[], StoredCheckpoint],
    comm: Communicator,
    options: Options,
    allowed: Callable[[], Allowed],
    deliver: Deliver,
) -> tuple[StateDict, LoadReport]:
    """Read what the state dict asks for; a state dict of the same structure, and a report.

    Collective, with one meeting. A ShardedTensor with data of the stored dtype is filled in place
    and its own tensor is loaded. Otherwise that is a new tensor of the stored dtype.

    Args:
        state_dict: what to load.
        open_checkpoint: gives the checkpoint; may raise what its opening raises.
        comm: ranks that load together.
        options: timeout and memory budget.
        allowed: gives the classes that objects may be unpickled to.
        deliver: turns a ShardedTensor and what was loaded for it into the result.

    Raises:
        ShapeMismatchError, ArrayNotFoundError, StorageError: on every rank where one failed.
    """

    def read() -> tuple[StateDict, LoadReport]:
        checkpoint = open_checkpoint()
        values = list(sharded_values(state_dict))
        tensors = [value for value in values if isinstance(value, ShardedTensor)]
        objects = [value for value in values if isinstance(value, ShardedObject)]
        found, report = _read(tensors, checkpoint, options)
        loaded = {id(v): deliver(v, t) for v, t in zip(tensors, found, strict=True)}
        loaded |= _read_objects(objects, checkpoint, allowed, options)
        return mapped_values(lambda value: loaded[id(value)], state_dict), report

    return agree(comm, read)


def destination(tensor: Any, array: ArraySpec) -> torch.Tensor:
    """The tensor that will hold the result: the caller's own where it fits."""
    dtype = torch_dtype(array.dtype)
    data: torch.Tensor | None = tensor.data
    if data is None:
        return torch.empty(tuple(tensor.local_shape), dtype=dtype, device="cpu")
    if has_own_shape(tensor) and data.dtype == dtype and not may_overlap(data):
        return data
    return torch.empty(tuple(tensor.local_shape), dtype=dtype, device=data.device)


def has_own_shape(tensor: Any) -> bool:
    """Whether the ShardedTensor's data has the shape that it states, as when it was made.

    Megatron-Core's torch_dist gives it the prepended dims too, and then it is not to be filled.

    Raises:
        ShapeMismatchError: it has any other.
        PlanError: its elements do not lie in memory of its own.
    """
    require_plain(tensor.data, key=tensor.key)
    found, stated = tuple(tensor.data.shape), tuple(tensor.local_shape)
    if found not in {stated, (1,) * tensor.prepend_axis_num + stated}:
        raise ShapeMismatchError(
            f"{tensor.key}: its data has shape {found}, its local_shape is {stated}",
            key=tensor.key,
        )
    return found == stated


def copy_into_own_data(tensor: Any, loaded: torch.Tensor) -> torch.Tensor:
    """Put a loaded tensor into the ShardedTensor's data, cast to its dtype; returns that data.

    Raises:
        StrategyError: there is no data to load into.
    """
    if tensor.data is None:
        raise StrategyError(
            f"{tensor.key}: load_directly_on_device needs a ShardedTensor with data"
        )
    own: torch.Tensor = tensor.data
    if own is not loaded:
        own.data.copy_(loaded)
    return own


def _read(
    tensors: Sequence[Any], checkpoint: StoredCheckpoint, options: Options
) -> tuple[list[torch.Tensor], LoadReport]:
    """The loaded tensor of each ShardedTensor."""
    stored = checkpoint.find({tensor.key for tensor in tensors})
    plan = build_load_plan([shard_spec(tensor) for tensor in tensors], stored)
    results = [destination(tensor, stored[tensor.key]) for tensor in tensors]
    targets = [
        result.detach()[(None,) * tensor.prepend_axis_num]
        for result, tensor in zip(results, tensors, strict=True)
    ]
    return results, run_load(plan, targets, checkpoint.array_reader, options)


def _read_objects(
    objects: Sequence[Any],
    checkpoint: StoredCheckpoint,
    allowed: Callable[[], Allowed],
    options: Options,
) -> dict[int, Any]:
    if not objects:
        return {}
    allow = allowed()
    loaded: dict[int, Any] = {}

    def read(wanted: Any) -> None:
        name = object_id(wanted)
        path = checkpoint.object_path(name)
        content = checkpoint.object_content(name)
        loaded[id(wanted)] = load_content(content, path, name.unique_key, allow)

    jobs = (Job(found.key, found.unique_key, partial(read, found)) for found in objects)
    run_pooled(jobs, 1).wait(options.timeout_s)
    return loaded
