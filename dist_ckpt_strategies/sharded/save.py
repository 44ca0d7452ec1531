"""Save what each rank holds: ``finish_save(start_save(...), write)``, for packs and ("zarr", 1).

The ranks talk three times: about what they hold, about what they have written, and about the
commit. A save whose shards are new takes one exchange more.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch

from dist_ckpt_strategies.comm.base import Communicator, Message, run_and_gather, run_on_first_rank
from dist_ckpt_strategies.config import Options
from dist_ckpt_strategies.core.array import ObjectId, ShardSpec
from dist_ckpt_strategies.device import host_batches, settle
from dist_ckpt_strategies.errors import (
    CheckpointError,
    PeerLostError,
    PeerTimeoutError,
    PlanError,
    StorageError,
    StorageTimeoutError,
)
from dist_ckpt_strategies.formats.base import BASE, NamedBase, base_to_name
from dist_ckpt_strategies.formats.index import NewSave, PackSummary
from dist_ckpt_strategies.formats.pack import Layout, PackLayout, PackLimits, lay_out
from dist_ckpt_strategies.formats.pack_commit import commit, new_save_id
from dist_ckpt_strategies.formats.pack_write import (
    PackRecord,
    Write,
    Written,
    delete_files,
    file_of,
    write_packs,
)
from dist_ckpt_strategies.sharded.agreement import require_one_strategy
from dist_ckpt_strategies.sharded.ledger import (
    Description,
    Ledger,
    described,
    proved,
    tell_first_rank,
)
from dist_ckpt_strategies.sharded.unchanged import LastSave, compared, described_save, judged
from dist_ckpt_strategies.storage.bucket import Bucket, Place
from dist_ckpt_strategies.storage.io_pool import ENDING, OPENING, WORK, Deadline, run_within
from dist_ckpt_strategies.storage.store import Bytes

logger = logging.getLogger(__name__)

_REPORT = "rank %s: save to %s: num_packs %d, nbytes %d, seconds %.3f"

OBJECT_NBYTES = 32 << 20
"""Of a pack in a bucket: several are put at the same time, each in one request."""


@dataclass(frozen=True, slots=True)
class Contents:
    """The part of one rank in a save. ``tensors`` are shaped like the regions of ``shards``.

    Attributes:
        shards: the replicas that are written.
        tensors: their data, on any device.
        copies: other replicas, which are compared and not written.
        objects: shards of objects, pickled.
        object_copies: other replicas of objects.
        common: the state that all ranks share, on the first rank alone.
        copies_common: whether ``common.pt`` is to be written too, for Megatron-Core's own readers.
    """

    shards: tuple[ShardSpec, ...]
    tensors: tuple[torch.Tensor, ...]
    copies: tuple[ShardSpec, ...] = ()
    objects: tuple[tuple[ObjectId, bytes], ...] = ()
    object_copies: tuple[ObjectId, ...] = ()
    common: bytes | None = None
    copies_common: bool = False

    def source(self, number: int) -> torch.Tensor | bytes:
        """The tensor, object or common state with a source's number in the layout."""
        if number < len(self.tensors):
            return self.tensors[number]
        number -= len(self.tensors)
        return self.objects[number][1] if number < len(self.objects) else self.common or b""


@dataclass(frozen=True, slots=True)
class PlanCache:
    """State kept from one save for the next, which most often saves the same shards.

    Attributes:
        ranks: that save together.
        key: what the layout was made of.
        layout: this rank's packs.
        description: what the first rank is told of them.
        session: of the ledger that has been told; empty: of none.
        ledger: on the first rank, what all have told.
        last: the last save that was committed; None if it was not of packs.
    """

    ranks: tuple[int, ...]
    key: object
    layout: Layout
    description: Description
    session: str = ""
    ledger: Ledger | None = None
    last: LastSave | None = None


