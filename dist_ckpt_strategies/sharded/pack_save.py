"""Save what each rank holds as packs: ``finish_save(start_save(...), write)``.

The ranks talk three times: about what they hold, about what they have written, and about the
commit. A save whose shards are new takes one exchange more.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NoReturn

import numpy as np
import torch

from dist_ckpt_strategies.comm.base import (
    Communicator,
    Message,
    run_and_gather,
    run_on_first_rank,
    who_is_where,
)
from dist_ckpt_strategies.config import Options
from dist_ckpt_strategies.core.array import ObjectId, ShardSpec
from dist_ckpt_strategies.device import (
    HostSnapshot,
    build_batches,
    is_in_order,
    on_own_gpu,
    settle,
    to_host,
)
from dist_ckpt_strategies.errors import (
    CheckpointError,
    PeerLostError,
    PeerTimeoutError,
    PlanError,
    StorageError,
    StorageTimeoutError,
)
from dist_ckpt_strategies.formats.pack import Layout, PackLayout, PackLimits, lay_out
from dist_ckpt_strategies.formats.pack_commit import NewSave, commit, new_save_id
from dist_ckpt_strategies.formats.pack_summary import PackSummary, build_save
from dist_ckpt_strategies.formats.pack_write import (
    PackRecord,
    delete_files,
    file_of,
    write_each,
    write_pack,
)
from dist_ckpt_strategies.sharded.ledger import (
    Description,
    Ledger,
    proved,
    tell_first_rank,
)
from dist_ckpt_strategies.storage.bucket import Bucket, Place
from dist_ckpt_strategies.storage.io_pool import (
    ENDING,
    OPENING,
    Deadline,
    run_within,
)
from dist_ckpt_strategies.storage.store import Bytes

logger = logging.getLogger(__name__)

PACKS = "packs"

OBJECT_NBYTES = 32 << 20
"""Of a pack in a bucket: several are put at the same time, each in one request."""


@dataclass(frozen=True, slots=True)
class Contents:
    """What one rank has to save. ``tensors`` are shaped like the regions of ``shards``.

    Attributes:
        shards: the replicas that are written.
        tensors: their data, on any device.
        copies: other replicas, which are compared and not written.
        objects: shards of objects, pickled.
        object_copies: other replicas of objects.
        common: the state that all ranks share, on the first rank alone.
        copies_common: whether ``common.pt`` is to be written too, for Megatron-Core's own readers.
        features: of the packs; see ``pack.UNVERIFIED``.
    """

    shards: tuple[ShardSpec, ...]
    tensors: tuple[torch.Tensor, ...]
    copies: tuple[ShardSpec, ...] = ()
    objects: tuple[tuple[ObjectId, bytes], ...] = ()
    object_copies: tuple[ObjectId, ...] = ()
    common: bytes | None = None
    copies_common: bool = False
    features: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Prepared:
    """What one rank brings to a save.

    Attributes:
        store: where it goes.
        contents: what this rank holds.
        note: for every rank.
        kind: how it is stored, in words; the same on all ranks.
        overwrite: whether it may replace what belongs to no finished checkpoint.
    """

    store: Place
    contents: Contents
    note: Message = None
    kind: str = PACKS
    overwrite: bool = False


@dataclass(frozen=True, slots=True)
class Known:
    """What is kept from one save for the next, which most often saves the same shards.

    Attributes:
        ranks: that save together.
        key: what the layout was made of.
        layout: this rank's packs.
        description: what it tells of them.
        session: of the ledger that has been told; empty: of none.
        ledger: on the first rank, what all have told.
    """

    ranks: tuple[int, ...]
    key: object
    layout: Layout
    description: Description
    session: str = ""
    ledger: Ledger | None = None


@dataclass(frozen=True, slots=True)
class Started:
    """A save that every rank has begun; nothing of it is visible.

    Attributes:
        comm: the ranks.
        store: where it goes.
        options: how it is carried out.
        save_id: equal on all ranks, and of no other save.
        contents: what this rank writes.
        known: for this save and the next.
        nbytes: of all packs of all ranks.
        num_packs: of all ranks.
        notes: what ``prepare`` has added on each rank.
        overwrite: see Prepared.
        began: when all ranks knew of each other, by ``time.monotonic``.
    """

    comm: Communicator
    store: Place
    options: Options
    save_id: str
    contents: Contents
    known: Known
    nbytes: int
    num_packs: int
    notes: tuple[Message, ...]
    overwrite: bool = False
    began: float = field(default_factory=time.monotonic)

    def report(self) -> None:
        """Log that the save is visible, on the first rank at INFO."""
        text = "rank %s: save to %s: num_packs %d, nbytes %d, seconds %.3f"
        figures = self.num_packs, self.nbytes, time.monotonic() - self.began
        rank = self.comm.global_ranks[self.comm.rank]
        logger.log(self.comm.report_level, text, rank, self.store, *figures)

    def require_space(self) -> None:
        """Raise StorageError if the file system says that it has no room for all packs."""
        self.store.require_space(self.nbytes, self.num_packs)


def start_save(
    comm: Communicator,
    prepare: Callable[[], Prepared],
    known: Known | None,
    options: Options,
) -> Started:
    """Begin a save: lay out what this rank writes, and tell the first rank of it. Collective.

    Args:
        comm: the ranks.
        prepare: what this rank saves; may raise.
        known: what ``finish_save`` has returned last.
        options: how it is carried out.

    Raises:
        CheckpointError: ``prepare`` has raised on a rank; a PeerError of its class on the others.
        CoverageError, PlanError: this rank's shards cannot be stored.
    """
    prepared: list[tuple[Prepared, Known]] = []

    def describe() -> Message:
        own = prepare()
        mine = _laid_out(comm, own.contents, known, limits_of(own.store, options))
        prepared.append((own, mine))
        said, ledger = mine.description, mine.ledger
        sizes = said.num_packs, len(said.main), len(said.copies), said.copies_digest
        save_id = ""
        if comm.rank == 0:
            deadline = Deadline.after(OPENING * options.timeout_s)
            save_id = run_within(deadline, own.store, lambda: new_save_id(own.store))
        nbytes = sum(pack.nbytes for pack in mine.layout.packs)
        return [own.kind, save_id, ledger and ledger.session, mine.session, nbytes, sizes, own.note]

    answers = run_and_gather(comm, describe)  # 1
    require_alike(comm, answers)
    _, save_ids, ledgers, sessions, nbytes, sizes, notes = zip(*answers, strict=True)
    own, mine = prepared[0]
    announced = [
        None if session == ledgers[0] else of_rank
        for of_rank, session in zip(sizes, sessions, strict=True)
    ]
    if any(announced):
        session = save_ids[0]  # a rank that does not hear of the new ledger will tell it all again
        ledger = tell_first_rank(comm, mine.description, announced, session, mine.ledger)
        mine = replace(mine, session=session, ledger=ledger)
    num_packs = sum(of_rank[0] for of_rank in sizes)
    return Started(
        comm,
        own.store,
        options,
        save_ids[0],
        own.contents,
        mine,
        sum(nbytes),
        num_packs,
        notes,
        own.overwrite,
    )


def require_alike(comm: Communicator, answers: Sequence[Message]) -> None:
    """Raise a PlanError, on every rank, where ranks save in different ways."""
    kinds = [answer[0] if isinstance(answer, list) else "another strategy" for answer in answers]
    if len(set(kinds)) > 1:
        texts = [f"a save by {kind}" for kind in kinds]
        raise PlanError(f"expected one strategy, found {who_is_where(comm, kinds, texts)}")


def write_packs(started: Started, deadline: Deadline) -> tuple[PackRecord, ...]:
    """Write this rank's packs, each on a thread. Rank-local.

    CUDA tensors and those that are not in C order are copied first, ``max_inflight_bytes`` at a
    time, or the largest tensor.

    Raises:
        StorageError: a pack cannot be written, or there is no room for all: nothing stays.
    """
    run_within(deadline, started.store, started.require_space)
    return write_layout(
        started.store,
        started.known.layout,
        started.contents,
        started.options,
        deadline,
        save_id=started.save_id,
        rank=started.comm.global_ranks[started.comm.rank],
        num_packs=started.num_packs,
    )


def write_layout(  # noqa: PLR0913 - facts of the save are known when it is written
    store: Place,
    layout: Layout,
    contents: Contents,
    options: Options,
    deadline: Deadline,
    *,
    save_id: str,
    rank: int,
    num_packs: int = 0,
) -> tuple[PackRecord, ...]:
    """Write the packs of a layout, each on a thread; ``save_id`` and others as in ``write_pack``.

    Raises:
        StorageError: a pack cannot be written: nothing stays.
    """
    settle(contents.tensors)
    budget = options.max_inflight_bytes // max(1, len(layout.packs))

    def write(name: str, number: int) -> PackRecord:
        pack = layout.packs[number]
        batches = host_batches(contents, pack, budget)
        with on_own_gpu():
            return write_pack(
                store, name, pack, batches, save_id=save_id, rank=rank, num_packs=num_packs
            )

    num_threads = num_writers(store, options)
    return write_each(store, len(layout.packs), write, num_threads, deadline)


def host_batches(contents: Contents, pack: PackLayout, budget: int) -> Iterator[Sequence[Bytes]]:
    """The bytes of a pack's tensors, in order; each batch is valid until the next is taken."""
    num_shards = len(contents.shards)
    tail = [content for _, content in contents.objects] + [contents.common or b""]
    sources = [source for source in pack.sources if source >= 0]
    tensors = [contents.tensors[source] for source in sources if source < num_shards]
    staged = [0 if _is_direct(t) else t.numel() * t.element_size() for t in tensors]
    memory = HostSnapshot()
    for batch in build_batches(zip(tensors, staged, strict=True), budget):
        yield [_flat(host) for host in to_host(batch, memory)]
    yield [
        np.frombuffer(tail[source - num_shards], np.uint8)
        for source in sources
        if source >= num_shards
    ]


