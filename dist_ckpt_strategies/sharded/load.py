"""Load a sharded state dict: plan, agree, read. Nothing is filled unless every rank can load.

The ranks talk twice: once all have opened the checkpoint and made their plans, and once all have
read. A load that checks a sharding for the first time takes a gather and a check more.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from dist_ckpt_strategies.comm.base import Communicator, Message, run_and_gather
from dist_ckpt_strategies.config import Options
from dist_ckpt_strategies.core.array import ArraySpec, Region, ShardSpec
from dist_ckpt_strategies.device import require_plain
from dist_ckpt_strategies.errors import PlanError
from dist_ckpt_strategies.formats.checkpoints import StoredCheckpoint
from dist_ckpt_strategies.formats.objects import Allowed, allowing, load_content
from dist_ckpt_strategies.formats.pack_checkpoint import PackCheckpoint
from dist_ckpt_strategies.megatron.shards import (
    StateDict,
    digest_of,
    mapped_values,
    message_of,
    object_id,
    shard_from_message,
    sharded_values,
)
from dist_ckpt_strategies.megatron.types import ShardedTensor
from dist_ckpt_strategies.sharded.agreement import require_same_checkpoint
from dist_ckpt_strategies.sharded.checks import require_validated
from dist_ckpt_strategies.sharded.read import TensorRead, run_reads
from dist_ckpt_strategies.storage.io_pool import ENDING, WORK, Deadline, Job, Transfer, run_within

logger = logging.getLogger(__name__)

Conversions = list[list[str]]
"""Key, stored and wanted dtype of each array that a load converts, sorted."""

Validated = dict[str, str]
"""Shardings that were checked: the digest of all ranks' shards, by that of this rank's."""

PLANNED = "one plan"
"""How a rank loads that has a LoadPlan: what its answer begins with."""

_NUM_EXAMPLES = 3


@dataclass(frozen=True, slots=True)
class ReadItem:
    """How one wanted shard is filled.

    Attributes:
        array: the stored array.
        source: region of the stored array to read; None where the shard lies wholly beyond it.
        target: the same region, in coordinates of the wanted tensor; None where that is all of it.
        is_padded: whether a part of the tensor has no counterpart in storage and becomes zeros.
    """

    array: ArraySpec
    source: Region | None
    target: Region | None
    is_padded: bool

    def part_of(self, tensor: torch.Tensor, num_prepended: int) -> torch.Tensor:
        """The part of a tensor to read; the array's first dims, which it lacks, are prepended."""
        whole = tensor.detach()[(None,) * num_prepended]
        return whole if self.target is None else whole[self.target.slices()]


def build_read_item(want: ShardSpec, array: ArraySpec) -> ReadItem:
    """Match a shard that a rank wants with the array that a checkpoint holds.

    Where ``may_mismatch`` is set and shapes differ, the read is clipped to what is stored and the
    rest of the tensor is padding, as in Megatron-Core 0.15's TensorStore loader.

    Raises:
        PlanError: shapes differ, or the shard reaches outside, and ``may_mismatch`` is not set; or
            the number of dims differs.
    """
    key, region = want.id
    shape = array.shape
    if shape != want.array_shape and not (
        want.may_mismatch and len(shape) == len(want.array_shape)
    ):
        raise PlanError(
            f"{key}: shape {shape} in the checkpoint, {want.array_shape} requested; "
            "build the model with the settings of the run that saved it; only for a padded "
            "vocabulary, set allow_shape_mismatch on the ShardedTensor",
            key=key,
        )
    if 0 in region.shape:
        return ReadItem(array, None, None, is_padded=False)
    for start, num, size in zip(*region, shape, strict=True):
        if start < 0 or start + num > size:
            break
    else:
        return ReadItem(array, region, None, is_padded=False)
    if not want.may_mismatch:
        raise PlanError(
            f"{key}: {region} requested, outside the array's shape {shape}",
            key=key,
        )
    source = region.intersect(Region.whole(shape))
    if source is None:
        return ReadItem(array, None, None, is_padded=True)
    return ReadItem(array, source, source.within(region), is_padded=source.shape != region.shape)


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """The reads of one rank, of what ``state`` wants; ``messages`` are about all of it.

    ``reads`` say how each ShardedTensor is filled, and the tensor that is; ``converted`` are arrays
    that are stored in another dtype than the one wanted.
    """

    checkpoint: StoredCheckpoint
    state: StateDict
    messages: Sequence[Message]
    reads: Sequence[tuple[Any, ReadItem, torch.Tensor]]
    objects: Sequence[Any]
    converted: Conversions

    def message(self, validated: Validated | None = None) -> Message:
        """Description for the other ranks; with ``validated`` the sharding is checked."""
        digest, group = "", None
        if validated is not None:
            digest = digest_of(self.messages)
            group = validated.get(digest)
        return [PLANNED, self.checkpoint.identity, digest, group]


