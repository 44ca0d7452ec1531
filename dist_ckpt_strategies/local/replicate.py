"""Send this rank's shard file to the other ranks of its clique, and store theirs and its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from dist_ckpt_strategies.comm.base import Communicator
from dist_ckpt_strategies.comm.collective import run_and_gather, run_collectively
from dist_ckpt_strategies.comm.exchange import Blocks, Incoming, Outgoing, exchange
from dist_ckpt_strategies.core.report import ReplicationReport
from dist_ckpt_strategies.device import TensorBytes, to_host
from dist_ckpt_strategies.errors import CorruptCheckpointError, PlanError
from dist_ckpt_strategies.local.shard_files import ShardWriter
from dist_ckpt_strategies.local.shard_format import (
    LocalShard,
    ShardLayout,
    shard_from_fields,
    shard_to_fields,
)
from dist_ckpt_strategies.storage.io_pool import clean_up_limit


@dataclass(frozen=True, slots=True)
class FilledShard:
    """A rank's shard of a save with its bytes.

    Attributes:
        shard: its description.
        payloads: the elements of its buffers, which may be the state's own memory; the last one is
            the state without its tensors, pickled.
    """

    shard: LocalShard
    payloads: tuple[torch.Tensor, ...]


def run_replicate(
    comm: Communicator,
    filled: FilledShard,
    open_writer: Callable[[LocalShard], ShardWriter],
    *,
    max_bucket_nbytes: int,
) -> ReplicationReport:
    """Store the files of all members of a clique at each of them.

    Collective over the clique: either every member returns, or every member raises and none of
    the files has appeared anywhere.

    Args:
        comm: the clique; a group of one stores its own file alone.
        filled: what this rank saves; its bytes must not change before this returns.
        open_writer: called for every file of the clique, this rank's own too.
        max_bucket_nbytes: bound on what travels at once in each direction.

    Raises:
        StorageError: a file cannot be written, such as for want of room.
        CorruptCheckpointError: a file arrived damaged.
        PlanError: a peer takes part in another save.
    """
    started = time.monotonic()
    fields = run_and_gather(comm, lambda: shard_to_fields(filled.shard))
    writers: list[ShardWriter] = []
    with ExitStack() as cleanup:

        def prepare() -> Blocks:
            for shard in _checked_shards(comm, fields):
                writer = open_writer(shard)
                cleanup.callback(_abandon, writer)
                writers.append(writer)
            own = _SharedReads(filled.payloads, writers[comm.rank].layout)
            return (
                [Outgoing("own tensors", rank, own.nbytes, own.read) for rank in range(comm.size)],
                [_incoming(rank, writer) for rank, writer in enumerate(writers)],
            )

        sent = exchange(
            comm,
            prepare,
            lambda: writers[comm.rank].digests.values(),  # noqa: PLW0108 - not there yet
            max_inflight_nbytes=max_bucket_nbytes,
            compares_digests=False,  # those of the buffers are
        )
        run_collectively(comm, lambda: _finish(comm, writers, sent))
        cleanup.pop_all()
    own_nbytes = writers[comm.rank].layout.nbytes
    return ReplicationReport(
        num_shards=len(writers),
        own_nbytes=own_nbytes,
        received_nbytes=sum(writer.layout.nbytes for writer in writers) - own_nbytes,
        seconds=time.monotonic() - started,
    )


def _checked_shards(comm: Communicator, fields: Sequence[Any]) -> list[LocalShard]:
    shards = [shard_from_fields(found) for found in fields]
    mine = shards[comm.rank].shard_id
    for rank, other in enumerate(shards):
        if other.shard_id.save != mine.save:
            raise PlanError(
                f"rank {comm.global_rank(rank)} saves {other.shard_id}, and this rank {mine}"
            )
    return shards


def _incoming(rank: int, writer: ShardWriter) -> Incoming:
    """The bytes behind a file's header, from the rank that saves it."""
    first = writer.layout.header_nbytes

    def take(start: int, content: torch.Tensor) -> None:
        writer.write(first + start, to_host([content])[0])

    return Incoming(str(writer), rank, writer.layout.nbytes - first, take)


class _SharedReads:
    """Reads tensors for several receivers, each message once: they get their messages in step."""

    def __init__(self, payloads: Sequence[torch.Tensor], layout: ShardLayout) -> None:
        offsets = [offset - layout.header_nbytes for offset in layout.byte_offsets]
        self._tensors = TensorBytes(payloads, offsets)
        self.nbytes = layout.nbytes - layout.header_nbytes
        self._lock = threading.Lock()
        self._last: tuple[int, torch.Tensor] | None = None

    def read(self, start: int, buffer: torch.Tensor) -> torch.Tensor:
        """See Outgoing."""
        with self._lock:
            if self._last is None or self._last[0] != start:
                self._last = (start, self._tensors.read(start, buffer))
            return self._last[1]


def _abandon(writer: ShardWriter) -> None:
    with clean_up_limit():
        writer.abandon()


def _finish(comm: Communicator, writers: Sequence[ShardWriter], sent: Sequence[list[int]]) -> None:
    """Compare what arrived with what was sent, and finish all files."""
    for rank, (writer, expected) in enumerate(zip(writers, sent, strict=True)):
        pairs = zip(writer.shard.buffers, writer.digests.values(), expected, strict=True)
        for buffer, found, digest in pairs:
            if found != digest:
                raise CorruptCheckpointError(
                    f"{buffer.name}: the copy of {writer.shard.shard_id} that rank "
                    f"{comm.global_rank(rank)} sent did not arrive as it was",
                    key=buffer.name,
                )
    for writer, digests in zip(writers, sent, strict=True):
        writer.finish(digests)
