"""Send this rank's part to its peers, and store theirs, and its own, while they travel."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import islice

import numpy as np
import torch
import xxhash

from dist_ckpt_strategies.comm.agree import agree, agree_and_gather, agree_and_gather_bytes
from dist_ckpt_strategies.comm.base import Bytes, Communicator, Receive, Send
from dist_ckpt_strategies.core.messages import Message
from dist_ckpt_strategies.core.report import ReplicationReport
from dist_ckpt_strategies.errors import (
    CheckpointError,
    CorruptCheckpointError,
    PlanError,
    StorageTimeoutError,
)
from dist_ckpt_strategies.local.part_format import (
    Part,
    PartLayout,
    part_from_wire,
    part_layout,
    part_to_wire,
)
from dist_ckpt_strategies.local.part_streams import BufferDigests, PartSink, TensorSource
from dist_ckpt_strategies.local.plan import ReplicationPlan, build_replication_plan
from dist_ckpt_strategies.storage.io_pool import OrderedQueues, settled
from dist_ckpt_strategies.storage.time_limit import clean_up_limit

_BOUND_NBYTES = 8
_PREFIX_NBYTES = 2 * _BOUND_NBYTES
"""A bound and its digest, before the description of a part that travels."""

_MAX_BOUND = (1 << 63) - 1

_NUM_BUCKETS = 2
"""Buckets of each peer: one is stored while the next arrives."""

OpenSink = Callable[[Part, PartLayout], PartSink | None]
"""What becomes of a part; None if nothing does, as for one's own that is at hand."""


def run_replicate(
    comm: Communicator,
    part: Part,
    payloads: Sequence[torch.Tensor],
    open_sink: OpenSink,
    *,
    max_bucket_nbytes: int,
) -> ReplicationReport:
    """Store the parts of all members of a clique at each of them.

    Collective over the clique: either every member returns, or every member raises and none of
    the parts has been finished anywhere. Five meetings, and an exchange for each round.

    Args:
        comm: the clique; a group of one stores its own part alone.
        part: what this rank saves.
        payloads: the elements of its buffers; read, not changed. They must not change before
            this returns.
        open_sink: called for every part of the clique, this rank's own too.
        max_bucket_nbytes: bound on what travels at once in each direction; where members give
            different ones, the least. Takes two to three
            times as much memory; over a device, a bucket there in each direction.

    Raises:
        StorageError: a part cannot be written, such as for want of room.
        CorruptCheckpointError: a part arrived damaged.
        PlanError: a peer takes part in another save.
    """
    started = time.monotonic()
    wires = agree_and_gather_bytes(
        comm, lambda: _bound_to_wire(max_bucket_nbytes) + _checked_wire(part, payloads)
    )
    with ExitStack() as sinks, ExitStack() as stack:  # threads are given up before their sinks
        streams: list[_Stream] = []

        def begin() -> tuple[ReplicationPlan, _Room]:
            for found in _checked_parts(comm, [wire[_PREFIX_NBYTES:] for wire in wires]):
                stream = _Stream.of(found, open_sink)
                streams.append(stream)
                if stream.sink is not None:
                    sinks.callback(_abandon, stream.sink)
            plan = _plan(streams, min(map(_bound_from_wire, wires)))
            source = TensorSource(part, payloads)
            return plan, _Room.of(plan, streams, source, comm.rank, stack)

        plan, room = agree(comm, begin)
        _run_rounds(comm, plan, streams, room)
        claimed = agree_and_gather(comm, lambda: _own_digests(streams, comm.rank))
        agree(comm, lambda: _finish(comm, streams, claimed))
        sinks.pop_all()
    own_nbytes = streams[comm.rank].layout.nbytes
    return ReplicationReport(
        num_parts=len(streams),
        own_nbytes=own_nbytes,
        received_nbytes=sum(stream.layout.nbytes for stream in streams) - own_nbytes,
        seconds=time.monotonic() - started,
    )


def _bound_to_wire(nbytes: int) -> bytes:
    bound = min(nbytes, _MAX_BOUND).to_bytes(_BOUND_NBYTES, "little")
    return bound + xxhash.xxh3_64_digest(bound)


def _bound_from_wire(wire: bytes) -> int:
    bound, digest = wire[:_BOUND_NBYTES], wire[_BOUND_NBYTES:_PREFIX_NBYTES]
    if xxhash.xxh3_64_digest(bound) != digest:
        raise CorruptCheckpointError("the bound on what travels did not arrive as it was")
    return int.from_bytes(bound, "little")


