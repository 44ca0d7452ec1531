"""Save a sharded state dict: describe and plan, write, commit; at once or in the background.

A save takes these collectives, in this order: one gather in which every rank describes its shards;
where the last plan does not fit, another with all of it, and a check of the new plan; the writes;
for ("zarr", 2) an exchange of what the ranks know of their files; the commit.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from dist_ckpt_strategies.comm.base import (
    Communicator,
    Message,
    Receive,
    Send,
    run_and_gather,
    run_collectively,
    run_on_first_rank,
)
from dist_ckpt_strategies.config import Options
from dist_ckpt_strategies.core.array import ArraySpec, ObjectId, RankShards, ShardId
from dist_ckpt_strategies.core.chunk_grids import ChunkLayout
from dist_ckpt_strategies.errors import DuplicateWriterError, StorageError
from dist_ckpt_strategies.formats.checkpoint_writer import CheckpointWriter
from dist_ckpt_strategies.formats.locations import Location
from dist_ckpt_strategies.formats.objects import Allowed
from dist_ckpt_strategies.megatron.shards import (
    StateDict,
    digest_of,
    is_main_message,
    message_of,
    object_from_message,
    parallel_sizes,
    shard_data,
    shard_from_message,
    sharded_values,
    value_from_message,
)
from dist_ckpt_strategies.megatron.types import ShardedTensor
from dist_ckpt_strategies.sharded.checks import (
    VALIDATED,
    different_strategies,
    require_valid,
    warn_of_differences,
)
from dist_ckpt_strategies.sharded.pack_save import is_packs
from dist_ckpt_strategies.sharded.plan import (
    ManifestPlan,
    SavePlan,
    build_manifest_plan,
    build_save_plan,
)
from dist_ckpt_strategies.sharded.transfer import assemble, elements, run_writes
from dist_ckpt_strategies.storage.files import COMMON_NAME
from dist_ckpt_strategies.storage.io_pool import WORK, clean_up_limit, restart_limit, uncounted

if TYPE_CHECKING:
    from dist_ckpt_strategies.sharded.async_request import BackgroundWork
    from dist_ckpt_strategies.sharded.async_save import SaveCache

logger = logging.getLogger(__name__)

_EAGER_NBYTES = 4 << 20
"""What ranks know of the files of a save travels with a gather up to this many bytes, all ranks
together; what is larger is sent to the rank that writes it."""

_FORMATS = {
    ChunkLayout.WHOLE.value: "format ('zarr', 1)",
    ChunkLayout.INNER.value: "format ('zarr', 2)",
    ChunkLayout.BOUNDED.value: "format ('zarr', 2), to a URL",
}


class RunningSaves:
    """The saves that this process writes in the background, by the place that they write to.

    Another save to the same place waits for them first, whichever strategy wrote them: one whose
    place is taken away while it writes leaves files behind. A save is not kept alive for this: the
    memory that it was written from goes with it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._places: WeakKeyDictionary[BackgroundWork[Any], str] = WeakKeyDictionary()

    def add(self, place: Location, work: BackgroundWork[Any]) -> None:
        """Note one that has begun."""
        with self._lock:
            self._places[work] = str(place)

    def wait(self, place: Location, options: Options) -> None:
        """Return when all that write to a place have ended, well or not. Rank-local.

        Raises a SaveTimeoutError if that takes longer than most of the time limit, of which it is
        no part.
        """
        if not self._places:
            return
        # By its name, as it is not to be looked up: see make_directories.
        name, deadline = str(place), time.monotonic() + WORK * options.timeout_s
        with self._lock:
            works = [work for work, known in self._places.items() if known == name]
        with uncounted():
            for work in works:
                work.wait(max(0.0, deadline - time.monotonic()))


RUNNING_SAVES = RunningSaves()
"""Those of this process."""


@dataclass(frozen=True, slots=True)
class CommonState:
    """What every rank holds alike.

    ``compared`` is what ranks compare with each other, by ``digest``; None where they do not.
    Either the first rank writes ``content`` to a file, or ``save``, called on every rank, writes it
    to the place of the save; the other one is None.
    """

    compared: StateDict | None
    digest: str
    content: bytes | None
    save: Callable[[Location], None] | None


