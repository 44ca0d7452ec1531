"""Save a sharded state dict: describe and plan, write, commit; at once or in the background.

A save takes these collectives, in this order: one gather in which every rank describes its shards;
where the last plan does not fit, another with all of it, and a check of the new plan; the writes;
for ("zarr", 2) an exchange of what the ranks know of their files; the commit.
"""

from __future__ import annotations

import logging
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
from dist_ckpt_strategies.config import Options, limit_of_wait
from dist_ckpt_strategies.core.array import ObjectId, RankShards, ShardId
from dist_ckpt_strategies.core.report import SaveReport
from dist_ckpt_strategies.device import require_plain
from dist_ckpt_strategies.errors import DuplicateWriterError, PlanError
from dist_ckpt_strategies.formats.checkpoint_writer import CheckpointWriter
from dist_ckpt_strategies.formats.locations import Location, make_directory
from dist_ckpt_strategies.formats.objects import Allowed
from dist_ckpt_strategies.megatron.errors import raises_megatron_errors
from dist_ckpt_strategies.megatron.flow import require_equal_common
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
from dist_ckpt_strategies.sharded.async_request import (
    RUNNING_SAVES,
    BackgroundWork,
    LocalSaveRequest,
    SaveName,
    agree_to_start,
    yield_to_training,
)
from dist_ckpt_strategies.sharded.checks import VALIDATED, digest_of, require_valid
from dist_ckpt_strategies.sharded.plan_grids import Cutting
from dist_ckpt_strategies.sharded.plan_manifest import ManifestPlan, build_manifest_plan
from dist_ckpt_strategies.sharded.plan_save import ObjectHolding, SavePlan, build_save_plan
from dist_ckpt_strategies.sharded.save_cache import SaveCache
from dist_ckpt_strategies.sharded.staged import StagedSave, WriteJob, Written
from dist_ckpt_strategies.sharded.write_plan import Tensors, report_of, stage_plan, write_plan
from dist_ckpt_strategies.sharded.writer_process import outcome_of
from dist_ckpt_strategies.storage.base import ArrayWriter
from dist_ckpt_strategies.storage.time_limit import restart_limit, time_left, time_limit

logger = logging.getLogger(__name__)


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


