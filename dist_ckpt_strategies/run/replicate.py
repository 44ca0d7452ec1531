"""Write this rank's part, and its peers' parts while they arrive."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
import xxhash

from dist_ckpt_strategies.comm.agree import agree, agree_and_gather
from dist_ckpt_strategies.comm.base import Bytes, Communicator, Receive, Send
from dist_ckpt_strategies.comm.gather import agree_and_gather_bytes
from dist_ckpt_strategies.device import as_bytes, is_in_order, to_host
from dist_ckpt_strategies.errors import CheckpointError, CorruptCheckpointError, PlanError
from dist_ckpt_strategies.plan.messages import Message
from dist_ckpt_strategies.plan.replicate import ReplicationPlan, build_replication_plan
from dist_ckpt_strategies.run.report import ReplicationReport
from dist_ckpt_strategies.spec.part import Part
from dist_ckpt_strategies.storage.part_files import PartDirectory, PartWriter
from dist_ckpt_strategies.storage.part_format import (
    PartLayout,
    encode_header,
    part_from_wire,
    part_layout,
    part_to_wire,
)

_NUM_BUCKETS = 2
"""Buckets of each peer: one is written while the next arrives."""


def run_replicate(
    comm: Communicator,
    part: Part,
    payloads: Sequence[torch.Tensor],
    directory: PartDirectory,
    *,
    max_bucket_nbytes: int,
) -> ReplicationReport:
    """Store this rank's part here and at every peer, and those of the peers here.

    Collective over the clique: either every member returns, or every member raises and none of
    the parts has appeared anywhere. Five meetings and one exchange for each round.

    Args:
        comm: the clique; a group of one stores its own part alone.
        part: what this rank saves.
        payloads: the elements of its buffers; read, not changed. They must not change before
            this returns.
        directory: where this rank keeps its parts.
        max_bucket_nbytes: bound on what travels at once in each direction. Takes two to three
            times as much memory, and on the device one bucket in each direction.

    Raises:
        StorageError: a part cannot be written, such as for want of room.
        CorruptCheckpointError: a part arrived damaged.
        PlanError: a peer takes part in another save.
    """
    started = time.monotonic()
    wires = agree_and_gather_bytes(comm, lambda: _checked_wire(part, payloads))
    with ExitStack() as stack:
        parts, plan, writers = agree(
            comm, lambda: _begin(comm, wires, directory, max_bucket_nbytes, stack)
        )
        streams = [
            _Stream(found, part_layout(found), writer)
            for found, writer in zip(parts, writers, strict=True)
        ]
        with ThreadPoolExecutor(1, "part-writer") as pool:
            _run_rounds(comm, plan, streams, payloads, pool)
            claimed = agree_and_gather(comm, partial(_own_digests, streams[comm.rank], streams))
        agree(comm, lambda: _finish(comm, streams, claimed))
        stack.pop_all()
    return ReplicationReport(
        num_parts=len(parts),
        own_nbytes=streams[comm.rank].layout.nbytes,
        received_nbytes=sum(s.layout.nbytes for s in streams) - streams[comm.rank].layout.nbytes,
        seconds=time.monotonic() - started,
    )


def _checked_wire(part: Part, payloads: Sequence[torch.Tensor]) -> bytes:
    found = [tensor.numel() * tensor.element_size() for tensor in payloads]
    expected = [buffer.nbytes for buffer in part.buffers]
    if found != expected:
        raise PlanError(f"{part.part_id}: buffers of {expected} bytes, found {found}")
    return part_to_wire(part)


def _begin(
    comm: Communicator,
    wires: Sequence[bytes],
    directory: PartDirectory,
    max_bucket_nbytes: int,
    stack: ExitStack,
) -> tuple[list[Part], ReplicationPlan, list[PartWriter]]:
    """What everybody sends, and this rank's open files for it."""
    parts = [part_from_wire(wire) for wire in wires]
    mine = parts[comm.rank].part_id
    for rank, other in enumerate(parts):
        if other.part_id.save != mine.save:
            raise PlanError(
                f"rank {comm.global_rank(rank)} saves {other.part_id}, and this rank {mine}"
            )
    layouts = list(map(part_layout, parts))
    plan = build_replication_plan(
        [layout.byte_offsets for layout in layouts],
        [[buffer.nbytes for buffer in part.buffers] for part in parts],
        max_bucket_nbytes,
    )
    holder = comm.global_rank(comm.rank)
    writers: list[PartWriter] = []
    for found, layout in zip(parts, layouts, strict=True):
        writer = directory.create(found.part_id, holder, layout)
        stack.callback(writer.abandon)
        writers.append(writer)
    return parts, plan, writers


@dataclass(slots=True)
class _Stream:
    """A part on its way into a file.

    Attributes:
        part: the part.
        layout: where its buffers go.
        writer: the file.
        digests: of each buffer that has begun to pass.
        failure: the first thing that went wrong; the stream goes on without its file.
    """

    part: Part
    layout: PartLayout
    writer: PartWriter
    digests: dict[int, xxhash.xxh3_64] = field(default_factory=dict)
    failure: Exception | None = None

    def take(self, message: Message, content: Bytes) -> None:
        """Take the digests of a message, and write it; a failure is kept for later."""
        try:
            for piece in message.slices:
                start = self.layout.byte_offsets[piece.buffer] + piece.start - message.byte_offset
                digest = self.digests.setdefault(piece.buffer, xxhash.xxh3_64())
                digest.update(content[start : start + piece.nbytes].data)
            if self.failure is None:
                self.writer.write(message.byte_offset, content)
        except Exception as error:  # noqa: BLE001 - raised at the end, when no peer waits for us
            self.failure = self.failure or error

    def found_digests(self) -> list[int]:
        """The digest of every buffer, once all has passed."""
        nothing = xxhash.xxh3_64_intdigest(b"")
        return [
            self.digests[number].intdigest() if number in self.digests else nothing
            for number in range(len(self.part.buffers))
        ]