def _checked_wire(part: Part, payloads: Sequence[torch.Tensor]) -> bytes:
    found = [tensor.numel() * tensor.element_size() for tensor in payloads]
    expected = [buffer.nbytes for buffer in part.buffers]
    if found != expected:
        raise PlanError(f"{part.part_id}: buffers of {expected} bytes, found {found}")
    return part_to_wire(part)


def _checked_parts(comm: Communicator, wires: Sequence[bytes]) -> list[Part]:
    parts = [part_from_wire(wire) for wire in wires]
    mine = parts[comm.rank].part_id
    for rank, other in enumerate(parts):
        if other.part_id.save != mine.save:
            raise PlanError(
                f"rank {comm.global_rank(rank)} saves {other.part_id}, and this rank {mine}"
            )
    return parts


def _plan(streams: Sequence[_Stream], max_bucket_nbytes: int) -> ReplicationPlan:
    return build_replication_plan(
        [stream.layout.byte_offsets for stream in streams],
        [[buffer.nbytes for buffer in stream.part.buffers] for stream in streams],
        max_bucket_nbytes,
    )


@dataclass(slots=True)
class _Stream:
    """A part on its way to its sink.

    Attributes:
        part: the part.
        layout: where its buffers go.
        sink: what becomes of it.
        digests: of what has passed.
        failure: the first thing that went wrong; the stream goes on without its sink.
    """

    part: Part
    layout: PartLayout
    sink: PartSink | None
    digests: BufferDigests
    failure: Exception | None = None

    @classmethod
    def of(cls, part: Part, open_sink: OpenSink) -> _Stream:
        """A part that nothing has passed of."""
        layout = part_layout(part)
        return cls(part, layout, open_sink(part, layout), BufferDigests(part, layout))

    def memory(self, message: Message) -> Bytes | None:
        """Where a message is to land; None if anywhere will do."""
        return self.sink.memory(message) if self.sink else None

    def own_content(self, source: TensorSource, spare: Bytes, message: Message) -> Bytes:
        """The bytes of a message; the spare ones where they cannot be had, which is kept too."""
        try:
            return source.content(message)
        except Exception as error:  # noqa: BLE001 - raised at the end, when no peer waits for us
            self.failure = self.failure or error
            return spare[: message.nbytes]

    def settle(self, user: Future[None]) -> None:
        """Wait for ``take``; where storage does not answer, that is the failure."""
        try:
            settled(user, self.sink or self.part.part_id)
        except StorageTimeoutError as error:
            if not isinstance(self.failure, StorageTimeoutError):
                self.failure = error

    def take(self, message: Message, content: Bytes) -> None:
        """Take the digests of a message, and store it; a failure is kept for later."""
        try:
            self.digests.take(message, content)
            if self.sink is not None and self.failure is None:
                self.sink.take(message, content)
        except Exception as error:  # noqa: BLE001 - raised at the end, when no peer waits for us
            self.failure = self.failure or error


@dataclass(frozen=True, slots=True)
class _Room:
    """Threads and memory for all rounds: once those have begun nothing is left to ask for.

    Attributes:
        writers: one thread for each member, which stores its part.
        outgoing: this rank's messages.
        buckets: where messages arrive.
    """

    writers: OrderedQueues
    outgoing: _Outgoing
    buckets: tuple[_Buckets, ...]

    @classmethod
    def of(
        cls,
        plan: ReplicationPlan,
        streams: Sequence[_Stream],
        source: TensorSource,
        rank: int,
        stack: ExitStack,
    ) -> _Room:
        """Room for a plan, for as long as the stack is open."""
        writers = stack.enter_context(OrderedQueues(len(streams)))
        reader = stack.enter_context(OrderedQueues(1))
        buckets = tuple(_Buckets(plan, streams, rank) for _ in range(_NUM_BUCKETS))
        return cls(writers, _Outgoing(streams[rank], source, plan.messages[rank], reader), buckets)


def _run_rounds(
    comm: Communicator, plan: ReplicationPlan, streams: Sequence[_Stream], room: _Room
) -> None:
    """Send and receive every message.

    What has arrived is stored, and what comes next brought to the host, while others travel.
    Nothing here raises but for a peer that is gone: what goes wrong is kept for the end.
    """
    peers = [rank for rank in range(comm.size) if rank != comm.rank]
    own = streams[comm.rank]
    for number in range(plan.num_rounds):
        bucket = room.buckets[number % _NUM_BUCKETS]
        bucket.release()
        sends: list[Send] = []
        for mine, content in room.outgoing.next():
            sends = [Send(rank, content) for rank in peers]
            bucket.hold(own, room.writers.submit(comm.rank, own.take, mine, content))
        arriving = [
            (rank, message, bucket.memory(rank, message, streams[rank]))
            for rank in peers
            if (message := plan.message(rank, number)) is not None
        ]
        comm.exchange(sends, [Receive(rank, memory) for rank, _, memory in arriving])
        for rank, message, memory in arriving:
            stream = streams[rank]
            bucket.hold(stream, room.writers.submit(rank, stream.take, message, memory))
    for bucket in room.buckets:
        bucket.release()


