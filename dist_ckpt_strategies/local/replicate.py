"""Send this rank's shard file to the other ranks of its clique, and store theirs and its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from dist_ckpt_strategies.comm.base import Bytes, Communicator
from dist_ckpt_strategies.comm.collective import run_and_gather, run_collectively
from dist_ckpt_strategies.comm.exchange import Blocks, Incoming, Outgoing, exchange
from dist_ckpt_strategies.core.report import ReplicationReport
from dist_ckpt_strategies.device import TensorBytes, host_memory, to_host, torch_dtype
from dist_ckpt_strategies.errors import CorruptCheckpointError, PlanError
from dist_ckpt_strategies.local.shard_format import (
    BufferDigests,
    LocalShard,
    ShardLayout,
    shard_from_fields,
    shard_layout,
    shard_to_fields,
)
from dist_ckpt_strategies.storage.time_limit import clean_up_limit


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


def tensors_in(
    memory: torch.Tensor, shard: LocalShard, layout: ShardLayout
) -> tuple[torch.Tensor, ...]:
    """The buffers of a file that lies in memory.

    Each tensor has a storage of its own: saving it would save its neighbours too otherwise.
    """
    content = memory.numpy()
    return tuple(
        torch.from_numpy(content[start : start + buffer.nbytes])
        .view(torch_dtype(buffer.dtype))
        .reshape(buffer.shape)
        if buffer.nbytes
        else torch.empty(buffer.shape, dtype=torch_dtype(buffer.dtype), device="cpu")
        for buffer, start in zip(shard.buffers, layout.byte_offsets, strict=True)
    )


class ShardSink(Protocol):
    """Stores a file whose bytes arrive in order, without its header."""

    def write(self, byte_offset: int, content: Bytes) -> None:
        """Store bytes that have arrived.

        Raises:
            StorageError: they cannot be stored.
        """
        ...

    def finish(self, digests: Sequence[int]) -> None:
        """All is there, and its buffers have these digests.

        Raises:
            StorageError: it cannot be made durable.
        """
        ...

    def abandon(self) -> None:
        """Leave nothing behind, finished or not.

        Raises:
            StorageError: something cannot be removed.
        """
        ...


class MemorySink:
    """A file in memory; see ShardSink."""

    def __init__(self, shard: LocalShard) -> None:
        self.shard = shard
        self._layout = shard_layout(shard)
        self._memory = host_memory(self._layout.nbytes, is_pinned=False)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """One for each buffer."""
        return tensors_in(self._memory, self.shard, self._layout)

    def write(self, byte_offset: int, content: Bytes) -> None:
        """See ShardSink."""
        self._memory.numpy()[byte_offset : byte_offset + content.size] = content

    def finish(self, digests: Sequence[int]) -> None:
        """See ShardSink."""

    def abandon(self) -> None:
        """See ShardSink."""


OpenSink = Callable[[LocalShard], ShardSink | None]
"""Where a file goes; None for this rank's own if it is not stored."""


