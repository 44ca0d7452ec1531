"""Bring shard files from the disks that have them into the memory of the ranks that want them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from dist_ckpt_strategies.comm.base import Bytes, Communicator
from dist_ckpt_strategies.comm.collective import run_and_gather
from dist_ckpt_strategies.comm.exchange import MESSAGE_NBYTES, Blocks, Incoming, Outgoing, exchange
from dist_ckpt_strategies.device import host_memory, torch_dtype
from dist_ckpt_strategies.errors import (
    CheckpointError,
    CorruptCheckpointError,
    StorageTimeoutError,
    as_checkpoint_error,
)
from dist_ckpt_strategies.local.plan import ExchangePlan, Transfer
from dist_ckpt_strategies.local.replicate import FilledShard
from dist_ckpt_strategies.local.shard_files import ShardReader
from dist_ckpt_strategies.local.shard_format import (
    PREFIX_NBYTES,
    BufferDigests,
    StoredShard,
    decode_header,
    description_nbytes,
)
from dist_ckpt_strategies.storage.io_pool import OrderedQueues, run_with_limit, settled

_NUM_READERS = min(4, os.cpu_count() or 1)
"""Threads that read this node's own files."""

_READ_NBYTES = 2 << 20
"""Read at once: little enough to be in the processor's cache still when its digest is taken."""


class FileSource:
    """A file on this node that other ranks may get. Threads may share it.

    Attributes:
        stored: what its header describes; None if it cannot be used.
        failure: what is wrong with it, once that is known.
    """

    def __init__(self, shard_id: str, path: Path | None) -> None:
        self._name = str(path or shard_id)
        self.stored: StoredShard | None = None
        self.failure: CheckpointError | None = None
        self._reader: ShardReader | None = None
        try:
            if path is None:
                raise CorruptCheckpointError(f"{shard_id}: this rank has no copy of it")
            self._reader = run_with_limit(partial(ShardReader, path), path)
            self.stored = self._reader.stored
        except StorageTimeoutError:
            raise
        except CheckpointError as error:
            self.failure = error

    def __str__(self) -> str:
        """The file."""
        return self._name

    def read(self, byte_offset: int, buffer: torch.Tensor) -> torch.Tensor:
        """Bytes of the file, on the host; zeros once something is wrong with it."""
        host = buffer
        if host.device.type != "cpu":
            host = torch.empty(buffer.numel(), dtype=torch.uint8, device="cpu")
        try:
            if self.failure is None and self._reader is not None:
                self._reader.read(byte_offset, host.numpy())
                return host
        except Exception as error:  # noqa: BLE001 - reported to all ranks, which use another copy
            self.failure = as_checkpoint_error(error)
        return host.zero_()

    def close(self) -> None:
        """Close the file."""
        if self._reader is not None:
            self._reader.close()


class Retrieval(NamedTuple):
    """What arrived.

    Attributes:
        shards: what this rank wanted and got, by id.
        bad: why copies cannot be used, with the file, by the rank that reads them, within the
            group, and by id; the same on every rank. What was to come from them is missing in
            ``shards``.
    """

    shards: Mapping[str, FilledShard]
    bad: Mapping[tuple[int, str], str]


def run_retrieve(
    comm: Communicator,
    decide: Callable[[], ExchangePlan],
    open_source: Callable[[str], FileSource],
    *,
    max_inflight_nbytes: int,
) -> Retrieval:
    """Carry out a plan: read, send, receive, and compare every digest.

    Collective: every rank of ``comm`` calls this for an equal plan. A copy that is damaged or
    cannot be read is no error: it is listed on every rank.

    Args:
        comm: the ranks that the plan was made for.
        decide: says who reads what for whom; what it raises, every rank raises.
        open_source: this rank's copy of a file that the plan has it read.
        max_inflight_nbytes: bound on what travels at once in each direction.

    Raises:
        PeerError: a rank does not take part any more.
    """
    with ExitStack() as stack:
        files = _Files(comm, stack)
        sizes = run_and_gather(comm, lambda: files.open(decide(), open_source))
        found = exchange(
            comm,
            lambda: files.prepare(sizes),
            files.find_bad,
            max_inflight_nbytes=max_inflight_nbytes,
            compares_digests=False,  # those of the buffers are
        )
    reports = sorted(report for of_rank in found for report in of_rank)
    bad = {(rank, shard_id): reason for rank, shard_id, reason in reports}
    arrived = files.arrivals.items()
    return Retrieval({t.id_: a.shard() for t, a in arrived if (t.sender, t.id_) not in bad}, bad)