class _Outgoing:
    """This rank's messages, one of them read ahead."""

    def __init__(
        self,
        stream: _Stream,
        source: TensorSource,
        messages: Sequence[Message],
        reader: OrderedQueues,
    ) -> None:
        self._stream = stream
        self._spare = np.zeros(_largest(messages), np.uint8)  # takes no memory until it is used
        self._read = partial(stream.own_content, source, self._spare)
        self._messages = iter(messages)
        self._reader = reader
        self._ahead = self._begin()

    def next(self) -> list[tuple[Message, Bytes]]:
        """The next message and its bytes; none once all are sent."""
        found = [(message, self._settled(message, content)) for message, content in self._ahead]
        self._ahead = self._begin() if found else []
        return found

    def _settled(self, message: Message, content: Future[Bytes]) -> Bytes:
        """The bytes; where they are not read in time, others: peers wait for some."""
        try:
            return settled(content, "own tensors")
        except StorageTimeoutError as error:
            self._stream.failure = self._stream.failure or error
            return self._spare[: message.nbytes]

    def _begin(self) -> list[tuple[Message, Future[Bytes]]]:
        return [(m, self._reader.submit(0, self._read, m)) for m in islice(self._messages, 1)]


class _Buckets:
    """Memory for one round's messages of every peer that does not say where they are to land."""

    def __init__(self, plan: ReplicationPlan, streams: Sequence[_Stream], own_rank: int) -> None:
        self._memory = {
            rank: np.empty(_largest(messages), np.uint8)
            for rank, (messages, stream) in enumerate(zip(plan.messages, streams, strict=True))
            if rank != own_rank and messages and stream.memory(messages[0]) is None
        }
        self._users: list[tuple[_Stream, Future[None]]] = []

    def memory(self, rank: int, message: Message, stream: _Stream) -> Bytes:
        """Memory for a message of that peer."""
        direct = stream.memory(message)
        return self._memory[rank][: message.nbytes] if direct is None else direct

    def hold(self, stream: _Stream, user: Future[None]) -> None:
        """The memory is used until this is done."""
        self._users.append((stream, user))

    def release(self) -> None:
        """Wait until nothing uses the memory, but for streams that have failed."""
        for stream, user in self._users:
            stream.settle(user)
        self._users.clear()


def _largest(messages: Sequence[Message]) -> int:
    return max((message.nbytes for message in messages), default=0)


def _own_digests(streams: Sequence[_Stream], rank: int) -> list[int]:
    """What this rank says of its own part; raises what went wrong with any."""
    failures = [stream.failure for stream in streams if stream.failure is not None]
    failures.sort(key=_is_damage)
    if failures:
        raise failures[0]
    return streams[rank].digests.values()


def _is_damage(error: Exception) -> bool:
    return not isinstance(error, StorageTimeoutError)


def _abandon(sink: PartSink) -> None:
    with clean_up_limit():
        sink.abandon()


def _finish(comm: Communicator, streams: Sequence[_Stream], claimed: Sequence[list[int]]) -> None:
    """Compare what arrived with what was sent, and finish all parts."""
    for rank, (stream, expected) in enumerate(zip(streams, claimed, strict=True)):
        found = stream.digests.values()
        if found != expected:
            raise _arrived_damaged(comm.global_rank(rank), stream.part, expected, found)
    for stream, digests in zip(streams, claimed, strict=True):
        if stream.sink is not None:
            stream.sink.finish(digests)


def _arrived_damaged(
    global_rank: int, part: Part, expected: Sequence[int], found: Sequence[int]
) -> CheckpointError:
    pairs = enumerate(zip(expected, found, strict=False))
    number = next((n for n, (told, taken) in pairs if told != taken), None)
    name = part.buffers[number].name if number is not None else str(part.part_id)
    return CorruptCheckpointError(
        f"{name}: the copy of {part.part_id} that rank {global_rank} sent did not arrive as it was",
        key=name,
    )