class ShardedSave:
    """One save, in steps. ``describe`` is rank-local and comes first; the others are collective.

    Args:
        comm: ranks that save together.
        inputs: what this rank brings.
    """

    def __init__(self, comm: Communicator, inputs: SaveInputs) -> None:
        self.comm = comm
        self.inputs = inputs
        self.save_id = ""
        self._shards = LocalShards([], [], {})
        self._own = ""
        self._planned: Planned | None = None
        self._segments: Mapping[int, bytes] = {}

    def describe(self) -> Message:
        """What the other ranks have to know at first. It waits for saves in the background.

        Raises:
            PlanError: a value cannot be stored.
            UnsafeObjectError: an object needs a class that a load would refuse.
            StorageError: an earlier checkpoint there cannot be invalidated.
        """
        inputs, writer = self.inputs, self.inputs.writer
        RUNNING_SAVES.wait(writer.root, time_left(inputs.options.timeout_s))
        self._shards = local_shards(inputs.state, partial(writer.dump, allow=inputs.allow))
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
        self.inputs.writer.place.join(self.save_id)
        if common is not None and len(set(digests)) > 1 and is_distributed():
            # Bytes that differ may be equal values. Megatron-Core compares them by a broadcast.
            agree(comm, partial(require_equal_common, common.compared or {}))
        group = digest_of(owns)
        if any(last != group for last in lasts):
            everyone = comm.all_gather(self._facts())
            cache.planned = None
            cache.planned = agree(comm, partial(self._new_plan, group, everyone))
        self._planned = cache.planned

    def abandon(self) -> None:
        """Remove what ``describe`` may have made. Rank-local."""
        if self.save_id and self.comm.rank == 0:
            self.inputs.writer.place.abandon()

    @property
    def planned(self) -> Planned:
        """The plan, after ``begin``."""
        assert self._planned is not None  # noqa: S101 - see above
        return self._planned

    @property
    def tensors(self) -> Tensors:
        """This rank's main replicas, by their names."""
        named = zip(self.planned.shards, self._shards.tensors, strict=True)
        return {name: data for name, data in named if name is not None and data is not None}

    def run(self) -> SaveReport:
        """Write everything, and commit it. Collective.

        Raises:
            StorageError: a write failed here; a PeerError of the same class on the other ranks.
        """
        started = time.monotonic()
        plan, comm = self.planned.plan, self.comm
        sizes = write_plan(
            plan,
            self.tensors,
            self.open_arrays,
            comm,
            self.inputs.options,
            also=self.write_small_files,
            finish=self.describe_files,
        )
        self.complete(sizes)
        me = comm.global_rank(comm.rank)
        report = report_of(plan, me, time.monotonic() - started)
        where = self.inputs.writer.root
        logger.log(report_level(comm), "rank %s: save to %s: %s", me, where, report)
        return report

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
        inputs.writer.write_objects(self._shards.objects)
        if inputs.common and inputs.common.content is not None:
            inputs.writer.write_common(inputs.common.content)

    def describe_files(self) -> Message:
        """Sizes of what this rank knows of each segment of the manifest. Rank-local."""
        planned = self.planned
        self._segments = self.inputs.writer.described(
            planned.plan.arrays,
            planned.manifest.part_of,
        )
        return [[n, len(content)] for n, content in sorted(self._segments.items())] or None

    def complete(self, sizes: Sequence[Message]) -> None:
        """Write the manifest, and make the save the checkpoint's content. Collective.

        Args:
            sizes: what ``describe_files`` has returned on every rank.
        """
        comm, writer, common = self.comm, self.inputs.writer, self.inputs.common
        if common is not None and common.save is not None:
            save_common = common.save
            agree(comm, lambda: save_common(writer.place.location))
        manifest = self.planned.manifest
        received = self._exchanged_segments(sizes)

        def write_segments() -> list[Any]:
            return [
                writer.write_segment(number, manifest.firsts[number], received.get(number, []))
                for number, owner in enumerate(manifest.owners)
                if owner == comm.rank
            ]

        def commit(entries: Sequence[Any]) -> None:
            writer.write_index(entries, comm.size, common.content if common else None)
            writer.place.commit(self.inputs.marker)

        if set(manifest.owners) == {0}:
            agree_on_first(comm, lambda: commit(write_segments()))
            return
        answers = agree_and_gather(comm, write_segments)
        agree_on_first(comm, lambda: commit([entry for found in answers for entry in found]))

    def _exchanged_segments(self, sizes: Sequence[Message]) -> dict[int, list[bytes]]:
        """What all ranks know of the segments that this one writes. Collective."""
        me, owners = self.comm.rank, self.planned.manifest.owners
        incoming: dict[tuple[int, int], Bytes] = {
            (rank, n): np.empty(nbytes, np.uint8)
            for rank, of_rank in enumerate(sizes)
            for n, nbytes in of_rank or ()
            if rank != me and owners[n] == me
        }
        sends = [
            Send(owners[n], np.frombuffer(bytearray(content), np.uint8))
            for n, content in sorted(self._segments.items())
            if owners[n] != me
        ]
        if any(sizes):
            receives = [Receive(rank, memory) for (rank, _), memory in incoming.items()]
            self.comm.exchange(sends, receives)
        found: dict[int, list[bytes]] = {}
        for n, content in self._segments.items():
            found.setdefault(n, []).append(content)
        for (_, n), memory in incoming.items():
            found.setdefault(n, []).append(memory.tobytes())
        return found

    def _facts(self) -> list[Any]:
        """What the plan of a save has to know of this rank, of JSON types."""
        inputs = self.inputs
        budget, layout = inputs.options.max_inflight_bytes, inputs.writer.cutting
        return [self._shards.messages, budget, layout, inputs.validates]

    def _begin_writing(self, planned: Planned) -> None:
        """Make the place of the save; on the first rank."""
        writer = self.inputs.writer
        writer.place.join(self.save_id)
        make_directory(writer.root)
        writer.begin(planned.keys)

    def _new_plan(self, group: str, everyone: Sequence[Message]) -> Planned:
        planned = planned_save(self.comm, everyone, own=self._own, group=group)
        if self.inputs.validates:
            VALIDATED.last = digest_of([digest_of(messages) for messages, *_ in everyone])
        if self.comm.rank == 0:
            self._begin_writing(planned)
        return planned


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
    objects: list[ObjectHolding] = []
    names: tuple[ShardId | None, ...] = ()
    for rank, (messages, *_) in enumerate(everyone):
        global_rank = comm.global_rank(rank)
        shards = list(map(shard_from_message, messages))
        requests.append(RankShards(global_rank, tuple(s for s in shards if s is not None)))
        objects += [
            ObjectHolding(object_from_message(message), global_rank)
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
        requests, objects, max_inflight_bytes=budget, cutting=Cutting(layouts[0])
    )
    if any(validates for *_, validates in everyone):
        require_valid([list(map(value_from_message, messages)) for messages, *_ in everyone])
    arrays = [creation.array for creation in plan.creations]
    object_keys = [found.id.key for found in objects]
    manifest = (
        ManifestPlan(("",), (0,))
        if layouts[0] == Cutting.WHOLE.value
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


Outcome = Callable[[], Written]
"""Returns what writing the arrays has returned, or raises what it raised."""


def begin_in_background(save: ShardedSave) -> LocalSaveRequest:
    """Copy what this rank will write to host memory, and write it in the background.

    Collective. When it returns the tensors may be overwritten. Slices of irregular shards move
    between ranks before it returns. Takes as much host memory as this rank's main replicas.

    Returns:
        The request, whose finalisation is collective; it raises on every rank if the save has
        failed on any, and then nothing becomes visible.
    """
    comm, inputs = save.comm, save.inputs
    staged = stage_plan(save.planned.plan, save.tensors, comm, inputs.cache.reserve)

    def prepare() -> BackgroundWork[Outcome]:
        save.open_arrays()
        write_arrays = _array_write(staged, inputs)

        def write() -> Outcome:
            yield_to_training()
            with time_limit(inputs.options.timeout_s):
                save.write_small_files()
                return write_arrays()

        return BackgroundWork(write, "dist-ckpt-save")

    work = inputs.cache.running = agree_to_start(comm, prepare)
    RUNNING_SAVES.add(inputs.writer.root, work)
    name = SaveName(save.save_id, f"the end of the save to {inputs.writer.root}")
    return LocalSaveRequest.of(
        comm, name, work, _Ending(save, work).finalise, inputs.options.timeout_s
    )


@dataclass(frozen=True, slots=True)
class _Ending:
    """What is left of an asynchronous save, for all ranks to do together.

    Where another save has begun in its place, maybe ended too, nothing there is touched.
    """

    save: ShardedSave
    work: BackgroundWork[Outcome]

    @raises_megatron_errors
    def finalise(self) -> None:
        comm, timeout_s = self.save.comm, self.save.inputs.options.timeout_s
        reports: list[SaveReport] = []

        def written() -> Message:
            self.work.wait(limit_of_wait(timeout_s))
            found = self.work.result()()
            reports.append(found.report)
            self.save.inputs.writer.take_digests(found.digests)
            if comm.rank == 0:
                self.save.inputs.writer.place.require_current()
            return self.save.describe_files()

        try:
            with time_limit(timeout_s):
                sizes = agree_and_gather(comm, written)
                restart_limit()
                self.save.complete(sizes)
        finally:
            self.work.forget_mark()
        me = comm.global_rank(comm.rank)
        logger.log(report_level(comm), "rank %s: %s", me, reports[0])


def _array_write(staged: StagedSave, inputs: SaveInputs) -> Callable[[], Outcome]:
    """What writes the arrays, for a thread to call.

    All that takes Python long is done here, or where the outcome is asked for: a busy thread keeps
    training waiting.
    """
    cache, writer, options = inputs.cache, inputs.writer, inputs.options
    shared = cache.shared_bytes()
    process = cache.writer_process() if options.writer_process and shared else None
    if process is None or shared is None or writer.open_elsewhere is None:
        job = WriteJob(staged, lambda: writer.arrays, options.timeout_s)
        return lambda: partial(_itself, job.run(cache.staged_bytes()))
    content = pickle.dumps(WriteJob(staged, writer.open_elsewhere, options.timeout_s))
    return lambda: partial(outcome_of, process.run(content, shared))


def _itself(written: Written) -> Written:
    return written