class _Files:
    """The files that this rank reads for itself and for others, and those that it gets.

    Attributes:
        sources: by id, what it reads.
        arrivals: what it gets.
    """

    def __init__(self, comm: Communicator, stack: ExitStack) -> None:
        self._rank = comm.rank
        self._stack = stack
        self._transfers: tuple[Transfer, ...] = ()
        self._own_reads: list[tuple[FileSource, Future[None]]] = []
        self.sources: dict[str, FileSource] = {}
        self.arrivals: dict[Transfer, _Arrival] = {}

    def open(self, plan: ExchangePlan, source_of: Callable[[str], FileSource]) -> dict[str, int]:
        """Open the files of a plan; returns the sizes of those that can be used, by id."""
        self._transfers = plan.entries
        for shard_id in sorted({t.id_ for t in plan.entries if t.sender == self._rank}):
            source = self.sources[shard_id] = source_of(shard_id)
            self._stack.callback(source.close)
        return {
            shard_id: source.stored.layout.nbytes
            for shard_id, source in self.sources.items()
            if source.stored is not None
        }

    def prepare(self, sizes: Sequence[Mapping[str, int]]) -> Blocks:
        """Begin to read this node's own files; what goes to other ranks, and comes from them.

        Args:
            sizes: for each rank what ``open`` returned.
        """
        moved = [t for t in self._transfers if t.id_ in sizes[t.sender]]
        self.arrivals.update(
            {t: _Arrival(sizes[t.sender][t.id_]) for t in moved if t.receiver == self._rank}
        )
        readers = self._stack.enter_context(OrderedQueues(_NUM_READERS))
        for source, arrival in (
            (self.sources[t.id_], arrival)
            for t, arrival in self.arrivals.items()
            if t.sender == self._rank
        ):
            self._own_reads.extend(
                (source, readers.submit(number % _NUM_READERS, read))
                for number, read in enumerate(arrival.reads_of(source))
            )
        outgoing = [
            Outgoing(t.id_, t.receiver, sizes[t.sender][t.id_], self.sources[t.id_].read)
            for t in moved
            if t.sender == self._rank != t.receiver
        ]
        return outgoing, [
            arrival.incoming(t) for t, arrival in self.arrivals.items() if t.sender != self._rank
        ]

    def find_bad(self) -> list[list[object]]:
        """Every copy that this rank found to be damaged: who read it, its id, and the reason."""
        for source, reading in self._own_reads:
            settled(reading, source)
        failed = [
            [self._rank, shard_id, str(source.failure)]
            for shard_id, source in self.sources.items()
            if source.failure is not None
        ]
        return failed + [
            [t.sender, t.id_, damage]
            for t, arrival in self.arrivals.items()
            if (damage := arrival.damage()) is not None
        ]


class _Arrival:
    """A file on its way into this rank's memory, where it has its layout.

    New memory comes in large pages where the system has them: it is touched for the first time.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._memory = host_memory(nbytes, is_pinned=False)
        self._num_checked = 0
        self._stored: StoredShard | None = None
        self._digests: BufferDigests | None = None
        self._failure: CheckpointError | None = None

    def incoming(self, transfer: Transfer) -> Incoming:
        """All its bytes, the header first."""
        return Incoming(transfer.id_, transfer.sender, self.nbytes, self._take, self._place)

    def reads_of(self, source: FileSource) -> Iterator[Callable[[], None]]:
        """What reads it from this node, buffers together that are small; threads may share it."""
        assert source.stored is not None  # noqa: S101 - others are not moved
        self._stored, layout = source.stored, source.stored.layout
        self._digests = BufferDigests(source.stored.shard, layout)
        first = end = layout.header_nbytes
        for buffer, start in zip(source.stored.shard.buffers, layout.byte_offsets, strict=True):
            if end - first >= MESSAGE_NBYTES:
                yield partial(self._read, source, first, start)
                first = start
            end = start + buffer.nbytes
        yield partial(self._read, source, first, end)

    def _read(self, source: FileSource, first: int, end: int) -> None:
        for start in range(first, end, _READ_NBYTES):
            memory = source.read(start, self._place(start, min(_READ_NBYTES, end - start)))
            assert self._digests is not None  # noqa: S101 - see reads_of
            self._digests.take(start, memory.numpy())

    def _place(self, start: int, nbytes: int) -> torch.Tensor:
        return self._memory[start : start + nbytes]

    def _take(self, start: int, content: torch.Tensor) -> None:
        """The bytes up to these are there, in their place."""
        end = start + content.numel()
        try:
            if self._digests is None and self._failure is None:
                self._begin(self._memory[:end].numpy())
        except CheckpointError as error:
            self._failure = error
        if self._digests is not None:
            self._digests.take(self._num_checked, self._memory[self._num_checked : end].numpy())
            self._num_checked = end

    def _begin(self, content: Bytes) -> None:
        """Look at the header once it is there."""
        if content.size >= PREFIX_NBYTES:
            stop = PREFIX_NBYTES + description_nbytes(content[:PREFIX_NBYTES].tobytes())
            if content.size >= stop:
                self._stored = decode_header(content[:stop].tobytes())
                self._digests = BufferDigests(self._stored.shard, self._stored.layout)
                self._num_checked = stop

    def damage(self) -> str | None:
        """What is not as its digest says, once all is there."""
        if self._stored is None or self._digests is None:
            return str(self._failure or "its header did not arrive")
        if self._stored.layout.nbytes != self.nbytes:
            return f"{self._stored.shard.shard_id} has {self.nbytes} bytes"
        pairs = zip(self._stored.digests, self._digests.values(), strict=True)
        for buffer, (expected, found) in zip(self._stored.shard.buffers, pairs, strict=True):
            if found != expected:
                where = f"{buffer.name}: {self._stored.shard.shard_id}"
                return f"{where} has digest {found:016x}, expected {expected:016x}"
        return None

    def shard(self) -> FilledShard:
        """The file, once it is known to be whole.

        Each tensor has a storage of its own: saving it would save its neighbours too otherwise.
        """
        assert self._stored is not None  # noqa: S101 - it has no damage
        shard, content = self._stored.shard, self._memory.numpy()
        payloads = (
            torch.from_numpy(content[start : start + buffer.nbytes])
            .view(torch_dtype(buffer.dtype))
            .reshape(buffer.shape)
            if buffer.nbytes
            else torch.empty(buffer.shape, dtype=torch_dtype(buffer.dtype), device="cpu")
            for buffer, start in zip(shard.buffers, self._stored.layout.byte_offsets, strict=True)
        )
        return FilledShard(shard, tuple(payloads))