def plan_load(
    state: StateDict,
    checkpoint: StoredCheckpoint,
    options: Options,
    destination_of: Callable[[Any], torch.Tensor],
    deadline: Deadline,
) -> LoadPlan:
    """Match what is wanted with what is stored. Rank-local.

    Raises:
        PlanError, ArrayNotFoundError: this rank cannot be given what it asks for.
        StorageError: storage fails.
    """
    values = list(sharded_values(state))
    messages = list(map(message_of, values))
    tensors = [value for value in values if isinstance(value, ShardedTensor)]
    objects = [value for value in values if not isinstance(value, ShardedTensor)]
    find = partial(checkpoint.find, {tensor.key for tensor in tensors})
    stored = run_within(deadline, checkpoint.save.root, partial(checkpoint.save.read, find))
    specs = [spec for spec in map(shard_from_message, messages) if spec is not None]
    reads, converted = matched(tensors, specs, stored, is_strict=options.strict_dtype)
    filled = list(zip(tensors, reads, map(destination_of, tensors), strict=True))
    return LoadPlan(checkpoint, state, messages, filled, objects, converted)


def load_sharded(  # noqa: PLR0913
    comm: Communicator,
    plan: LoadPlan,
    answers: Sequence[Message],
    name: object,
    options: Options,
    allow: Allowed,
    *,
    validated: Validated | None = None,
    finish: Callable[[StateDict], StateDict] = lambda state: state,
) -> StateDict:
    """Read what was planned; what ``finish`` makes of the loaded state dict. Collective.

    ``answers`` are what ``plan.message`` has returned on every rank, gathered: no tensor was
    touched before every rank knew that it can load. Where the sharding is to be checked,
    ``validated`` are those that were checked before; new ones are added. ``finish`` may raise.

    Raises:
        PlanError: main replicas of a key do not fit together.
        CheckpointChangedError: ranks have opened different checkpoints.
        StorageError: a chunk or object is missing or damaged.
        PeerError: the same, on another rank.
    """
    _, identities, owns, groups = zip(*answers, strict=True)
    require_same_checkpoint(comm, name, identities)
    group = digest_of(owns) if any(owns) else ""
    if group and set(groups) != {group}:
        require_validated(comm, plan.messages)  # two more, where this sharding is new
        if validated is not None:
            validated[owns[comm.rank]] = group
    results: list[StateDict] = []

    def read() -> Message:
        deadline, began = Deadline.after(WORK * options.timeout_s), time.monotonic()
        loaded, nbytes = _read(plan, options, allow, deadline)
        text = "rank %s: load from %s: num_tensors %d, nbytes %d, seconds %.3f"
        figures = len(plan.reads), nbytes, time.monotonic() - began
        logger.log(comm.report_level, text, comm.global_ranks[comm.rank], name, *figures)
        results.append(finish(mapped_values(lambda value: loaded[id(value)], plan.state)))
        return plan.converted or None

    converted = run_and_gather(comm, read, is_sparse=True, follows=True)  # 2
    if any(converted):
        warn_of_conversions(comm, name, filter(None, converted))
    return results[0]


