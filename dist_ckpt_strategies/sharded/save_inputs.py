"""What each rank brings to a save, and the plan that follows from what all of them bring."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from dist_ckpt_strategies.comm.base import Communicator, Message
from dist_ckpt_strategies.config import Options
from dist_ckpt_strategies.core.array import ObjectId, RankShards, ShardId
from dist_ckpt_strategies.core.chunk_grids import ChunkLayout
from dist_ckpt_strategies.device import require_plain
from dist_ckpt_strategies.errors import DuplicateWriterError, PlanError
from dist_ckpt_strategies.formats.checkpoint_writer import CheckpointWriter
from dist_ckpt_strategies.formats.locations import Location
from dist_ckpt_strategies.formats.objects import Allowed
from dist_ckpt_strategies.megatron.shards import (
    StateDict,
    is_main_message,
    message_of,
    object_from_message,
    shard_data,
    shard_from_message,
    sharded_values,
    value_from_message,
)
from dist_ckpt_strategies.sharded.checks import require_valid
from dist_ckpt_strategies.sharded.plan_manifest import ManifestPlan, build_manifest_plan
from dist_ckpt_strategies.sharded.plan_save import ObjectPlacement, SavePlan, build_save_plan
from dist_ckpt_strategies.sharded.save_cache import SaveCache


@dataclass(frozen=True, slots=True)
class CommonState:
    """What every rank holds alike.

    Attributes:
        compared: what ranks compare with each other; None where they do not.
        digest: of that.
        content: of its file, on the first rank; None where ``save`` writes it.
        save: writes it to the place of the save, called on every rank; None where ``content`` is
            what the first rank writes.
    """

    compared: StateDict | None
    digest: str
    content: bytes | None
    save: Callable[[Location], None] | None


@dataclass(frozen=True, slots=True)
class SaveInputs:
    """What one rank brings to a save.

    Attributes:
        state: its ShardedTensors and ShardedObjects.
        writer: writes the checkpoint.
        options: timeout and memory budget.
        cache: the plan of the last save; it is used again where every rank saves the same shards.
        allow: further classes that objects may be of.
        validates: whether Megatron-Core's own checks of the sharding are run too.
        common: the common state; None where Megatron-Core's own save has written it.
        marker: content of ``metadata.json``; None where Megatron-Core's own save writes it.
    """

    state: StateDict
    writer: CheckpointWriter
    options: Options
    cache: SaveCache
    allow: Allowed = ()
    validates: bool = False
    common: CommonState | None = None
    marker: bytes | None = None


@dataclass(frozen=True, slots=True)
class LocalShards:
    """A rank's shards.

    Attributes:
        messages: the description of each, as other ranks are sent it.
        tensors: of each the data, if this rank's replica is a tensor and the one that is written.
        objects: what is stored of its main replicas of objects.
    """

    messages: list[Message]
    tensors: list[torch.Tensor | None]
    objects: dict[ObjectId, bytes]


@dataclass(frozen=True, slots=True)
class Planned:
    """One rank's share of a plan, and what it followed from.

    Attributes:
        own: digest of what this rank holds.
        digest: of what all ranks hold.
        plan: this rank's share.
        shards: names its tensors, in the order of LocalShards.
        keys: of all arrays and objects.
        manifest: which rank writes which segment of the manifest.
    """

    own: str
    digest: str
    plan: SavePlan
    shards: tuple[ShardId | None, ...]
    keys: frozenset[str]
    manifest: ManifestPlan


def planned_save(
    comm: Communicator, everyone: Sequence[Message], *, own: str = "", group: str = ""
) -> Planned:
    """The plan that follows from what all ranks hold. Rank-local.

    Args:
        comm: ranks that save together.
        everyone: their inputs, as gathered.
        own: digest of this rank's.
        group: digest of all of them.

    Raises:
        PlanError: the main replicas do not make up the arrays.
    """
    requests: list[RankShards] = []
    objects: list[ObjectPlacement] = []
    names: tuple[ShardId | None, ...] = ()
    for rank, (messages, *_) in enumerate(everyone):
        global_rank = comm.global_rank(rank)
        shards = list(map(shard_from_message, messages))
        requests.append(RankShards(global_rank, tuple(s for s in shards if s is not None)))
        objects += [
            ObjectPlacement(object_from_message(message), global_rank)
            for message, shard in zip(messages, shards, strict=True)
            if shard is None and is_main_message(message)
        ]
        if rank == comm.rank:
            names = tuple(None if shard is None else shard.id for shard in shards)
    budget = min(budget for _, budget, *_ in everyone)
    layouts = sorted({layout for _, _, layout, _ in everyone})
    if len(layouts) > 1:
        raise PlanError(f"ranks save in different forms: {' and '.join(layouts)}")
    plan = build_save_plan(
        requests, objects, max_inflight_bytes=budget, chunk_layout=ChunkLayout(layouts[0])
    )
    if any(validates for *_, validates in everyone):
        require_valid([list(map(value_from_message, messages)) for messages, *_ in everyone])
    arrays = [creation.array for creation in plan.creations]
    object_keys = [found.id.key for found in objects]
    manifest = (
        ManifestPlan(("",), (0,))
        if layouts[0] == ChunkLayout.WHOLE.value
        else build_manifest_plan(arrays, object_keys, comm.size)
    )
    keys = frozenset(array.key for array in arrays).union(object_keys)
    share = plan.share_of(comm.global_rank(comm.rank))
    return Planned(own, group, share, names, keys, manifest)


def local_shards(state_dict: StateDict, dump: Callable[..., bytes]) -> LocalShards:
    """This rank's shards, and its main replicas of objects, dumped.

    Raises:
        PlanError: a value cannot be stored.
        DuplicateWriterError: this rank has two main replicas of an object's shard.
    """
    messages: list[Message] = []
    tensors: list[torch.Tensor | None] = []
    objects: dict[ObjectId, bytes] = {}
    for value in sharded_values(state_dict):
        message = message_of(value)
        messages.append(message)
        tensors.append(None)
        is_tensor = shard_from_message(message) is not None
        if not is_main_message(message):
            continue
        if is_tensor:
            if value.data is not None:
                require_plain(value.data, key=value.key)
            tensors[-1] = shard_data(value)
            continue
        name = object_from_message(message)
        if name in objects:
            raise DuplicateWriterError(
                f"{name.unique_key}: two main replicas on this rank; give one of them another "
                "replica_id",
                key=name.key,
            )
        objects[name] = dump(value.data, name=name.unique_key)
    return LocalShards(messages, tensors, objects)
