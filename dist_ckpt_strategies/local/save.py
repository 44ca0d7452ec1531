"""Save the states of all ranks on their nodes: ``finish_save(start_save(...), write_shards)``.

The ranks talk three times: about what they save, about what they have written, and about the names
that the files get last. Between the first two, members of a clique send each other their packs.
"""

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

import torch

from dist_ckpt_strategies.comm.base import Communicator, Message, run_and_gather, run_collectively
from dist_ckpt_strategies.comm.exchange import MESSAGE_NBYTES, Incoming, Outgoing, Rounds
from dist_ckpt_strategies.comm.tensor_bytes import TensorBytes
from dist_ckpt_strategies.device import to_host
from dist_ckpt_strategies.errors import (
    CheckpointError,
    PeerLostError,
    PeerTimeoutError,
    PlanError,
    StorageError,
)
from dist_ckpt_strategies.formats.objects import Allowed
from dist_ckpt_strategies.formats.pack import Digests, Layout
from dist_ckpt_strategies.formats.pack_write import seal
from dist_ckpt_strategies.local.inventory import Inventory, build_inventory, listing, nodes_of
from dist_ckpt_strategies.local.packs import require_allowed
from dist_ckpt_strategies.local.plan import LocalShardId, SaveId
from dist_ckpt_strategies.local.shard_files import ShardDirectory, ShardWriter
from dist_ckpt_strategies.sharded.async_request import BackgroundWork, yield_to_training
from dist_ckpt_strategies.sharded.background import copy_contents
from dist_ckpt_strategies.sharded.save import Contents
from dist_ckpt_strategies.sharded.unchanged import LastSave, compared, described_save, judged
from dist_ckpt_strategies.storage.io_pool import (
    CLEAN_UP,
    ENDING,
    OPENING,
    WORK,
    Deadline,
    Job,
    Transfer,
    run_within,
)

logger = logging.getLogger(__name__)

_HEAD_START_S = 0.01
"""Training is back from an asynchronous save before the rest of it asks for Python's lock."""


Written = tuple[str, Digests]
"""A report of what a rank has written, and the digests of its own pack."""

_Background = BackgroundWork[Written] | None


@dataclass(frozen=True, slots=True)
class Prepared:
    """A rank's part of a save; the first rank's stamp counts.

    ``image`` is host memory of the size of the state's pack, which is laid out there once.
    ``max_bucket_nbytes`` bounds what travels at once in each direction.
    """

    iteration: int
    stamp: str
    is_async: bool
    contents: Contents
    allowed: Allowed
    layout: Layout
    image: torch.Tensor
    clique: Communicator
    max_bucket_nbytes: int
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Started:
    """A save that every rank has begun; nothing of it is visible.

    Attributes:
        comm: all ranks.
        directory: of this rank's node.
        own: what this rank has brought.
        writers: a file for the pack of each member of the clique.
        rounds: messages with these packs.
        work: calls ``write_shards`` in the background; not begun yet.
        save: the same on all ranks, and of no other save.
        nodes: see Inventory.
        sizes: of the packs of the clique's members.
        bucket_nbytes: the least bound of theirs on what travels at once.
    """

    comm: Communicator
    directory: ShardDirectory
    own: Prepared
    writers: Sequence[ShardWriter]
    rounds: Rounds
    work: _Background
    save: SaveId
    nodes: Sequence[int]
    sizes: Sequence[int]
    bucket_nbytes: int


def start_save(
    comm: Communicator, directory: ShardDirectory, prepare: Callable[[], Prepared]
) -> Started:
    """Copy this rank's state to host memory, and begin the files that it writes. Collective.

    When it returns the tensors may change. Memory, files and threads are all there then: no other
    rank relies on one that lacks them.

    Raises:
        PlanError: ranks save different iterations, or some in the background and others not.
        CheckpointError: ``prepare`` has raised on a rank, or a file cannot be made.
    """
    made: list[tuple[Prepared, list[ShardWriter], Rounds, _Background]] = []
    started: list[Started] = []
    folder = directory.holder_directory(comm.rank)

    def work() -> Written:
        yield_to_training()
        started[0].rounds.threads.submit_to_all(yield_to_training)
        time.sleep(_HEAD_START_S)
        return write_shards(started[0])

    def describe() -> Message:
        own, writers, background = prepare(), list[ShardWriter](), None
        copy_contents(own.contents, own.layout, own.image)
        undo.callback(_abandon, writers, directory, own.timeout_s)

        def begin_files() -> str:
            writers.extend(ShardWriter(folder) for _ in own.clique.global_ranks)
            return directory.name()

        name = run_within(Deadline.after(OPENING * own.timeout_s), directory, begin_files)
        rounds = _rounds(own, writers)
        undo.callback(rounds.threads.__exit__)
        if own.is_async:
            background = BackgroundWork(work, "local-save", own.image.numel())
            undo.callback(background.call_off)
        made.append((own, writers, rounds, background))
        said = own.iteration, own.stamp, own.is_async, own.image.numel(), own.max_bucket_nbytes
        return [*said, name]

    with ExitStack() as undo:
        answers = run_and_gather(comm, describe)  # 1
        _require_alike(answers)
        undo.pop_all()
    *_, sizes, buckets, _ = zip(*(answers[r] for r in made[0][0].clique.global_ranks), strict=True)
    agreed = SaveId(*answers[0][:2]), nodes_of([name for *_, name in answers]), sizes, min(buckets)
    started.append(Started(comm, directory, *made[0], *agreed))
    return started[0]