def _read(
    plan: LoadPlan, options: Options, allow: Allowed, deadline: Deadline
) -> tuple[dict[int, Any], int]:
    """Fill every tensor; what stands for each value, by its ``id``, and bytes. Rank-local."""
    checkpoint = plan.checkpoint
    loaded = {id(tensor): result for tensor, _, result in plan.reads}
    reads: list[TensorRead] = []
    for tensor, read, result in plan.reads:
        if read.is_padded:
            result.detach().zero_()
        if read.source is not None:
            part = read.part_of(result, tensor.prepend_axis_num)
            reads.append((read.array, read.source, part))

    is_whole = type(checkpoint) is PackCheckpoint  # a base may be of another format

    def read_object(wanted: Any) -> None:
        name = object_id(wanted)
        path, content = checkpoint.object_path(name), checkpoint.object_content(name)
        loaded[id(wanted)] = load_content(content, path, name.unique_key, (), is_whole=is_whole)

    def fill() -> None:
        run_reads(checkpoint.begin_reads, reads, options, deadline)
        jobs = [Job(o.key, o.unique_key, partial(read_object, o)) for o in plan.objects]
        Transfer(jobs, 1).wait(deadline.left_s)

    with allowing(allow):  # once, since the list is long
        checkpoint.save.read(fill, ENDING * options.timeout_s)
    return loaded, sum(part.numel() * array.dtype.itemsize for array, _, part in reads)


def matched(
    tensors: Iterable[Any],
    specs: Iterable[ShardSpec],
    stored: Mapping[str, ArraySpec],
    *,
    is_strict: bool,
) -> tuple[list[ReadItem], Conversions]:
    """How ShardedTensors are filled from stored arrays, and what that converts.

    Decides for checkpoints of every kind what may be loaded into what: errors are those of
    ``build_read_item`` and ``conversions``.
    """
    reads = [build_read_item(spec, stored[spec.id.key]) for spec in specs]
    dtypes = {key: array.dtype.value for key, array in stored.items()}
    return reads, conversions(tensors, dtypes, is_strict=is_strict)


def conversions(
    tensors: Iterable[Any], stored: Mapping[str, str], *, is_strict: bool
) -> Conversions:
    """Dtype conversions of a load of ShardedTensors; ``stored`` has the dtypes of the arrays.

    With ``is_strict`` raises a PlanError that names the first.
    """
    dtypes = {(t.key, t.dtype if t.data is None else t.data.dtype) for t in tensors}
    wanted = [(key, str(dtype).removeprefix("torch.")) for key, dtype in dtypes]
    converted = sorted([key, stored[key], to] for key, to in wanted if stored.get(key, to) != to)
    if converted and is_strict:
        key, is_stored, is_wanted = converted[0]
        others = f"; {len(converted) - 1} more arrays differ" if len(converted) > 1 else ""
        raise PlanError(
            f"{key}: dtype {is_stored} in the checkpoint, {is_wanted} requested{others}; load it "
            "as it is stored, or without strict_dtype, which converts it",
            key=key,
        )
    return converted


def warn_of_conversions(
    comm: Communicator, checkpoint_dir: object, converted: Iterable[Conversions]
) -> None:
    """Log one warning, on the first rank, if any rank of a load has converted an array."""
    distinct = sorted({tuple(each) for of_rank in converted for each in of_rank})
    if not distinct or comm.rank != 0:
        return
    examples = distinct[:_NUM_EXAMPLES]
    named = ", ".join(f"{key} ({stored} to {wanted})" for key, stored, wanted in examples)
    text = (
        f"load from {checkpoint_dir}: arrays converted to the dtype requested: "
        f"{len({key for key, _, _ in distinct})}, such as {named}; strict_dtype=True makes this an "
        "error"
    )
    logger.warning("%s", text)


def destination(tensor: Any) -> torch.Tensor:
    """The tensor that a load fills: the ShardedTensor's own data, or a new one on the CPU.

    Where Megatron-Core's torch_dist has given the data its prepended dims, it is a view of that.
    Errors are those of ``require_fillable``.
    """
    stated = tuple(tensor.local_shape)
    data: torch.Tensor | None = tensor.data
    if data is None:
        return torch.empty(stated, dtype=tensor.dtype, device="cpu")
    require_fillable([tensor])
    return data if tuple(data.shape) == stated else data.detach()[(0,) * tensor.prepend_axis_num]


def require_fillable(values: Iterable[Any]) -> None:
    """Raise unless a load can fill the data of the ShardedTensors among the values.

    A PlanError if one has another shape than its ShardedTensor says, or its elements do not lie in
    memory of their own.
    """
    for value in values:
        data = value.data
        if data is None or not isinstance(value, ShardedTensor):
            continue
        require_plain(data, key=value.key, is_filled=True)
        stated, found = tuple(value.local_shape), tuple(data.shape)
        if found not in {stated, (1,) * value.prepend_axis_num + stated}:
            raise PlanError(
                f"{value.key}: its data has shape {found}, its local_shape is {stated}",
                key=value.key,
            )
