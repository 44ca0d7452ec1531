"""What the ranks bring to a save, and the plan that follows from it; for either format."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from dist_ckpt_strategies.comm.agree import agree
from dist_ckpt_strategies.comm.base import Communicator
from dist_ckpt_strategies.config import Options, limit_of_wait
from dist_ckpt_strategies.core.array import (
    ObjectId,
    RankShards,
    ShardId,
    ShardSpec,
    shard_from_wire,
    shard_to_wire,
)
from dist_ckpt_strategies.device import Slot, require_plain, torch_dtype
from dist_ckpt_strategies.errors import DuplicateWriterError, PlanError, StorageError
from dist_ckpt_strategies.local.background import BackgroundWork
from dist_ckpt_strategies.local.snapshot import HostSnapshot, SharedMemory
from dist_ckpt_strategies.megatron.bases import ShardedObject
from dist_ckpt_strategies.megatron.shards import (
    StateDict,
    is_main,
    object_id,
    shard_data,
    shard_spec,
    sharded_values,
)
from dist_ckpt_strategies.sharded.plan_grids import Cutting
from dist_ckpt_strategies.sharded.plan_manifest import ManifestPlan, build_manifest_plan
from dist_ckpt_strategies.sharded.plan_save import (
    ChunkWrite,
    ObjectHolding,
    SavePlan,
    build_save_plan,
)
from dist_ckpt_strategies.sharded.writer_main import SharedBytes, is_supported
from dist_ckpt_strategies.sharded.writer_process import WriterProcess, start_writer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Holdings:
    """What one rank brings to a save; its objects as the bytes that will be written."""

    specs: tuple[ShardSpec, ...]
    tensors: dict[ShardId, torch.Tensor]
    objects: dict[ObjectId, bytes]


Facts = list[Any]
"""What a rank holds, as far as the plan depends on it, of JSON types."""


@dataclass(frozen=True, slots=True)
class Planned:
    """One rank's share of a plan, and what it followed from.

    Attributes:
        facts: digest of what all ranks hold.
        plan: this rank's share.
        keys: of all arrays and objects.
        manifest: which rank lists what.
    """

    facts: str
    plan: SavePlan
    keys: frozenset[str]
    manifest: ManifestPlan


class SaveMemory:
    """What is kept from save to save, because a training run saves the same shards again and again.

    One to each strategy, or shared by those that save the same state.

    Attributes:
        last: the last plan.
        running: what writes behind training, if anything does; the snapshot is its own until it is
            done.
    """

    def __init__(self) -> None:
        self.last: Planned | None = None
        self._shared = SharedMemory() if is_supported() else None
        self._snapshot = HostSnapshot(self._shared.allocate) if self._shared else HostSnapshot()
        self.running: BackgroundWork[Any] | None = None
        self._process: WriterProcess | None = None
        self._has_process = True

    def reserve(self, writes: Sequence[ChunkWrite], is_cuda: bool) -> list[Slot]:  # noqa: FBT001 - run.save.Reserve
        """A place for each chunk; those of the save before are gone."""
        layouts = [(write.region.shape, torch_dtype(write.array.dtype)) for write in writes]
        try:
            return self._snapshot.slots(layouts, is_pinned=is_cuda)
        except StorageError as error:  # of shared memory: a limit on the size of files is one on it
            logger.warning("%s: threads of this process write instead of another process", error)
            self._shared, self._snapshot = None, HostSnapshot()
            return self._snapshot.slots(layouts, is_pinned=is_cuda)

    def staged_bytes(self) -> memoryview:
        """The memory that ``reserve`` has given places in."""
        return self._snapshot.memory.numpy().data

    def shared_bytes(self) -> SharedBytes | None:
        """The same, for another process; None where none can have it."""
        return None if self._shared is None else self._shared.shared

    def get_ready(self, options: Options) -> None:
        """Return when the asynchronous save before has written all it has to, well or not.

        A process that will write starts meanwhile.

        Raises:
            SaveTimeoutError: that save goes on for most of the time limit.
        """
        if options.writer_process:
            self.writer_process()
        if self.running is not None:
            self.running.wait(limit_of_wait(options.timeout_s), "the save before")

    def writer_process(self) -> WriterProcess | None:
        """The process that writes for this one, started where there is none; None: it cannot be."""
        if self._has_process and (self._process is None or not self._process.is_usable):
            self._process = start_writer()
            self._has_process = self._process is not None
        return self._process


def facts_of(mine: Holdings, options: Options, cutting: Cutting) -> Facts:
    """What the plan of a save has to know of this rank."""
    shards = [shard_to_wire(spec) for spec in mine.specs]
    objects = [(found.key, found.offset, found.shape) for found in sorted(mine.objects)]
    return [shards, objects, options.max_inflight_bytes, cutting.value]


def digest_of(facts: Any) -> str:
    """What tells facts apart."""
    return xxhash.xxh3_128_hexdigest(json.dumps(facts).encode())


def planned_save(
    comm: Communicator,
    own: Facts,
    described: Sequence[tuple[str, str | None]],
    memory: SaveMemory,
) -> Planned:
    """The last plan, if all ranks have one that follows from what they hold now; else a new one.

    Collective.

    Args:
        comm: ranks that save together.
        own: what this rank holds.
        described: for each rank the digest of that, and what its last plan followed from.
        memory: this rank's last plan.
    """
    digest = digest_of([mine for mine, _ in described])
    if memory.last is not None and all(last == digest for _, last in described):
        return memory.last
    everyone = comm.all_gather(own)
    memory.last = None
    memory.last = agree(comm, lambda: _new_plan(comm, digest, everyone))
    return memory.last


def _new_plan(comm: Communicator, digest: str, everyone: Sequence[Facts]) -> Planned:
    requests: list[RankShards] = []
    holdings: list[ObjectHolding] = []
    for rank, (shards, objects, *_) in enumerate(everyone):
        global_rank = comm.global_rank(rank)
        requests.append(RankShards(global_rank, tuple(map(shard_from_wire, shards))))
        holdings += [
            ObjectHolding(ObjectId(key, tuple(offset), tuple(shape)), global_rank)
            for key, offset, shape in objects
        ]
    budget = min(budget for _, _, budget, _ in everyone)
    cuttings = sorted({cutting for *_, cutting in everyone})
    if len(cuttings) > 1:
        raise PlanError(f"ranks save in different forms: {' and '.join(cuttings)}")
    plan = build_save_plan(
        requests, holdings, max_inflight_bytes=budget, cutting=Cutting(cuttings[0])
    )
    arrays = [creation.array for creation in plan.creations]
    object_keys = [holding.id.key for holding in holdings]
    return Planned(
        digest,
        plan.share_of(comm.global_rank(comm.rank)),
        frozenset(array.key for array in arrays).union(object_keys),
        build_manifest_plan(arrays, object_keys, comm.size)
        if cuttings[0] != Cutting.WHOLE.value
        else ManifestPlan(("",), (0,)),
    )


def holdings_of(state_dict: StateDict, dump: Callable[..., bytes]) -> Holdings:
    """What this rank brings: its shards, and its main replicas of objects, dumped.

    Raises:
        PlanError: a value cannot be stored.
        DuplicateWriterError: this rank has two main replicas of an object's shard.
    """
    specs: list[ShardSpec] = []
    tensors: dict[ShardId, torch.Tensor] = {}
    objects: dict[ObjectId, bytes] = {}
    for value in sharded_values(state_dict):
        if isinstance(value, ShardedObject):
            if is_main(value):
                name = object_id(value)
                _require_new(name, objects)
                objects[name] = dump(value.data, name=name.unique_key)
            continue
        spec = shard_spec(value)
        specs.append(spec)
        if spec.is_main:
            if value.data is not None:
                require_plain(value.data, key=spec.key)
            tensors[spec.id] = shard_data(value)
    return Holdings(tuple(specs), tensors, objects)


def _require_new(name: ObjectId, objects: Mapping[ObjectId, bytes]) -> None:
    if name in objects:
        raise DuplicateWriterError(
            f"{name.unique_key}: two main replicas on this rank; give one of them another "
            "replica_id",
            key=name.key,
        )