class SaveFormat(NamedTuple):
    """The steps of a save that differ between formats. All functions are rank-local.

    Attributes:
        name: in words, for messages.
        writer: gives what writes this rank's share: from its tensors, or from a copy of them.
        commit: makes the save visible, on the first rank: by what all have told and written, the
            content of ``metadata.json``, and whether other arrays may be replaced. It returns why
            Megatron-Core's copies could not be written.
        discard: removes what was written, after a failure that all ranks know of.
    """

    name: str
    writer: Callable[[Started], Write]
    commit: Callable[[Started, Ledger, Sequence[Message], bytes | None, bool], object]
    discard: Callable[[Started, Sequence[PackRecord], CheckpointError], None]


@dataclass(frozen=True, slots=True)
class Started:
    """A save that every rank has begun; nothing of it is visible.

    Attributes:
        format: the same on all ranks.
        save_id: equal on all ranks, and of no other save.
        cache: for this save and the next.
        nbytes: of all packs of all ranks.
        num_packs: of all ranks.
        notes: what ``prepare`` has added on each rank.
        rank: the global rank of this process.
        base: that the save names, on the first rank.
        began: when all ranks knew of each other, by ``time.monotonic``.
    """

    comm: Communicator
    format: SaveFormat
    store: Place
    options: Options
    save_id: str
    contents: Contents
    cache: PlanCache
    nbytes: int
    num_packs: int
    notes: tuple[Message, ...]
    rank: int
    base: NamedBase | None = None
    began: float = field(default_factory=time.monotonic)


def start_save(
    comm: Communicator,
    save_format: SaveFormat,
    prepare: Callable[[], tuple[Place, Contents, Message]],
    cache: PlanCache | None,
    options: Options,
) -> Started:
    """Begin a save: lay out what this rank writes, and tell the first rank of it. Collective.

    ``prepare`` gives where to, what this rank saves, and a note for every rank; it may raise.
    ``cache`` is what ``finish_save`` has returned last.

    Raises:
        CheckpointError: ``prepare`` has raised on a rank; a PeerError of its class on the others.
        CoverageError, PlanError: this rank's shards cannot be stored, or ranks save in
            different formats.
    """
    prepared: list[tuple[Place, Contents, PlanCache]] = []
    base: NamedBase | None = None

    def describe() -> Message:
        nonlocal base
        store, contents, note = prepare()
        mine = _laid_out(comm, contents, cache, limits_of(store, options))
        prepared.append((store, contents, mine))
        save_id, session = "", mine.ledger and mine.ledger.session
        if comm.rank == 0:
            deadline = Deadline.after(OPENING * options.timeout_s)
            save_id = run_within(deadline, store, lambda: new_save_id(store))
            base = run_within(deadline, store, lambda: base_to_name(options, store))
            if base is not None and save_format is not PACKS:
                raise PlanError(f"base: expected format {PACKS.name}, found {save_format.name}")
        num_packs, main, copies, digest = mine.description
        nbytes = sum(pack.nbytes for pack in mine.layout.packs)
        sizes = num_packs, len(main), len(copies), digest
        return [save_format.name, save_id, session, mine.session, nbytes, sizes, note]

    answers = run_and_gather(comm, describe)  # 1
    require_one_strategy(comm, "a save", answers)
    _, save_ids, ledgers, sessions, nbytes, sizes, notes = zip(*answers, strict=True)
    store, contents, mine = prepared[0]
    announced = [
        None if session == ledgers[0] else of_rank
        for of_rank, session in zip(sizes, sessions, strict=True)
    ]
    if any(announced):
        session = save_ids[0]  # a rank that does not hear of the new ledger will tell it all again
        ledger = tell_first_rank(comm, mine.description, announced, session, mine.ledger)
        mine = replace(mine, session=session, ledger=ledger)
    what = store, options, save_ids[0], contents, mine
    total = sum(nbytes), sum(of_rank[0] for of_rank in sizes)
    return Started(comm, save_format, *what, *total, notes, comm.global_ranks[comm.rank], base)


def write_share(started: Started) -> Sequence[Written]:
    """Write what this rank holds, durably; what ``finish_save`` waits for. Rank-local.

    Raises:
        StorageError: it cannot be written, or there is no room for all: no pack stays.
    """
    contents, options = started.contents, started.options
    require_space(started)
    return write_contents(started.format.writer(started), started.cache.layout, contents, options)