def _is_direct(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and is_in_order(tensor)


def _flat(host: Bytes) -> Bytes:
    return host.reshape(-1).view(np.uint8)


def finish_save(
    started: Started,
    written: Callable[[], Sequence[PackRecord]],
    *,
    marker: bytes | None,
    fence: Callable[[], None] = lambda: None,
) -> Known:
    """Make the save the content of its place, once every rank has written its packs. Collective.

    If it fails on any rank, every rank raises, and the place holds what it held before; what this
    save has written is deleted.

    Args:
        started: what ``start_save`` has returned.
        written: waits for this rank's packs; may raise.
        marker: content of ``metadata.json``, to be written after ``common.pt``; None where
            Megatron-Core writes it.
        fence: raises if this job may no longer write there.

    Returns:
        What the next save takes as ``known``.

    Raises:
        CoverageError, PlanError: the shards do not make up the arrays.
        StorageError: a pack could not be written on this rank, or the save not be committed.
        PeerError: the same, on another rank.
    """
    comm, store, known = started.comm, started.store, started.known
    packs: list[PackRecord] = []
    ledgers: list[Ledger] = []

    def summarize() -> Message:
        if known.ledger is not None:
            ledgers.append(proved(known.ledger, comm.global_ranks))
        packs.extend(written())
        return PackSummary.of(known.layout, packs).to_message()

    def make_visible() -> Message:
        if comm.rank > 0:
            return None
        save = _new_save(started, ledgers[0], summaries)
        content = started.contents.common if started.contents.copies_common else None
        failure = commit(store, replace(save, common=content, marker=marker), fence)
        return failure and str(failure)

    may_be_visible = False
    try:
        summaries = run_and_gather(comm, summarize)  # 2
        may_be_visible = True
        deadline = Deadline.after(ENDING * started.options.timeout_s)
        act = lambda: run_within(deadline, store, make_visible)  # noqa: E731
        failure, *_ = run_and_gather(comm, act, is_sparse=True)  # 3
    except CheckpointError as error:
        # Where others, or a thread that was given up, may still commit: see prune --unfinished.
        unsure = (PeerTimeoutError, PeerLostError, *[StorageTimeoutError] * may_be_visible)
        if not isinstance(error, unsure):
            delete_files(store, [file_of(pack.name) for pack in packs])
        raise
    if failure:
        run_on_first_rank(comm, lambda: _raise_uncopied(store, failure))
    return replace(known, ledger=next(iter(ledgers), None))


def _raise_uncopied(store: Place, failure: Message) -> NoReturn:
    raise StorageError(
        f"{store}: the save is committed, and dist_ckpt_strategies.load finds it, but not "
        f"Megatron-Core's own: {failure}; save again",
        path=str(store),
    )


def _new_save(started: Started, ledger: Ledger, summaries: Sequence[Message]) -> NewSave:
    """The indexes of a save, by what all ranks have written."""
    facts = {"ranks": started.comm.size, "created": time.time()}
    written = [PackSummary.from_message(message) for message in summaries]
    return build_save(started.save_id, ledger.segments, written, facts)


def limits_of(store: Place, options: Options) -> PackLimits:
    """How large packs get at a place."""
    if isinstance(store, Bucket):
        nbytes = max(1, min(OBJECT_NBYTES, options.max_inflight_bytes // 2))
        return PackLimits(nbytes, options.io_threads, nbytes)
    return PackLimits(num_packs=options.io_threads)


def num_writers(store: Place, options: Options) -> int:
    """Packs that a rank writes at the same time; a bucket's are in memory twice meanwhile."""
    most = options.io_threads
    if isinstance(store, Bucket):
        most = min(most, options.max_inflight_bytes // (2 * limits_of(store, options).nbytes))
    return max(1, most)


def _laid_out(
    comm: Communicator, contents: Contents, known: Known | None, limits: PackLimits
) -> Known:
    """The layout of what a rank saves: that of the save before where it fits."""
    sizes = tuple((name, len(content)) for name, content in contents.objects)
    common = None if contents.common is None else len(contents.common)
    key = replace(contents, tensors=(), objects=(), common=None), sizes, common, limits
    if known is not None and known.ranks != comm.global_ranks:
        known = None
    if known is not None and known.key == key:
        return known
    rank = comm.global_ranks[comm.rank]
    layout = lay_out(
        contents.shards, sizes, common, rank=rank, limits=limits, features=contents.features
    )
    said = Description.of(layout, contents.copies, contents.object_copies)
    session = known.session if known is not None and known.description == said else ""
    ledger = None if known is None else known.ledger
    return Known(comm.global_ranks, key, layout, said, session, ledger)