def _run_rounds(
    comm: Communicator,
    plan: ReplicationPlan,
    streams: Sequence[_Stream],
    payloads: Sequence[torch.Tensor],
    pool: ThreadPoolExecutor,
) -> None:
    """Send and receive every message; what has arrived is written while the next ones travel."""
    outgoing = _Outgoing(plan.messages[comm.rank], streams[comm.rank].layout, payloads)
    peers = [rank for rank in range(comm.size) if rank != comm.rank]
    buckets = [_Buckets(plan, peers) for _ in range(_NUM_BUCKETS)]
    for number in range(plan.num_rounds):
        bucket = buckets[number % _NUM_BUCKETS]
        bucket.release()
        own = outgoing.next()
        arriving = [
            (rank, message, bucket.memory(rank, message.nbytes))
            for rank in peers
            if (message := plan.message(rank, number)) is not None
        ]
        exchange = comm.begin_exchange(
            [Send(rank, own[1]) for rank in peers] if own else [],
            [Receive(rank, memory) for rank, _, memory in arriving],
        )
        if own:
            bucket.hold(pool.submit(streams[comm.rank].take, *own))
        exchange.wait()
        for rank, message, memory in arriving:
            bucket.hold(pool.submit(streams[rank].take, message, memory))
    for bucket in buckets:
        bucket.release()


class _Buckets:
    """Memory for one round's messages of every peer; made when first needed."""

    def __init__(self, plan: ReplicationPlan, peers: Sequence[int]) -> None:
        self._sizes = {
            rank: max((message.nbytes for message in plan.messages[rank]), default=0)
            for rank in peers
        }
        self._memory: dict[int, Bytes] = {}
        self._users: list[Future[None]] = []

    def memory(self, rank: int, nbytes: int) -> Bytes:
        """Memory for a message of that peer."""
        if rank not in self._memory:
            self._memory[rank] = np.empty(self._sizes[rank], np.uint8)
        return self._memory[rank][:nbytes]

    def hold(self, user: Future[None]) -> None:
        """The memory is used until this is done."""
        self._users.append(user)

    def release(self) -> None:
        """Wait until nothing uses the memory."""
        for user in self._users:
            user.result()
        self._users.clear()


class _Outgoing:
    """This rank's messages as bytes on the host, one after the other.

    A message of one buffer on the host is that buffer's own memory. What is not contiguous, or on
    a device, is copied message by message.
    """

    def __init__(
        self, messages: Sequence[Message], layout: PartLayout, payloads: Sequence[torch.Tensor]
    ) -> None:
        self._messages = iter(messages)
        self._layout = layout
        self._payloads = payloads
        self._ordered: tuple[int, torch.Tensor] | None = None

    def next(self) -> tuple[Message, Bytes] | None:
        """The next message and its bytes; None if all are sent."""
        message = next(self._messages, None)
        return None if message is None else (message, self._content(message))

    def _content(self, message: Message) -> Bytes:
        pieces = [self._bytes(p.buffer)[p.start : p.start + p.nbytes] for p in message.slices]
        hosts = to_host(pieces)
        if len(hosts) == 1:
            return hosts[0]
        content = np.zeros(message.nbytes, np.uint8)
        for piece, host in zip(message.slices, hosts, strict=True):
            start = self._layout.byte_offsets[piece.buffer] + piece.start - message.byte_offset
            content[start : start + piece.nbytes] = host
        return content

    def _bytes(self, buffer: int) -> torch.Tensor:
        """The bytes of a buffer in order, where it is; the last copy made for that is kept."""
        tensor = self._payloads[buffer].detach()
        if is_in_order(tensor):
            return as_bytes(tensor)
        if self._ordered is None or self._ordered[0] != buffer:
            self._ordered = (buffer, tensor.resolve_conj().resolve_neg().contiguous())
        return as_bytes(self._ordered[1])


def _own_digests(own: _Stream, streams: Sequence[_Stream]) -> list[int]:
    """What this rank says of its own part; raises what went wrong with any."""
    for stream in streams:
        if stream.failure is not None:
            raise stream.failure
    return own.found_digests()


def _finish(comm: Communicator, streams: Sequence[_Stream], claimed: Sequence[list[int]]) -> None:
    """Compare what arrived with what was sent, and let the parts appear."""
    for rank, (stream, expected) in enumerate(zip(streams, claimed, strict=True)):
        found = stream.found_digests()
        if found != expected:
            raise _arrived_damaged(comm.global_rank(rank), stream.part, expected, found)
    for stream, digests in zip(streams, claimed, strict=True):
        stream.writer.finish(encode_header(stream.part, digests))


def _arrived_damaged(
    global_rank: int, part: Part, expected: Sequence[int], found: Sequence[int]
) -> CheckpointError:
    number = next(n for n, pair in enumerate(zip(expected, found, strict=True)) if pair[0] != pair[1])
    name = part.buffers[number].name
    return CorruptCheckpointError(
        f"{name}: the copy of {part.part_id} that rank {global_rank} sent arrived with digest "
        f"{found[number]:016x}, expected {expected[number]:016x}",
        key=name,
    )
