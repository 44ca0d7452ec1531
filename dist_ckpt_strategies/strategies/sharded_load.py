"""Load between Megatron-Core's types and the plan and its runner, from any format."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from dist_ckpt_strategies.comm.agree import agree, agree_and_gather
from dist_ckpt_strategies.comm.base import Communicator
from dist_ckpt_strategies.config import Options
from dist_ckpt_strategies.core.array import ArraySpec
from dist_ckpt_strategies.core.report import LoadReport
from dist_ckpt_strategies.device import may_overlap, require_plain, torch_dtype
from dist_ckpt_strategies.errors import DTypeMismatchError, PlanError, ShapeMismatchError
from dist_ckpt_strategies.formats.objects import Allowed, load_content
from dist_ckpt_strategies.megatron.bases import ShardedTensor
from dist_ckpt_strategies.megatron.shards import (
    StateDict,
    mapped_values,
    object_id,
    shard_spec,
    sharded_values,
)
from dist_ckpt_strategies.sharded.load import run_load
from dist_ckpt_strategies.sharded.plan_load import LoadPlan, build_load_plan
from dist_ckpt_strategies.storage.base import StoredCheckpoint
from dist_ckpt_strategies.storage.io_pool import Job, run_pooled
from dist_ckpt_strategies.storage.time_limit import restart_limit, time_limit

logger = logging.getLogger(__name__)

Conversions = list[list[str]]
"""Key, stored and wanted dtype of each array that a load converts, sorted."""

_NUM_EXAMPLES = 3


def load_sharded(  # noqa: PLR0913, PLR0917
    state_dict: StateDict,
    checkpoint_dir: object,
    open_checkpoint: Callable[[], StoredCheckpoint],
    comm: Communicator,
    options: Options,
    allowed: Callable[[], Allowed],
    destination_of: Callable[[Any], torch.Tensor],
) -> tuple[StateDict, LoadReport]:
    """Read what the state dict asks for; a state dict of the same structure, and a report.

    Collective, in two steps: nothing is filled unless every rank can be given what it asks for.

    Args:
        state_dict: what to load.
        checkpoint_dir: the checkpoint, for messages.
        open_checkpoint: gives the checkpoint; may raise what its opening raises.
        comm: ranks that load together.
        options: timeout and memory budget.
        allowed: gives the classes that objects may be unpickled to.
        destination_of: gives the tensor to fill for a ShardedTensor.

    Raises:
        ShapeMismatchError, DTypeMismatchError, ArrayNotFoundError, StorageError: on every rank
            where one failed.
    """
    prepared: list[tuple[StoredCheckpoint, LoadPlan, list[torch.Tensor]]] = []
    tensors: list[Any] = []
    objects: list[Any] = []

    def prepare() -> Conversions:
        checkpoint = open_checkpoint()
        for value in sharded_values(state_dict):
            (tensors if isinstance(value, ShardedTensor) else objects).append(value)
        stored = checkpoint.find({tensor.key for tensor in tensors})
        plan = build_load_plan([shard_spec(tensor) for tensor in tensors], stored)
        converted = conversions(tensors, dtypes_of(stored), is_strict=options.strict_dtype)
        prepared.append((checkpoint, plan, [destination_of(tensor) for tensor in tensors]))
        return converted

    def read() -> tuple[StateDict, LoadReport]:
        ((checkpoint, plan, results),) = prepared
        targets = [
            result.detach()[(None,) * tensor.prepend_axis_num]
            for result, tensor in zip(results, tensors, strict=True)
        ]
        report = run_load(plan, targets, checkpoint.array_reader, options)
        loaded: dict[int, Any] = {id(t): r for t, r in zip(tensors, results, strict=True)}
        loaded |= _read_objects(objects, checkpoint, allowed, options)
        return mapped_values(lambda value: loaded[id(value)], state_dict), report

    with time_limit(options.timeout_s):
        converted = agree_and_gather(comm, prepare)
        restart_limit()
        found = agree(comm, read)
    warn_of_conversions(comm, checkpoint_dir, converted)
    return found


def dtypes_of(stored: Mapping[str, ArraySpec]) -> dict[str, torch.dtype]:
    """The stored dtype of each array."""
    return {key: torch_dtype(array.dtype) for key, array in stored.items()}


def conversions(
    tensors: Iterable[Any], stored: Mapping[str, torch.dtype], *, is_strict: bool
) -> Conversions:
    """What a load of these ShardedTensors converts.

    Args:
        tensors: what this rank asks for.
        stored: the dtype of each stored array; one that is missing here is passed over.
        is_strict: whether a conversion is an error.

    Raises:
        DTypeMismatchError: there is one, and ``is_strict``; names the first.
    """
    wanted = {(t.key, t.dtype if t.data is None else t.data.dtype) for t in tensors}
    found = sorted(
        [key, _name(stored[key]), _name(dtype)]
        for key, dtype in wanted
        if stored.get(key, dtype) != dtype
    )
    if found and is_strict:
        key, is_stored, is_wanted = found[0]
        others = f"; {len(found) - 1} more arrays differ" if len(found) > 1 else ""
        raise DTypeMismatchError(
            f"{key}: dtype {is_stored} in the checkpoint, {is_wanted} requested{others}; load it "
            "as it is stored, or without strict_dtype, which converts it",
            key=key,
        )
    return found


def warn_of_conversions(
    comm: Communicator, checkpoint_dir: object, converted: Iterable[Conversions]
) -> None:
    """Log one warning, on the first rank, if any rank of a load has converted an array.

    Args:
        comm: ranks that have loaded together.
        checkpoint_dir: from where.
        converted: by rank, as gathered.
    """
    found = sorted({tuple(each) for of_rank in converted for each in of_rank})
    if not found or comm.rank != 0:
        return
    examples = found[:_NUM_EXAMPLES]
    named = ", ".join(f"{key} ({stored} to {wanted})" for key, stored, wanted in examples)
    text = (
        f"load from {checkpoint_dir}: arrays converted to the dtype requested: "
        f"{len({key for key, _, _ in found})}, such as {named}; strict_dtype=True makes this an "
        "error"
    )
    logger.warning("%s", text)


def destination(tensor: Any) -> torch.Tensor:
    """The tensor that a load fills: the ShardedTensor's own data, or a new one on the CPU.

    Where Megatron-Core's torch_dist has given the data its prepended dims, it is a view of that.

    Raises:
        ShapeMismatchError: the data has another shape than the ShardedTensor says.
        PlanError: its elements do not lie in memory of their own.
    """
    stated = tuple(tensor.local_shape)
    data: torch.Tensor | None = tensor.data
    if data is None:
        return torch.empty(stated, dtype=tensor.dtype, device="cpu")
    require_plain(data, key=tensor.key)
    found = tuple(data.shape)
    if found not in {stated, (1,) * tensor.prepend_axis_num + stated}:
        raise ShapeMismatchError(
            f"{tensor.key}: its data has shape {found}, its local_shape is {stated}",
            key=tensor.key,
        )
    if may_overlap(data):
        raise PlanError(
            f"{tensor.key}: elements of its data share memory, as after expand(), so that it "
            "cannot be filled; give the ShardedTensor a clone",
            key=tensor.key,
        )
    return data if found == stated else data.detach()[(0,) * tensor.prepend_axis_num]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


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