def require_space(started: Started) -> None:
    """Raise StorageError if the file system says that it has no room for all packs."""
    deadline = Deadline.after(OPENING * started.options.timeout_s)
    require = partial(started.store.require_space, started.nbytes, started.num_packs)
    run_within(deadline, started.store, require)


def write_contents(
    write: Write, layout: Layout, contents: Contents, options: Options
) -> Sequence[Written]:
    """Write what a rank holds, from its tensors: packs as by ``write_packs``. Rank-local.

    CUDA tensors and those that are not in C order are copied first, ``max_inflight_bytes`` at a
    time, or the largest tensor.
    """
    settle(contents.tensors)
    budget = options.max_inflight_bytes // max(1, len(layout.packs))
    return write([_batches(contents, pack, budget) for pack in layout.packs])


def _batches(contents: Contents, pack: PackLayout, budget: int) -> Iterator[Sequence[Bytes]]:
    """The bytes of a pack's tensors, in order; each batch is valid until the next is taken."""
    sources = [contents.source(number) for number in pack.sources if number >= 0]
    for hosts in host_batches([s for s in sources if isinstance(s, torch.Tensor)], budget):
        yield [host.reshape(-1).view(np.uint8) for host in hosts]
    yield [np.frombuffer(s, np.uint8) for s in sources if isinstance(s, bytes)]


def finish_save(
    started: Started,
    written: Callable[[], Sequence[Written]],
    *,
    marker: bytes | None,
    overwrite: bool = False,
) -> PlanCache:
    """Make the save the content of its place, once every rank has written its share. Collective.

    If it fails on any rank, every rank raises, what this save has written is removed, and the place
    holds what it held before; ("zarr", 1) only if no file of the old checkpoint has been moved.

    Args:
        started: what ``start_save`` has returned.
        written: waits for this rank's share; may raise.
        marker: content of ``metadata.json``, written last; None where Megatron-Core writes it.
        overwrite: whether it may replace what belongs to no finished checkpoint.

    Returns:
        ``cache`` of the next save.

    Raises:
        CoverageError, PlanError: the shards do not make up the arrays; or the save repeats the last
            one, and ``on_unchanged`` says so.
        StorageError: a share could not be written, or the save not be committed.
        PeerError: the same, on another rank.
    """
    comm, store, cache = started.comm, started.store, started.cache
    packs, ends = list[Written](), list[LastSave]()
    ledgers: list[Ledger] = []

    def summarize() -> Message:
        if cache.ledger is not None:
            ledgers.append(proved(cache.ledger, comm.global_ranks))
        packs.extend(written())
        return _summary(started, packs, ends)

    def make_visible() -> Message:
        if comm.rank > 0:
            return None
        failure = started.format.commit(started, ledgers[0], summaries, marker, overwrite)
        return failure and str(failure)

    may_be_visible = False
    try:
        summaries = run_and_gather(comm, summarize, is_sparse=True, follows=True)  # 2
        may_be_visible = True
        repeats = [how for _, how in filter(None, summaries)]
        has_trained = judged(repeats, is_first=comm.rank == 0)
        limit = Deadline.after(ENDING * started.options.timeout_s)
        act = partial(run_within, limit, store, make_visible)
        failure, *_ = run_and_gather(comm, act, is_sparse=True, follows=True)  # 3
    except CheckpointError as error:
        # Where others, or a thread that was given up, may still commit: see prune --unfinished.
        unsure = (PeerTimeoutError, PeerLostError, *[StorageTimeoutError] * may_be_visible)
        if not isinstance(error, unsure):
            started.format.discard(started, [record for record, _ in packs], error)
        raise
    if failure:
        run_on_first_rank(comm, lambda: _raise_uncopied(store, failure))
    figures = started.num_packs, started.nbytes, time.monotonic() - started.began
    logger.log(comm.report_level, _REPORT, started.rank, store, *figures)
    kept = [replace(end, has_trained=has_trained) for end in ends]
    return replace(cache, ledger=next(iter(ledgers), None), last=next(iter(kept), None))


