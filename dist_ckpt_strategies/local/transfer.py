"""Shard files between ranks: copied within a clique at a save, retrieved at a load."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from dist_ckpt_strategies.comm.base import Communicator
from dist_ckpt_strategies.comm.collective import run_and_gather, run_collectively
from dist_ckpt_strategies.comm.exchange import Blocks, Incoming, Outgoing, exchange
from dist_ckpt_strategies.core.report import ReplicationReport
from dist_ckpt_strategies.device import TensorBytes, host_memory, to_host, torch_dtype
from dist_ckpt_strategies.errors import (
    CheckpointError,
    CorruptCheckpointError,
    PlanError,
    StorageTimeoutError,
    as_checkpoint_error,
)
from dist_ckpt_strategies.local.plan import ExchangePlan, Transfer
from dist_ckpt_strategies.local.shard_files import ShardReader, ShardWriter
from dist_ckpt_strategies.local.shard_format import (
    BufferDigests,
    Digest,
    FilledShard,
    LocalShard,
    decode_footer,
)
from dist_ckpt_strategies.storage.io_pool import (
    OrderedQueues,
    clean_up_limit,
    run_with_limit,
    settled,
)

_NUM_READERS = min(4, os.cpu_count() or 1)
"""Threads that read this node's own files."""

_READ_NBYTES = 2 << 20
"""Read at once: little enough to be in the processor's cache still when its digest is taken."""


def run_replicate(
    comm: Communicator,
    filled: FilledShard,
    open_writer: Callable[[LocalShard], ShardWriter],
    *,
    max_bucket_nbytes: int,
) -> ReplicationReport:
    """Store the files of all members of a clique at each of them.

    Collective over the clique: either every member returns, or every member raises and none of the
    files has appeared anywhere. The bytes of ``filled`` must not change before this returns.
    ``open_writer`` is called for every file of the clique, this rank's own too.
    ``max_bucket_nbytes`` bounds what travels at once in each direction.

    Raises:
        StorageError: a file cannot be written, for example if the disk is full.
        CorruptCheckpointError: a file arrived damaged.
        PlanError: a peer takes part in another save.
    """
    started = time.monotonic()
    own = filled.shard
    messages = run_and_gather(comm, own.to_message)
    writers: list[ShardWriter] = []
    with ExitStack() as cleanup:

        def prepare() -> Blocks:
            for rank, message in enumerate(messages):
                shard = LocalShard.from_message(message)
                if shard.shard_id.save != own.shard_id.save:
                    who = comm.global_ranks[rank]
                    raise PlanError(f"rank {who} saves {shard.shard_id}, this rank {own.shard_id}")
                writer = open_writer(shard)
                cleanup.callback(_abandon, writer)
                writers.append(writer)
            read = _shared_reads(TensorBytes(filled.payloads, own.byte_offsets))
            return (
                [Outgoing("own tensors", rank, own.nbytes, read) for rank in range(comm.size)],
                [
                    Incoming(str(writer), rank, writer.shard.nbytes, partial(_write, writer))
                    for rank, writer in enumerate(writers)
                ],
            )

        sent = exchange(
            comm,
            prepare,
            lambda: writers[comm.rank].digests.values(),  # noqa: PLW0108 - not there yet
            max_inflight_nbytes=max_bucket_nbytes,
        )
        run_collectively(comm, lambda: _finish(comm, writers, sent))
        cleanup.pop_all()
    return ReplicationReport(
        num_shards=len(writers),
        own_nbytes=own.nbytes,
        received_nbytes=sum(writer.shard.nbytes for writer in writers) - own.nbytes,
        seconds=time.monotonic() - started,
    )


def _shared_reads(tensors: TensorBytes) -> Callable[[int, torch.Tensor], torch.Tensor]:
    """Reads each message once for all receivers: they get their messages in step."""
    lock = threading.Lock()
    last: list[tuple[int, torch.Tensor]] = []

    def read(start: int, buffer: torch.Tensor) -> torch.Tensor:
        with lock:
            if not last or last[0][0] != start:
                last[:] = [(start, tensors.read(start, buffer))]
            return last[0][1]

    return read


def _write(writer: ShardWriter, start: int, content: torch.Tensor) -> None:
    writer.write(start, to_host([content])[0])


def _abandon(writer: ShardWriter) -> None:
    with clean_up_limit():
        writer.abandon()


def _finish(
    comm: Communicator, writers: Sequence[ShardWriter], sent: Sequence[Sequence[Digest]]
) -> None:
    """Compare what arrived with what was sent, and finish all files."""
    for rank, (writer, expected) in enumerate(zip(writers, sent, strict=True)):
        pairs = zip(writer.shard.buffers, writer.digests.values(), expected, strict=True)
        for buffer, found, digest in pairs:
            if found != digest:
                raise CorruptCheckpointError(
                    f"{buffer.name}: the copy of {writer.shard.shard_id} that rank "
                    f"{comm.global_ranks[rank]} sent did not arrive as it was",
                    key=buffer.name,
                )
    for writer, digests in zip(writers, sent, strict=True):
        writer.finish(digests)


