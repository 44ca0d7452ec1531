"""Save a sharded state dict: describe and plan, write, commit; at once or in the background.

A save takes these collectives, in this order: one gather in which every rank describes its shards;
where the last plan does not fit, another with all of it, and a check of the new plan; the writes;
for ("zarr", 2) an exchange of what the ranks know of their files; the commit.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from dist_ckpt_strategies.comm.agree import agree, agree_and_gather, agree_on_first
from dist_ckpt_strategies.comm.base import (
    Bytes,
    Communicator,
    Message,
    Receive,
    Send,
    report_level,
    who_is_where,
)
from dist_ckpt_strategies.comm.process_group import is_distributed
from dist_ckpt_strategies.config import Options
from dist_ckpt_strategies.core.array import ObjectId, RankShards, ShardId
from dist_ckpt_strategies.core.chunk_grids import ChunkLayout
from dist_ckpt_strategies.core.report import SaveReport
from dist_ckpt_strategies.device import require_plain
from dist_ckpt_strategies.errors import DuplicateWriterError, PlanError, StorageError
from dist_ckpt_strategies.formats.checkpoint_writer import CheckpointWriter
from dist_ckpt_strategies.formats.locations import Location
from dist_ckpt_strategies.formats.objects import Allowed
from dist_ckpt_strategies.megatron.flow import require_equal_common
from dist_ckpt_strategies.megatron.process_state import parallel_sizes
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
from dist_ckpt_strategies.megatron.types import ShardedTensor
from dist_ckpt_strategies.sharded.async_request import RUNNING_SAVES
from dist_ckpt_strategies.sharded.checks import VALIDATED, digest_of, require_valid
from dist_ckpt_strategies.sharded.plan_manifest import ManifestPlan, build_manifest_plan
from dist_ckpt_strategies.sharded.plan_save import SavePlan, build_save_plan
from dist_ckpt_strategies.sharded.save_cache import SaveCache
from dist_ckpt_strategies.sharded.write_plan import Tensors, report_of, write_plan
from dist_ckpt_strategies.storage.base import ArrayWriter
from dist_ckpt_strategies.storage.time_limit import WORK, clean_up_limit, restart_limit, uncounted

logger = logging.getLogger(__name__)

_EAGER_NBYTES = 4 << 20
"""What ranks know of the files of a save travels with a gather up to this many bytes, all ranks
together; what is larger is sent to the rank that writes it."""


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
class Planned:
    """One rank's share of a plan, and what it followed from.

    Attributes:
        own: digest of what this rank holds.
        digest: of what all ranks hold.
        plan: this rank's share.
        shards: names its tensors, in the order of its state dict; None for an object.
        keys: of all arrays and objects.
        manifest: which rank writes which segment of the manifest.
        report: what this rank writes, but for the seconds.
    """

    own: str
    digest: str
    plan: SavePlan
    shards: tuple[ShardId | None, ...]
    keys: frozenset[str]
    manifest: ManifestPlan
    report: SaveReport


class ShardedSave:
    """One save, in steps. ``describe`` is rank-local and comes first; the others are collective.

    Args:
        comm: ranks that save together.
        inputs: what this rank brings.

    Attributes:
        planned: the plan, after ``begin``.
    """

    planned: Planned

    def __init__(self, comm: Communicator, inputs: SaveInputs) -> None:
        self.comm = comm
        self.inputs = inputs
        self.save_id = ""
        self._messages: list[Message] = []
        self._tensors: list[torch.Tensor | None] = []
        self._objects: dict[ObjectId, bytes] = {}
        self._own = ""
        self._segments: Mapping[int, bytes] = {}

    def describe(self) -> Message:
        """What the other ranks have to know at first. It waits for saves in the background.

        Raises:
            PlanError: a value cannot be stored.
            UnsafeObjectError: an object needs a class that a load would refuse.
            StorageError: an earlier checkpoint there cannot be invalidated.
        """
        inputs, writer = self.inputs, self.inputs.writer
        with uncounted():
            RUNNING_SAVES.wait(writer.root, WORK * inputs.options.timeout_s)
        for value in sharded_values(inputs.state):
            self._take(value)
        self._own, last = digest_of(self._facts()), inputs.cache.planned
        if self.comm.rank == 0:
            self.save_id = writer.place.new_save_id()
            if last is not None and last.own == self._own:
                self._begin_writing(last)
        common = inputs.common.digest if inputs.common else ""
        return [self._own, last and last.digest, self.save_id, common]

    def begin(self, answers: Sequence[Message]) -> None:
        """Make the plan, and the place that the save goes to. Collective.

        Args:
            answers: what ``describe`` has returned on every rank.

        Raises:
            PlanError: the main replicas do not make up the arrays, or common states differ.
            CheckpointExistsError: the directory holds other arrays, and no marker.
        """
        comm, cache, common = self.comm, self.inputs.cache, self.inputs.common
        owns, lasts, save_ids, digests = zip(*answers, strict=True)
        self.save_id = save_ids[0]
        self.inputs.writer.place.save_id = self.save_id
        if common is not None and len(set(digests)) > 1 and is_distributed():
            # Bytes that differ may be equal values. Megatron-Core compares them by a broadcast.
            agree(comm, partial(require_equal_common, common.compared or {}))
        group = digest_of(owns)
        if any(last != group for last in lasts):
            everyone = comm.all_gather(self._facts())
            cache.planned = None
            cache.planned = agree(comm, partial(self._new_plan, group, everyone))
        assert cache.planned is not None  # noqa: S101 - another plan would have another digest
        self.planned = cache.planned

    def abandon(self) -> None:
        """Remove what ``describe`` and ``begin`` have made. Rank-local; an error is logged."""
        if not self.save_id or self.comm.rank != 0:
            return
        try:
            with clean_up_limit():
                self.inputs.writer.place.abandon()
        except StorageError as error:
            logger.warning(
                "%s: what a refused save has made stays: %s", self.inputs.writer.root, error
            )

    @property
    def tensors(self) -> Tensors:
        """This rank's main replicas, by their names."""
        named = zip(self.planned.shards, self._tensors, strict=True)
        return {name: data for name, data in named if name is not None and data is not None}

    def run(self) -> SaveReport:
        """Write everything, and commit it. Collective.

        Raises:
            StorageError: a write failed here; a PeerError of the same class on the other ranks.
        """
        started = time.monotonic()
        described = write_plan(
            self.planned.plan,
            self.tensors,
            self.open_arrays,
            self.comm,
            self.inputs.options,
            also=self.write_small_files,
            finish=self.describe_files,
        )
        self.complete(described)
        return self.log_report(time.monotonic() - started)

    def log_report(self, seconds: float) -> SaveReport:
        """Log what this rank has written, in so many seconds; returns that. Rank-local."""
        me = self.comm.global_rank(self.comm.rank)
        report = replace(self.planned.report, seconds=seconds)
        where = self.inputs.writer.root
        logger.log(report_level(self.comm), "rank %s: save to %s: %s", me, where, report)
        return report

    def release_tensors(self) -> None:
        """Keep no reference to a tensor: all of them have been copied. Rank-local."""
        self.inputs = replace(self.inputs, state={})
        self._tensors = []

    def open_arrays(self) -> ArrayWriter:
        """What writes arrays to the place that the first rank has made. Rank-local.

        Raises:
            StorageError: this rank does not see it.
        """
        self.inputs.writer.require(f"rank {self.comm.global_rank(0)}")
        return self.inputs.writer.arrays

    def write_small_files(self) -> None:
        """Write this rank's objects, and on the first rank the common state. Rank-local."""
        inputs = self.inputs
        inputs.writer.write_objects(self._objects)
        if inputs.common and inputs.common.content is not None:
            inputs.writer.write_common(inputs.common.content)

    def describe_files(self) -> Message:
        """What this rank knows of each segment of the manifest, or its size. Rank-local.

        A description that is small enough travels with the gather that follows.
        """
        planned = self.planned
        self._segments = self.inputs.writer.described(
            planned.plan.arrays, planned.manifest.segment_of
        )
        limit = _EAGER_NBYTES // self.comm.size
        found = sorted(self._segments.items())
        return [[n, c.decode() if len(c) <= limit else len(c)] for n, c in found] or None

    def complete(self, described: Sequence[Message]) -> None:
        """Write the manifest, and make the save the checkpoint's content. Collective.

        Args:
            described: what ``describe_files`` has returned on every rank.
        """
        comm, writer, common = self.comm, self.inputs.writer, self.inputs.common
        if common is not None and common.save is not None:
            save_common = common.save
            agree(comm, lambda: save_common(writer.place.location))
        manifest = self.planned.manifest
        received = self._received_segments(described)

        def write_segments() -> list[Any]:
            return [
                writer.write_segment(number, manifest.firsts[number], received.get(number, []))
                for number, owner in enumerate(manifest.owners)
                if owner == comm.rank
            ]

        def commit(entries: Sequence[Any]) -> None:
            layout = {"ranks": comm.size, **parallel_sizes()}
            writer.write_index(entries, layout, common.content if common else None)
            writer.place.commit(self.inputs.marker)

        if set(manifest.owners) == {0}:
            agree_on_first(comm, lambda: commit(write_segments()))
            return
        answers = agree_and_gather(comm, write_segments)
        agree_on_first(comm, lambda: commit([entry for found in answers for entry in found]))

    def _received_segments(self, described: Sequence[Message]) -> dict[int, list[bytes]]:
        """What all ranks know of the segments that this one writes. Collective."""
        me, owners = self.comm.rank, self.planned.manifest.owners
        found: dict[int, list[bytes]] = defaultdict(list)
        incoming: list[tuple[int, int, int]] = []
        is_any_large = False
        for rank, of_rank in enumerate(described):
            for n, text in of_rank or ():
                is_large = isinstance(text, int)
                is_any_large |= is_large
                if owners[n] == me and is_large and rank != me:
                    incoming.append((n, rank, text))
                elif owners[n] == me:
                    found[n].append(self._segments[n] if is_large else text.encode())
        if not is_any_large:
            return found
        limit = _EAGER_NBYTES // self.comm.size

        def prepare() -> tuple[list[Send], list[Bytes]]:
            sends = [
                Send(owners[n], np.frombuffer(bytearray(content), np.uint8))
                for n, content in sorted(self._segments.items())
                if owners[n] != me and len(content) > limit
            ]
            return sends, [np.empty(nbytes, np.uint8) for _, _, nbytes in incoming]

        sends, buffers = agree(self.comm, prepare)
        pairs = list(zip(incoming, buffers, strict=True))
        self.comm.exchange(sends, [Receive(rank, buffer) for (_, rank, _), buffer in pairs])
        for (n, _, _), buffer in pairs:
            found[n].append(buffer.tobytes())
        return found

    def _take(self, value: Any) -> None:
        """Describe a ShardedTensor or ShardedObject; dump the object of a main replica."""
        message = message_of(value)
        self._messages.append(message)
        self._tensors.append(None)
        if not is_main_message(message):
            return
        if isinstance(value, ShardedTensor):
            if value.data is not None:
                require_plain(value.data, key=value.key)
            self._tensors[-1] = shard_data(value)
            return
        name = object_from_message(message)
        if name in self._objects:
            raise DuplicateWriterError(
                f"{name.unique_key}: two main replicas on this rank; give one of them another "
                "replica_id",
                key=name.key,
            )
        self._objects[name] = self.inputs.writer.dump(
            value.data, name=name.unique_key, allow=self.inputs.allow
        )

    def _facts(self) -> list[Any]:
        """What the plan of a save has to know of this rank, of JSON types."""
        inputs = self.inputs
        budget, layout = inputs.options.max_inflight_bytes, inputs.writer.chunk_layout.value
        return [self._messages, budget, layout, inputs.validates]

    def _begin_writing(self, planned: Planned) -> None:
        """Make the place of the save; on the first rank."""
        writer = self.inputs.writer
        writer.place.save_id = self.save_id
        writer.begin(planned.keys)

    def _new_plan(self, group: str, everyone: Sequence[Message]) -> Planned:
        planned = planned_save(self.comm, everyone, own=self._own, group=group)
        if self.inputs.validates:
            VALIDATED.last = digest_of([digest_of(messages) for messages, *_ in everyone])
        if self.comm.rank == 0:
            self._begin_writing(planned)
        return planned