def run_replicate(
    comm: Communicator,
    filled: FilledShard,
    open_sink: OpenSink,
    *,
    max_bucket_nbytes: int,
) -> ReplicationReport:
    """Store the files of all members of a clique at each of them.

    Collective over the clique: either every member returns, or every member raises and none of
    the files has appeared anywhere.

    Args:
        comm: the clique; a group of one stores its own file alone.
        filled: what this rank saves; its bytes must not change before this returns.
        open_sink: called for every file of the clique, this rank's own too.
        max_bucket_nbytes: bound on what travels at once in each direction.

    Raises:
        StorageError: a file cannot be written, such as for want of room.
        CorruptCheckpointError: a file arrived damaged.
        PlanError: a peer takes part in another save.
    """
    started = time.monotonic()
    fields = run_and_gather(comm, lambda: _checked_fields(filled.shard, filled.payloads))
    with ExitStack() as sinks:
        streams: list[Stream] = []

        def prepare() -> Blocks:
            for found in _checked_parts(comm, fields):
                stream = Stream(found, open_sink(found))
                streams.append(stream)
                if stream.sink is not None:
                    sinks.callback(_abandon, stream.sink)
            own = SharedReads(filled.payloads, streams[comm.rank].layout)
            outgoing = [
                Outgoing("own tensors", rank, own.nbytes, own.read) for rank in range(comm.size)
            ]
            return outgoing, [stream.incoming(rank) for rank, stream in enumerate(streams)]

        def claim() -> list[int]:
            return streams[comm.rank].digests.values()

        claimed = exchange(
            comm,
            prepare,
            claim,
            max_inflight_nbytes=max_bucket_nbytes,
            compares_digests=False,  # those of the buffers are
        )
        run_collectively(comm, lambda: _finish(comm, streams, claimed))
        sinks.pop_all()
    own_nbytes = streams[comm.rank].layout.nbytes
    return ReplicationReport(
        num_shards=len(streams),
        own_nbytes=own_nbytes,
        received_nbytes=sum(stream.layout.nbytes for stream in streams) - own_nbytes,
        seconds=time.monotonic() - started,
    )


def _checked_fields(shard: LocalShard, payloads: Sequence[torch.Tensor]) -> dict[str, Any]:
    found = [tensor.numel() * tensor.element_size() for tensor in payloads]
    expected = [buffer.nbytes for buffer in shard.buffers]
    if found != expected:
        raise PlanError(f"{shard.shard_id}: buffers of {expected} bytes, found {found}")
    return shard_to_fields(shard)


def _checked_parts(comm: Communicator, fields: Sequence[Any]) -> list[LocalShard]:
    shards = [shard_from_fields(found) for found in fields]
    mine = shards[comm.rank].shard_id
    for rank, other in enumerate(shards):
        if other.shard_id.save != mine.save:
            raise PlanError(
                f"rank {comm.global_rank(rank)} saves {other.shard_id}, and this rank {mine}"
            )
    return shards


class Stream:
    """A file on its way to its sink.

    Attributes:
        shard: what it holds.
        layout: where its buffers are.
        sink: where it goes.
        digests: of the bytes that have passed.
    """

    def __init__(self, shard: LocalShard, sink: ShardSink | None) -> None:
        self.shard = shard
        self.layout = shard_layout(shard)
        self.sink = sink
        self.digests = BufferDigests(shard, self.layout)

    def incoming(self, rank: int) -> Incoming:
        """Its bytes behind the header, from the rank that saves it."""
        nbytes = self.layout.nbytes - self.layout.header_nbytes
        return Incoming(str(self.sink or self.shard.shard_id), rank, nbytes, self._take)

    def _take(self, start: int, content: torch.Tensor) -> None:
        (host,) = to_host([content])
        self.digests.take(self.layout.header_nbytes + start, host)
        if self.sink is not None:
            self.sink.write(self.layout.header_nbytes + start, host)


class SharedReads:
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


def _abandon(sink: ShardSink) -> None:
    with clean_up_limit():
        sink.abandon()


def _finish(comm: Communicator, streams: Sequence[Stream], claimed: Sequence[list[int]]) -> None:
    """Compare what arrived with what was sent, and finish all files."""
    for rank, (stream, expected) in enumerate(zip(streams, claimed, strict=True)):
        pairs = enumerate(zip(stream.digests.values(), expected, strict=True))
        number = next((number for number, (found, sent) in pairs if found != sent), None)
        if number is not None:
            name = stream.shard.buffers[number].name
            raise CorruptCheckpointError(
                f"{name}: the copy of {stream.shard.shard_id} that rank {comm.global_rank(rank)} "
                "sent did not arrive as it was",
                key=name,
            )
    for stream, digests in zip(streams, claimed, strict=True):
        if stream.sink is not None:
            stream.sink.finish(digests)