class Retrieval(NamedTuple):
    """What arrived: what this rank wanted and got, by id, and why copies cannot be used.

    ``bad`` is the same on every rank: the reason, with the file, by the rank that reads the copy,
    within the group, and by id. What was to come from them is missing in ``shards``.
    """

    shards: Mapping[str, FilledShard]
    bad: Mapping[tuple[int, str], str]


def run_retrieve(
    comm: Communicator,
    plan: ExchangePlan,
    paths: Mapping[str, Path],
    *,
    max_inflight_nbytes: int,
) -> Retrieval:
    """Carry out a plan: read, send, receive, and compare every digest.

    Collective: every rank of ``comm`` calls this for an equal plan, with the paths of its own
    copies, by id. A copy that is damaged or cannot be read is no error: it is listed on every rank.
    """
    with ExitStack() as stack:
        files = _Files(comm.rank, plan.entries, stack)
        sizes = run_and_gather(comm, lambda: files.open(plan.required_ids(comm.rank), paths))
        found = exchange(
            comm,
            lambda: files.prepare(sizes),
            files.find_bad,
            max_inflight_nbytes=max_inflight_nbytes,
        )
    reports = sorted(report for of_rank in found for report in of_rank)
    bad = {(rank, shard_id): reason for rank, shard_id, reason in reports}
    shards = files.shards.items()
    return Retrieval({t.id_: one for t, one in shards if (t.sender, t.id_) not in bad}, bad)


class _Files:
    """The files that this rank reads, for itself and for others, and ``arrivals`` from them.

    ``shards`` are those of these that are whole, once ``find_bad`` has looked.
    """

    def __init__(self, rank: int, transfers: Sequence[Transfer], stack: ExitStack) -> None:
        self._rank = rank
        self._transfers = transfers
        self._stack = stack
        self._sources: dict[str, _Source] = {}
        self._own_reads: list[tuple[_Source, Future[None]]] = []
        self.arrivals: dict[Transfer, _Arrival] = {}
        self.shards: dict[Transfer, FilledShard] = {}

    def open(self, ids: Iterable[str], paths: Mapping[str, Path]) -> dict[str, tuple[int, int]]:
        """Open files; the sizes of footer and buffers of the good ones, by id."""
        sizes = {}
        for shard_id in sorted(ids):
            source = self._sources[shard_id] = _Source(paths[shard_id])
            if source.reader is not None:
                reader = self._stack.enter_context(source.reader)
                sizes[shard_id] = (len(reader.footer), reader.shard.nbytes)
        return sizes

    def prepare(self, sizes: Sequence[Mapping[str, tuple[int, int]]]) -> Blocks:
        """Begin to read this node's own files; what goes to other ranks, and comes from them.

        ``sizes`` are those that ``open`` returned on each rank.
        """
        threads = self._stack.enter_context(OrderedQueues(_NUM_READERS))
        outgoing: list[Outgoing] = []
        incoming: list[Incoming] = []
        for t in self._transfers:
            if t.id_ not in sizes[t.sender]:
                continue
            footer_nbytes, nbytes = sizes[t.sender][t.id_]
            if t.receiver == self._rank:
                arrival = self.arrivals[t] = _Arrival(nbytes, footer_nbytes)
            if t.sender == self._rank == t.receiver:
                self._own_reads += arrival.begin_reads(self._sources[t.id_], threads)
            elif t.sender == self._rank:
                source = self._sources[t.id_]
                outgoing.append(Outgoing(t.id_, t.receiver, footer_nbytes, source.read_footer))
                outgoing.append(Outgoing(t.id_, t.receiver, nbytes, source.read))
            elif t.receiver == self._rank:
                footer = TensorBytes([arrival.footer])
                incoming.append(Incoming(t.id_, t.sender, footer_nbytes, footer.write))
                incoming.append(Incoming(t.id_, t.sender, nbytes, arrival.take, arrival.place))
        return outgoing, incoming

    def find_bad(self) -> list[list[object]]:
        """Every copy that this rank found to be damaged: who read it, its id, and the reason."""
        for source, reading in self._own_reads:
            settled(reading, source.path)
        failed: list[list[object]] = [
            [self._rank, shard_id, str(source.failure)]
            for shard_id, source in self._sources.items()
            if source.failure is not None
        ]
        for t, arrival in self.arrivals.items():
            damage = arrival.damage()
            if damage is None:
                self.shards[t] = arrival.shard()
            else:
                failed.append([t.sender, t.id_, damage])
        return failed