def begun_save(
    comm: Communicator, open_inputs: Callable[[], SaveInputs | None]
) -> ShardedSave | None:
    """A save that is planned, and nothing of it written. Collective.

    Args:
        comm: ranks that save together.
        open_inputs: gives what this rank brings; may raise. None: it is saved in another way.

    Returns:
        None where every rank saves in another way.

    Raises:
        PlanError: some ranks do.
    """
    saves: list[ShardedSave] = []

    def describe() -> Message:
        inputs = open_inputs()
        if inputs is None:
            return None
        saves.append(ShardedSave(comm, inputs))
        return saves[0].describe()

    try:
        answers = agree_and_gather(comm, describe)
        restart_limit()
        if None not in answers:
            saves[0].begin(answers)
            return saves[0]
        _require_no_answer(comm, answers)
    except BaseException:
        for save in saves:
            save.abandon()
        raise
    return None


def _require_no_answer(comm: Communicator, answers: Sequence[Message]) -> None:
    kinds = [answer is None for answer in answers]
    if not all(kinds):
        texts = ["a save by another strategy" if kind else "a save by zarr" for kind in kinds]
        raise PlanError(f"expected one strategy, found {who_is_where(comm, kinds, texts)}")


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
    objects: list[tuple[ObjectId, int]] = []
    names: tuple[ShardId | None, ...] = ()
    for rank, (messages, *_) in enumerate(everyone):
        global_rank = comm.global_rank(rank)
        shards = list(map(shard_from_message, messages))
        requests.append(RankShards(global_rank, tuple(s for s in shards if s is not None)))
        objects += [
            (object_from_message(message), global_rank)
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
    object_keys = [object_id.key for object_id, _ in objects]
    manifest = (
        ManifestPlan(("",), (0,))
        if layouts[0] == ChunkLayout.WHOLE.value
        else build_manifest_plan(arrays, object_keys, comm.size)
    )
    keys = frozenset(array.key for array in arrays).union(object_keys)
    me = comm.global_rank(comm.rank)
    share = plan.share_of(me)
    return Planned(own, group, share, names, keys, manifest, report_of(share, me, 0.0))