@dataclass(frozen=True, slots=True)
class Planned:
    """One rank's share of a plan, and what it followed from.

    Attributes:
        own: digest of what this rank holds.
        digest: of what all ranks hold.
        shards: names its tensors, in the order of its state dict; None for an object.
        keys: of all arrays and objects, of all ranks.
        manifest: without segments in a format that has none.
        arrays: those that this rank creates or writes to.
        nbytes: payload that this rank writes.
    """

    own: str
    digest: str
    plan: SavePlan
    shards: tuple[ShardId | None, ...]
    keys: frozenset[str]
    manifest: ManifestPlan
    arrays: tuple[ArraySpec, ...]
    nbytes: int


@dataclass(eq=False)
class ShardedSave:
    """One save, in steps. ``describe`` is rank-local and comes first; the others are collective.

    The plan in ``cache`` is used again where every rank saves the same shards. ``allow`` has
    further classes that objects may be of. ``validates``: Megatron-Core's own checks of the
    sharding are run too. ``common`` and ``marker``, the content of ``metadata.json``, are None
    where Megatron-Core's own save writes them. ``save_id``, ``planned`` and ``tensors``, this
    rank's main replicas, are there after ``begin``.
    """

    comm: Communicator
    state: StateDict
    writer: CheckpointWriter
    cache: SaveCache
    allow: Allowed = ()
    is_async: bool = False
    validates: bool = False
    common: CommonState | None = None
    marker: bytes | None = None

    save_id: str = field(default="", init=False)
    planned: Planned = field(init=False)
    tensors: dict[ShardId, torch.Tensor] = field(default_factory=dict, init=False)
    _held: list[torch.Tensor | None] = field(default_factory=list, init=False)
    _objects: dict[ObjectId, bytes] = field(default_factory=dict, init=False)
    _described: list[Any] = field(default_factory=list, init=False)
    _own: str = field(default="", init=False)
    _segments: Mapping[int, bytes] = field(default_factory=dict, init=False)

    def describe(self) -> Message:
        """What the other ranks have to know at first. It waits for saves in the background.

        Raises a PlanError if a value cannot be stored, an UnsafeObjectError if a load would refuse
        the class of an object, and a StorageError if an earlier checkpoint cannot be invalidated.
        """
        writer, options = self.writer, self.writer.options
        if self.is_async:
            self.cache.get_ready(options)
        RUNNING_SAVES.wait(writer.root, options)
        if self.comm.rank == 0:  # before anything can be refused: see DirectoryPlace
            self.save_id = writer.place.new_save_id()
            writer.place.save_id = self.save_id
        messages = []
        for value in sharded_values(self.state):
            message = message_of(value)
            messages.append(message)
            data = None
            if is_main_message(message):
                if isinstance(value, ShardedTensor):
                    data = shard_data(value)
                else:
                    self._take_object(value, object_from_message(message))
            self._held.append(data)
        layout = writer.chunk_layout.value
        self._described = [messages, options.max_inflight_bytes, layout, self.validates]
        self._own, last = digest_of(self._described), self.cache.planned
        if self.comm.rank == 0 and last is not None and last.own == self._own:
            writer.place.begin(last.keys)
        common = self.common.digest if self.common else ""
        return [self._own, last and last.digest, self.save_id, common]

    def begin(self, answers: Sequence[Message]) -> None:
        """Make the plan, and the place that the save goes to. Collective.

        Raises a PlanError if the main replicas do not make up the arrays, or common states differ,
        and a CheckpointExistsError if the directory holds other arrays, and no marker.
        """
        comm, cache, common = self.comm, self.cache, self.common
        owns, lasts, save_ids, digests = zip(*answers, strict=True)
        self.save_id = save_ids[0]
        self.writer.place.save_id = self.save_id
        if common is not None and len(set(digests)) > 1:
            warn_of_differences(comm, common.compared, digests)
        group = digest_of(owns)
        if any(last != group for last in lasts):
            everyone = comm.all_gather(self._described)
            cache.planned = None
            cache.planned = run_collectively(comm, partial(self._new_plan, group, everyone))
        assert cache.planned is not None  # noqa: S101 - another plan would have another digest
        self.planned = cache.planned
        named = zip(self.planned.shards, self._held, strict=True)
        self.tensors = {name: data for name, data in named if name is not None and data is not None}

    def abandon(self) -> None:
        """Remove what has been made, unless its commit has begun. Rank-local; errors are logged."""
        if not self.save_id or self.comm.rank != 0:
            return
        try:
            with clean_up_limit():
                self.writer.place.abandon()
        except StorageError as error:
            logger.warning(
                "%s: files of the given-up save cannot be removed: %s", self.writer.root, error
            )

    def run(self) -> None:
        """Write everything, and commit it. Collective: one where no chunk is assembled.

        A write that fails is a StorageError; on the other ranks a PeerError of the same class.
        """
        started = time.monotonic()
        comm, writer, plan, tensors = self.comm, self.writer, self.planned.plan, self.tensors
        options, owner = writer.options, f"rank {comm.global_ranks[0]}"

        def write() -> Message:
            if not plan.rounds:
                writer.require(owner)
            whole = [
                (write.array, write.region, elements(write.slices[0], tensors))
                for write in plan.writes
                if not plan.rounds or write.is_whole_shard
            ]
            run_writes(writer.arrays, whole, options, [c.array for c in plan.creations])
            self.write_small_files()
            writer.arrays.begin_syncs(self.planned.arrays).wait(options.timeout_s)
            return self.describe_files()

        try:
            if plan.rounds:
                run_collectively(comm, lambda: writer.require(owner))
                assemble(plan, tensors, comm, lambda some: run_writes(writer.arrays, some, options))
            described = run_and_gather(comm, write, is_sparse=True)
            self.complete(described, lambda: time.monotonic() - started)
        except StorageError:
            self.abandon()
            raise

    def release_tensors(self) -> None:
        """Keep no reference to a tensor: all of them have been copied. Rank-local."""
        self.state, self._held, self.tensors = {}, [], {}

    def write_small_files(self) -> None:
        """Write this rank's objects, and on the first rank the common state. Rank-local."""
        if self._objects:
            self.writer.write_objects(self._objects)
        if self.common and self.common.content is not None:
            self.writer.store.write(COMMON_NAME, self.common.content)

    def describe_files(self) -> Message:
        """What this rank knows of each segment of the manifest, or its size. Rank-local.

        A description that is small enough travels with the gather that follows.
        """
        planned = self.planned
        if not planned.manifest.owners:
            return None
        self._segments = self.writer.described(planned.arrays, planned.manifest.firsts)
        limit = _EAGER_NBYTES // self.comm.size
        found = sorted(self._segments.items())
        return [[n, c.decode() if len(c) <= limit else len(c)] for n, c in found] or None

    def complete(self, described: Sequence[Message], seconds: Callable[[], float]) -> None:
        """Write the manifest, make the save the checkpoint's content, and log it. Collective.

        ``described`` is what ``describe_files`` gave on all ranks. ``seconds``, how long the save
        took, is asked for in the end.
        """
        comm, writer, common, planned = self.comm, self.writer, self.common, self.planned
        if common is not None and common.save is not None:
            run_collectively(comm, partial(common.save, writer.place.location))
        firsts, owners = planned.manifest.firsts, planned.manifest.owners
        known = [(rank, *one) for rank, found in enumerate(described) for one in found or ()]
        received = {
            number: [
                self._segments[n] if rank == comm.rank else text.encode()
                for rank, n, text in known
                if n == number and (rank == comm.rank or isinstance(text, str))
            ]
            for number, owner in enumerate(owners)
            if owner == comm.rank
        }
        large = [one for one in known if isinstance(one[-1], int)]
        if large:
            self._exchange_segments(large, received)

        def write_segments() -> list[Any]:
            return [writer.write_segment(n, firsts[n], some) for n, some in received.items()]

        is_by_first = not any(owners)
        answers = [] if is_by_first else run_and_gather(comm, write_segments)

        def commit() -> None:
            if owners:
                found = [write_segments()] if is_by_first else answers
                layout = {"ranks": comm.size, **parallel_sizes()}
                entries = [entry for of_rank in found for entry in of_rank]
                writer.write_index(entries, layout, common.content if common else None)
            writer.place.commit(self.marker)

        run_on_first_rank(comm, commit)
        text = "rank %s: save to %s: num_arrays %d, num_chunks %d, nbytes %d, seconds %.3f"
        plan, me = planned.plan, comm.global_ranks[comm.rank]
        figures = len(plan.creations), len(plan.writes), planned.nbytes, seconds()
        logger.log(comm.report_level, text, me, writer.root, *figures)

    def _exchange_segments(
        self, large: Sequence[tuple[int, int, int]], received: Mapping[int, list[bytes]]
    ) -> None:
        """Add what other ranks know of the segments written here and is too large for a gather.

        Collective. ``large`` has rank, segment and size of each description; ``received`` what is
        known of each segment that is written here.
        """
        comm = self.comm
        owners, limit = self.planned.manifest.owners, _EAGER_NBYTES // comm.size
        incoming = [
            (rank, n, nbytes) for rank, n, nbytes in large if n in received and rank != comm.rank
        ]

        def prepare() -> tuple[list[Send], list[torch.Tensor]]:
            sends = [
                Send(owners[n], torch.frombuffer(bytearray(content), dtype=torch.uint8))
                for n, content in sorted(self._segments.items())
                if owners[n] != comm.rank and len(content) > limit
            ]
            return sends, [
                torch.empty(nbytes, dtype=torch.uint8, device="cpu") for *_, nbytes in incoming
            ]

        sends, buffers = run_collectively(comm, prepare)
        pairs = list(zip(incoming, buffers, strict=True))
        comm.exchange(sends, [Receive(rank, buffer) for (rank, *_), buffer in pairs])
        for (_, n, _), buffer in pairs:
            received[n].append(buffer.numpy().tobytes())

    def _take_object(self, value: Any, name: ObjectId) -> None:
        """Dump the object of a main replica."""
        if name in self._objects:
            raise DuplicateWriterError(
                f"{name.unique_key}: two main replicas on this rank; give one of them another "
                "replica_id",
                key=name.key,
            )
        self._objects[name] = self.writer.dump(value.data, name=name.unique_key, allow=self.allow)

    def _new_plan(self, group: str, everyone: Sequence[Message]) -> Planned:
        """The plan that follows from what all ranks have described; the first makes the place."""
        comm = self.comm
        requests: list[RankShards] = []
        objects: list[tuple[ObjectId, int]] = []
        names: tuple[ShardId | None, ...] = ()
        for rank, (messages, *_) in enumerate(everyone):
            global_rank = comm.global_ranks[rank]
            shards = list(map(shard_from_message, messages))
            requests.append(RankShards(global_rank, tuple(s for s in shards if s is not None)))
            objects += [
                (object_from_message(message), global_rank)
                for message, shard in zip(messages, shards, strict=True)
                if shard is None and is_main_message(message)
            ]
            if rank == comm.rank:
                names = tuple(None if shard is None else shard.id for shard in shards)
        layouts = [layout for _, _, layout, _ in everyone]
        if len(set(layouts)) > 1:
            raise different_strategies(comm, "a save", [_FORMATS[one] for one in layouts])
        plan = build_save_plan(
            requests,
            objects,
            max_inflight_bytes=min(budget for _, budget, *_ in everyone),
            chunk_layout=ChunkLayout(layouts[0]),
        )
        if any(validates for *_, validates in everyone):
            require_valid([list(map(value_from_message, messages)) for messages, *_ in everyone])
        if self.validates:
            VALIDATED.last = digest_of([digest_of(messages) for messages, *_ in everyone])
        arrays = [creation.array for creation in plan.creations]
        object_keys = [object_id.key for object_id, _ in objects]
        manifest = (
            ManifestPlan((), ())
            if layouts[0] == ChunkLayout.WHOLE.value
            else build_manifest_plan(arrays, object_keys, comm.size)
        )
        keys = frozenset(array.key for array in arrays).union(object_keys)
        if comm.rank == 0:
            self.writer.place.begin(keys)
        share = plan.share_of(comm.global_ranks[comm.rank])
        nbytes = sum(write.nbytes for write in share.writes)
        return Planned(self._own, group, share, names, keys, manifest, tuple(share.arrays), nbytes)


def begun_save(
    comm: Communicator, open_save: Callable[[], ShardedSave | None]
) -> ShardedSave | None:
    """A save that is planned, and nothing of it written; None where all save in another way.

    Collective. Raises a PlanError if only some ranks save in another way.
    """
    saves: list[ShardedSave | None] = []

    def describe() -> Message:
        saves.append(open_save())
        return saves[0].describe() if saves[0] else None

    try:
        answers = run_and_gather(comm, describe)
        restart_limit()
        kinds = [
            "packs" if is_packs(answer) else "another strategy" if answer is None else "zarr"
            for answer in answers
        ]
        if len(set(kinds)) > 1:
            raise different_strategies(comm, "a save", kinds)  # noqa: TRY301 - see below
        if saves[0] is not None:
            saves[0].begin(answers)
        return saves[0]
    except BaseException:
        for save in saves:
            if save is not None:
                save.abandon()
        raise
