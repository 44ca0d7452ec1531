"""Shard files between ranks: copied within a clique at a save, retrieved at a load."""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import torch

from dist_ckpt_strategies.comm.base import Communicator, run_and_gather, run_collectively
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
    END_NBYTES,
    BufferDigests,
    Digest,
    FilledShard,
    LocalShard,
    decode_footer,
    footer_nbytes,
)
from dist_ckpt_strategies.storage.file_systems import Bytes
from dist_ckpt_strategies.storage.io_pool import (
    OrderedQueues,
    clean_up_limit,
    run_with_limit,
    settled,
)

_NUM_READERS = min(4, os.cpu_count() or 1)
"""Threads that read this node's own files."""


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

    Raises a StorageError if a file cannot be written, a CorruptCheckpointError if it arrived
    damaged, and a PlanError if a peer takes part in another save.
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
            source = TensorBytes(filled.payloads, own.byte_offsets)
            return (
                [Outgoing.of("own tensors", rank, source) for rank in range(comm.size)],
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


def run_retrieve(
    comm: Communicator, plan: ExchangePlan, paths: Mapping[str, Path], *, max_inflight_nbytes: int
) -> tuple[list[FilledShard], dict[tuple[int, str], str]]:
    """Carry out a plan: read, send, receive, and compare every digest.

    Collective: every rank of ``comm`` calls this for an equal plan, with the paths of its own
    copies, by id. A copy that is damaged or cannot be read is no error.

    Returns what this rank wanted; and the same on every rank, why copies cannot be used: the
    reason, with the file, by the rank that reads the copy, within the group, and by id. If there is
    any, what was to come from it is missing.
    """
    with ExitStack() as stack:
        files = _Files(comm, paths, stack)
        sizes = run_and_gather(comm, lambda: files.open(plan.required_ids(comm.rank)))
        found = exchange(
            comm,
            lambda: files.prepare(plan.entries, sizes),
            files.find_bad,
            max_inflight_nbytes=max_inflight_nbytes,
        )
    reasons = [tuple(one) for of_rank in found for one in of_rank]
    # Of two, the one that names the file: from the rank that reads it.
    reasons.sort(key=lambda one: one[3])
    return files.shards, {(rank, id_): why for rank, id_, why, _ in reasons}


class _Files:
    """The files that this rank reads, for itself and for others, and memory for those it gets.

    ``shards`` are those of these that are whole, once ``find_bad`` has looked.
    """

    def __init__(self, comm: Communicator, paths: Mapping[str, Path], stack: ExitStack) -> None:
        self._comm, self._paths, self._stack = comm, paths, stack
        self._rank = comm.rank
        self._readers: dict[str, ShardReader] = {}
        self._failures: dict[str, CheckpointError] = {}
        self._own_reads: dict[str, list[Future[Digest]]] = {}
        self._memory: dict[Transfer, torch.Tensor] = {}
        self.shards: list[FilledShard] = []

    def open(self, ids: Iterable[str]) -> dict[str, int]:
        """Open files; the sizes of the good ones, by id."""
        for id_ in sorted(ids):
            with self._noted(id_):
                path = self._paths[id_]
                self._readers[id_] = run_with_limit(partial(ShardReader, path), path)
        return {id_: reader.nbytes for id_, reader in self._readers.items()}

    @contextmanager
    def _noted(self, id_: str) -> Iterator[None]:
        """What is wrong with a file is reported to all ranks, which use another copy."""
        try:
            yield
        except StorageTimeoutError:
            raise
        except Exception as error:  # noqa: BLE001 - see above
            self._failures[id_] = as_checkpoint_error(error)

    def prepare(self, transfers: Iterable[Transfer], sizes: Sequence[Mapping[str, int]]) -> Blocks:
        """Begin to read this node's own files; what goes to other ranks, and comes from them.

        ``sizes`` are those that ``open`` returned on each rank.
        """
        threads = self._stack.enter_context(OrderedQueues(_NUM_READERS))
        outgoing, incoming = [], []
        for t in transfers:
            nbytes = sizes[t.sender].get(t.id_)
            if nbytes is None:
                continue
            if t.receiver == self._rank:
                memory = self._memory[t] = host_memory(nbytes, is_pinned=False)
                if t.sender != self._rank:
                    target = TensorBytes([memory])
                    incoming.append(Incoming.of(t.id_, t.sender, target, self._comm.device))
                    continue
                reader = self._readers[t.id_]
                places = zip(reader.shard.byte_offsets, reader.shard.buffers, strict=True)
                into = [memory[start : start + buffer.nbytes].numpy() for start, buffer in places]
                self._own_reads[t.id_] = [
                    threads.submit(number % _NUM_READERS, reader.read_buffer, number, place)
                    for number, place in enumerate(into)
                ]
            elif t.sender == self._rank:
                read = partial(self._read, t.id_)
                outgoing.append(Outgoing(t.id_, t.receiver, nbytes, read))
        return outgoing, incoming

    def _read(self, id_: str, start: int, buffer: torch.Tensor) -> torch.Tensor:
        """Bytes of a file, on the host; zeros once something is wrong with it."""
        host = buffer
        if buffer.device.type != "cpu":
            host = torch.empty_like(buffer, device="cpu")
        with self._noted(id_):
            if id_ not in self._failures:
                self._readers[id_].read(start, host.numpy())
                return host
        return host.zero_()

    def find_bad(self) -> list[list[object]]:
        """Damaged copies: who read it, its id, the reason, whether that names the file."""
        failed: list[list[object]] = []
        for t, memory in self._memory.items():
            try:
                if t.sender == self._rank:
                    reader = self._readers[t.id_]
                    shard, expected = reader.shard, reader.digests
                    found = [settled(read, reader.path) for read in self._own_reads[t.id_]]
                else:
                    shard, expected, found = _described(memory.numpy())
                for buffer, digest, own in zip(shard.buffers, expected, found, strict=True):
                    if own != digest:
                        raise CorruptCheckpointError(
                            f"{buffer.name} has digest {own:016x}, expected {digest:016x}"
                        )
                self.shards.append(filled_shard(shard, memory))
            except StorageTimeoutError:
                raise
            except CheckpointError as error:
                failed.append([t.sender, t.id_, f"{t.id_}: {error.message}", False])
        mine = self._failures.items()
        return failed + [[self._rank, id_, str(error), True] for id_, error in mine]


def _described(content: Bytes) -> tuple[LocalShard, tuple[Digest, ...], list[Digest]]:
    """What a file in memory says that it holds, the digests that it states, and those it has."""
    nbytes = footer_nbytes(content[-END_NBYTES:].tobytes(), content.size)
    shard, expected = decode_footer(content[-nbytes:].tobytes(), content.size)
    digests = BufferDigests(shard)
    digests.take(0, content[: shard.nbytes])
    return shard, expected, digests.values()


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