def _summary(started: Started, packs: Sequence[Written], ends: list[LastSave]) -> Message:
    """Summary of this rank's packs for the others; their digests are appended to ``ends``."""
    if not packs:
        return None
    layout, last = started.cache.layout, started.cache.last
    ends.append(described_save(started.store, layout, [digests for _, digests in packs]))
    summary = PackSummary(tuple(record for record, _ in packs), layout.objects, layout.common)
    return [summary.to_message(), compared(last, ends[0], started.options.on_unchanged)]


def _raise_uncopied(store: Place, failure: Message) -> NoReturn:
    raise StorageError(
        f"{store}: the save is committed, and dist_ckpt_strategies.load finds it, but not "
        f"Megatron-Core's own: {failure}; save again",
        path=str(store),
    )


def limits_of(store: Place, options: Options) -> PackLimits:
    """How large packs get at a place."""
    if isinstance(store, Bucket):
        nbytes = max(1, min(OBJECT_NBYTES, options.max_inflight_bytes // 2))
        return PackLimits(nbytes, options.io_threads, nbytes)
    return PackLimits(num_packs=options.io_threads)


def _pack_writer(started: Started) -> Write:
    return pack_writer(
        started.store,
        started.cache.layout.packs,
        started.options,
        rank=started.rank,
        save_id=started.save_id,
        num_packs=started.num_packs,
    )


def pack_writer(
    store: Place,
    packs: Sequence[PackLayout],
    options: Options,
    *,
    rank: int,
    save_id: str = "",
    num_packs: int = 0,
) -> Write:
    """The function that writes packs to a place. Packs for a bucket are in memory twice."""
    num_threads = options.io_threads
    if isinstance(store, Bucket):
        most = options.max_inflight_bytes // (2 * limits_of(store, options).nbytes)
        num_threads = max(1, min(num_threads, most))
    limit_s = WORK * options.timeout_s
    facts = {"save_id": save_id, "rank": rank, "num_packs": num_packs}
    return partial(write_packs, store, packs, facts, num_threads, limit_s)


def _commit_packs(
    started: Started,
    ledger: Ledger,
    summaries: Sequence[Message],
    marker: bytes | None,
    _overwrite: bool,  # noqa: FBT001
) -> StorageError | None:
    facts: dict[str, Any] = {"ranks": started.comm.size, "created": time.time()}
    facts |= {BASE: started.base} if started.base else {}
    written = [PackSummary.from_message(summary) for summary, _ in filter(None, summaries)]
    common = started.contents.common if started.contents.copies_common else None
    what = ledger.segments or (), written, facts, common, marker
    return commit(started.store, NewSave(started.save_id, *what))


def _discard_packs(started: Started, records: Sequence[PackRecord], _: CheckpointError) -> None:
    delete_files(started.store, [file_of(record.name) for record in records])


PACKS = SaveFormat("('safetensors', 1)", _pack_writer, _commit_packs, _discard_packs)


def _laid_out(
    comm: Communicator, contents: Contents, cache: PlanCache | None, limits: PackLimits
) -> PlanCache:
    """The layout of what a rank saves: that of the save before where it fits."""
    sizes = tuple((name, len(content)) for name, content in contents.objects)
    common = None if contents.common is None else len(contents.common)
    key = replace(contents, tensors=(), objects=(), common=None), sizes, common, limits
    if cache is not None and cache.ranks != comm.global_ranks:
        cache = None
    if cache is not None and cache.key == key:
        return cache
    rank = comm.global_ranks[comm.rank]
    layout = lay_out(contents.shards, sizes, common, rank=rank, limits=limits)
    description = described(layout, contents.copies, contents.object_copies)
    session = cache.session if cache is not None and cache.description == description else ""
    ledger, last = (None, None) if cache is None else (cache.ledger, cache.last)
    return PlanCache(comm.global_ranks, key, layout, description, session, ledger, last)