def _rounds(own: Prepared, writers: Sequence[ShardWriter]) -> Rounds:
    """Messages with this rank's pack to every member, and with theirs into files."""
    source = TensorBytes([own.image])
    outgoing = [Outgoing.of("own shard", rank, source) for rank in range(own.clique.size)]
    incoming = [
        Incoming(str(writer), rank, MESSAGE_NBYTES, partial(_write, writer))
        for rank, writer in enumerate(writers)
    ]
    return Rounds(own.clique, outgoing, incoming, own.max_bucket_nbytes, digests=True)


def _write(writer: ShardWriter, start: int, content: torch.Tensor) -> None:
    writer.write(start, to_host([content])[0])


def _require_alike(answers: Sequence[Message]) -> None:
    number, _, is_async, *_ = answers[0]
    for rank, (other, _, other_is, *_) in enumerate(answers):
        if other != number or number < 0 or other_is != is_async:
            raise PlanError(
                f"rank {rank} saves iteration {other} with is_async={other_is}, rank 0 iteration "
                f"{number} with is_async={is_async}; give the same on all ranks, and a number of 0 "
                "or more"
            )


def write_shards(started: Started) -> Written:
    """Write the packs of all members of a clique at each of them, durably; what this rank wrote.

    No file has a name yet. All members call it together, here or on a thread, and learn of its
    outcome in ``finish_save``.

    Raises:
        StorageError: a file cannot be written.
        UnsafeObjectError: this rank's state holds an object of a class that is not allowed.
    """
    own, rounds, sizes = started.own, started.rounds, started.sizes
    began, deadline = time.monotonic(), Deadline.after(WORK * own.timeout_s)
    pack, num_packs = own.layout.packs[0], started.comm.size
    digests = seal(pack, own.image.numpy(), str(started.save), num_packs)
    rounds.expect(sizes)
    share = started.bucket_nbytes // max(1, len(sizes) - 1)
    with rounds.threads:
        rounds.run(max(1, min(share, MESSAGE_NBYTES)), deadline)
    rounds.require_success()
    require_allowed(own.contents, own.allowed)  # peers have not waited for this
    flushes = [Job(None, writer, writer.flush) for writer in started.writers]
    Transfer(flushes, len(flushes)).wait(deadline.left_s)
    own_nbytes = own.image.numel()
    nbytes = f"own_nbytes {own_nbytes}, received_nbytes {sum(sizes) - own_nbytes}"
    seconds = time.monotonic() - began
    return f"num_shards {len(sizes)}, {nbytes}, seconds {seconds:.3f}", digests


def finish_save(
    started: Started,
    written: Callable[[], Written],
    session_id: str,
    last: LastSave | None,
    on_unchanged: str,
) -> tuple[Inventory, LastSave]:
    """Give the files their names, once every rank has written its own. Collective.

    ``written`` does ``write_shards``, or waits for it. Returns what the ranks had before, and
    ``last`` of the next save.

    If it fails on any rank, every rank raises, and nothing of the save stays. Where contact with a
    peer is lost its outcome is unknown: files with names stay, and count if all are there.

    Raises:
        PlanError: the save repeats the last one, and ``on_unchanged`` says so.
        StorageError: a file cannot be written, or has disappeared.
        CorruptCheckpointError: one is not as a peer has sent it.
        PeerError: the same on another rank.
    """
    comm, directory, save = started.comm, started.directory, started.save
    own, ends = started.own, list[LastSave]()
    members, timeout_s = own.clique.global_ranks, own.timeout_s

    def describe() -> Message:
        report, digests = written()
        ends.append(described_save(f"local iteration {save.iteration}", own.layout, [digests]))
        text = "rank %s: local save of iteration %s: %s"
        logger.log(comm.report_level, text, comm.rank, save.iteration, report)
        deadline = Deadline.after(ENDING * timeout_s)
        here = directory, comm.rank, started.nodes
        return [
            started.rounds.sent_digests(),
            listing(*here, save.training_id, session_id, deadline),
            compared(last, ends[0], on_unchanged),
        ]

    def give_names() -> None:
        for rank, writer in zip(members, started.writers, strict=True):
            writer.appear(LocalShardId(save, rank))

    def publish() -> None:
        started.rounds.compare([answers[rank][0] for rank in members])
        run_within(Deadline.after(ENDING * timeout_s), directory, give_names)

    try:
        answers = run_and_gather(comm, describe, follows=True)  # 2
        repeats = [how for *_, how in answers]
        has_trained = judged(repeats, is_first=comm.rank == 0)
        run_collectively(comm, publish, follows=True)  # 3
    except (PeerLostError, PeerTimeoutError):
        raise
    except CheckpointError:
        started.rounds.threads.__exit__()
        _abandon(started.writers, directory, timeout_s)
        raise
    listed = [files for _, files, _ in answers]
    before = build_inventory(directory, started.nodes, listed, save.training_id)
    return before, replace(ends[0], has_trained=has_trained)


def _abandon(writers: Sequence[ShardWriter], directory: ShardDirectory, timeout_s: float) -> None:
    """Remove what was written. Rank-local."""

    def remove() -> None:
        for writer in writers:
            writer.abandon()

    try:
        run_within(Deadline.after(CLEAN_UP * timeout_s), directory, remove)
    except StorageError as error:
        logger.warning("files of a local save that failed stay until the next one: %s", error)