class _Source:
    """A file on this node that ranks get. Threads may share it.

    ``reader`` is the open file, None if it cannot be used; ``failure`` is what is wrong with it,
    once that is known.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.reader: ShardReader | None = None
        self.failure: CheckpointError | None = None
        try:
            self.reader = run_with_limit(partial(ShardReader, path), path)
        except StorageTimeoutError:
            raise
        except CheckpointError as error:
            self.failure = error

    def read(self, byte_offset: int, buffer: torch.Tensor) -> torch.Tensor:
        """Bytes of the file, on the host; zeros once something is wrong with it."""
        host = buffer
        if host.device.type != "cpu":
            host = torch.empty(buffer.numel(), dtype=torch.uint8, device="cpu")
        try:
            if self.failure is None and self.reader is not None:
                self.reader.read(byte_offset, host.numpy())
                return host
        except Exception as error:  # noqa: BLE001 - reported to all ranks, which use another copy
            self.failure = as_checkpoint_error(error)
        return host.zero_()

    def read_footer(self, start: int, buffer: torch.Tensor) -> torch.Tensor:
        """Bytes of the footer."""
        assert self.reader is not None  # noqa: S101 - others are not moved
        content = bytearray(self.reader.footer[start : start + buffer.numel()])
        return torch.frombuffer(content, dtype=torch.uint8)


class _Arrival:
    """A file on its way into this rank's memory, where it has its layout.

    New memory comes in large pages where the system has them: it is touched for the first time.
    """

    def __init__(self, nbytes: int, footer_nbytes: int) -> None:
        self.footer = host_memory(footer_nbytes, is_pinned=False)
        self._memory = host_memory(nbytes, is_pinned=False)
        self._shard: LocalShard | None = None
        self._expected: Sequence[Digest] = ()
        self._digests: BufferDigests | None = None
        self._failure: str | None = None

    def begin_reads(
        self, source: _Source, threads: OrderedQueues
    ) -> list[tuple[_Source, Future[None]]]:
        """Have threads read it from this node."""
        assert source.reader is not None  # noqa: S101 - others are not moved
        self._describe(source.reader.shard, source.reader.digests)
        places = zip(source.reader.shard.byte_offsets, source.reader.shard.buffers, strict=True)
        return [
            (
                source,
                threads.submit(
                    number % _NUM_READERS, self._read, source, start, start + buffer.nbytes
                ),
            )
            for number, (start, buffer) in enumerate(places)
        ]

    def _read(self, source: _Source, first: int, end: int) -> None:
        for start in range(first, end, _READ_NBYTES):
            place = self.place(start, min(_READ_NBYTES, end - start))
            self.take(start, source.read(start, place))

    def _describe(self, shard: LocalShard, digests: Sequence[Digest]) -> None:
        self._shard, self._expected, self._digests = shard, digests, BufferDigests(shard)

    def place(self, start: int, nbytes: int) -> torch.Tensor:
        """Where bytes of the buffers belong."""
        return self._memory[start : start + nbytes]

    def take(self, start: int, content: torch.Tensor) -> None:
        """The next bytes of the buffers, in their place already; the footer came before them."""
        if self._digests is None and self._failure is None:
            try:
                shard, digests = decode_footer(self.footer.numpy().tobytes())
                if shard.nbytes != self._memory.numel():
                    raise CorruptCheckpointError(f"{shard.shard_id} has {shard.nbytes} bytes")
                self._describe(shard, digests)
            except CheckpointError as error:
                self._failure = str(error)
        if self._digests is not None:
            self._digests.take(start, content.numpy())

    def damage(self) -> str | None:
        """What is not as its digest says, once all is there."""
        if self._shard is None or self._digests is None:
            return self._failure or "its description did not arrive"
        pairs = zip(self._expected, self._digests.values(), strict=True)
        for buffer, (expected, found) in zip(self._shard.buffers, pairs, strict=True):
            if found != expected:
                where = f"{buffer.name}: {self._shard.shard_id}"
                return f"{where} has digest {found:016x}, expected {expected:016x}"
        return None

    def shard(self) -> FilledShard:
        """The file, once it is known to be whole."""
        assert self._shard is not None  # noqa: S101 - it has no damage
        return filled_shard(self._shard, self._memory)


def filled_shard(shard: LocalShard, memory: torch.Tensor) -> FilledShard:
    """A shard whose bytes are, or will be, in memory with the layout of its file.

    Each tensor has a storage of its own: saving it would save its neighbours too otherwise.
    """
    content, payloads = memory.numpy(), []
    for buffer, start in zip(shard.buffers, shard.byte_offsets, strict=True):
        dtype = torch_dtype(buffer.dtype)
        if buffer.nbytes:
            own = torch.from_numpy(content[start : start + buffer.nbytes]).view(dtype)
        else:
            own = torch.empty(0, dtype=dtype, device="cpu")
        payloads.append(own.reshape(buffer.shape))
    return FilledShard(shard, tuple(payloads))
