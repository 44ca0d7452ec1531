"""Bring parts from the disks that have them into the memory of the ranks that want them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import xxhash

from dist_ckpt_strategies.comm.agree import agree, agree_and_gather
from dist_ckpt_strategies.comm.base import Bytes, Communicator, Receive, Send
from dist_ckpt_strategies.device import as_bytes, torch_dtype
from dist_ckpt_strategies.errors import CheckpointError, CorruptCheckpointError
from dist_ckpt_strategies.plan.messages import Message, build_messages
from dist_ckpt_strategies.plan.retrieve import ExchangePlan, Transfer
from dist_ckpt_strategies.run.report import RetrievalReport
from dist_ckpt_strategies.spec.part import Part
from dist_ckpt_strategies.storage.part_files import PartReader
from dist_ckpt_strategies.storage.part_format import StoredPart, decode_header

_NUM_READERS = 4
_NUM_BUCKETS = 2


@dataclass(frozen=True, slots=True)
class RetrievedPart:
    """A part in memory, its digests compared.

    Attributes:
        part: the part.
        payloads: the elements of its buffers, on the host.
    """

    part: Part
    payloads: tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class BadCopy:
    """A copy that cannot be used.

    Attributes:
        rank: who read it, within the group.
        part_id: which part.
        reason: what is wrong, with the file.
    """

    rank: int
    part_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Retrieval:
    """What arrived.

    Attributes:
        parts: what this rank wanted and got, by id.
        bad: the copies that cannot be used, the same on every rank; what was to come from them
            is missing in ``parts``.
        report: in numbers.
    """

    parts: Mapping[str, RetrievedPart]
    bad: tuple[BadCopy, ...]
    report: RetrievalReport


def run_retrieve(
    comm: Communicator,
    plan: ExchangePlan,
    paths: Mapping[str, Path],
    *,
    message_nbytes: int,
) -> Retrieval:
    """Carry out a plan: read, send, receive, and compare every digest.

    Collective: every rank of ``comm`` calls this with an equal plan. Three meetings and the
    exchanges. A copy that is damaged or cannot be read is no error: it is listed on every rank.

    Args:
        comm: the ranks that the plan was made for.
        plan: who reads what for whom.
        paths: this rank's files, by id of the part.
        message_nbytes: bound on a message, equal on all ranks. Beside what it wants, a rank takes
            three times this much memory.

    Raises:
        PeerError: a rank does not take part any more.
    """
    started = time.monotonic()
    with ExitStack() as stack:
        sources = {
            part_id: stack.enter_context(_Source(part_id, paths.get(part_id)))
            for part_id in sorted({t.part_id for t in plan.transfers if t.sender == comm.rank})
        }
        plan, headers = _exchange_headers(comm, plan, sources)
        arrivals = agree(
            comm, lambda: {t: _Arrival(t, headers[t]) for t in plan.received_by(comm.rank)}
        )
        _exchange_content(comm, plan, sources, arrivals, headers, message_nbytes)
        bad = _findings(comm, sources, arrivals)
    unusable = {(one.rank, one.part_id) for one in bad}
    parts = {
        t.part_id: arrival.retrieved()
        for t, arrival in arrivals.items()
        if (t.sender, t.part_id) not in unusable
    }
    report = RetrievalReport(
        num_parts=len(parts),
        read_nbytes=sum(source.read_nbytes for source in sources.values()),
        received_nbytes=sum(
            a.stored.layout.nbytes for t, a in arrivals.items() if t.sender != comm.rank
        ),
        seconds=time.monotonic() - started,
    )
    return Retrieval(parts, bad, report)


class _Source:
    """A copy on this rank's disk. Once something is wrong with it, it yields zeros."""

    def __init__(self, part_id: str, path: Path | None) -> None:
        self.part_id = part_id
        self.reader: PartReader | None = None
        self.failure: CheckpointError | None = None
        self.read_nbytes = 0
        try:
            if path is None:
                raise CorruptCheckpointError(f"{part_id}: this rank has no copy of it")
            self.reader = PartReader(path)
        except CheckpointError as error:
            self.failure = error

    def __enter__(self) -> _Source:
        return self

    def __exit__(self, *_: object) -> None:
        if self.reader is not None:
            self.reader.__exit__()

    def read(self, byte_offset: int, target: Bytes) -> None:
        """Fill ``target``; never raises, because peers wait for what comes next."""
        try:
            if self.failure is None and self.reader is not None:
                self.reader.read(byte_offset, target)
                self.read_nbytes += target.size
                return
        except CheckpointError as error:
            self.failure = error
        target[:] = 0


@dataclass(slots=True)
class _Arrival:
    """A part on its way into this rank's memory."""

    transfer: Transfer
    stored: StoredPart
    tensors: tuple[torch.Tensor, ...] = field(init=False)

    def __post_init__(self) -> None:
        """Make room for it."""
        self.tensors = tuple(
            torch.empty(buffer.shape, dtype=torch_dtype(buffer.dtype), device="cpu")
            for buffer in self.stored.part.buffers
        )

    def memory(self, message: Message) -> Bytes:
        """Where a message lands: the tensor itself if it is of one, else memory beside it."""
        if len(message.slices) == 1:
            (piece,) = message.slices
            return self._bytes(piece.buffer)[piece.start : piece.start + piece.nbytes]
        return np.empty(message.nbytes, np.uint8)

    def take(self, message: Message, content: Bytes) -> None:
        """Put what landed beside the tensors into them."""
        if len(message.slices) == 1:
            return
        for piece in message.slices:
            start = self.stored.layout.byte_offsets[piece.buffer] - message.byte_offset
            self._bytes(piece.buffer)[:] = content[start : start + piece.nbytes]

    def damage(self) -> str | None:
        """What did not arrive as it was saved."""
        digests = zip(self.stored.part.buffers, self.stored.digests, strict=True)
        for number, (buffer, expected) in enumerate(digests):
            found = xxhash.xxh3_64_intdigest(self._bytes(number).data)
            if found != expected:
                return (
                    f"{buffer.name}: {self.transfer.part_id} has digest {found:016x}, expected "
                    f"{expected:016x}"
                )
        return None

    def retrieved(self) -> RetrievedPart:
        """The part, all of it there."""
        return RetrievedPart(self.stored.part, self.tensors)

    def _bytes(self, number: int) -> Bytes:
        content: Bytes = as_bytes(self.tensors[number]).numpy()
        return content


def _exchange_headers(
    comm: Communicator, plan: ExchangePlan, sources: Mapping[str, _Source]
) -> tuple[ExchangePlan, dict[Transfer, StoredPart]]:
    """What is left of the plan without copies that cannot be opened, and this rank's headers."""
    mine = {i: s.reader.header for i, s in sources.items() if s.reader is not None}
    sizes = agree_and_gather(comm, lambda: {part_id: len(h) for part_id, h in mine.items()})
    good = plan.without([t for t in plan.transfers if t.part_id not in sizes[t.sender]])
    headers = {
        t: np.frombuffer(bytearray(mine[t.part_id]), np.uint8)
        for t in good.transfers
        if t.sender == comm.rank
    }
    for step in good.steps:
        into = {
            t: np.empty(sizes[t.sender][t.part_id], np.uint8)
            for t in step
            if t.receiver == comm.rank
        }
        comm.exchange(
            [Send(t.receiver, headers[t]) for t in step if t.sender == comm.rank],
            [Receive(t.sender, memory) for t, memory in into.items()],
        )
        headers |= into
    return good, {t: decode_header(memory.tobytes()) for t, memory in headers.items()}


def _exchange_content(
    comm: Communicator,
    plan: ExchangePlan,
    sources: Mapping[str, _Source],
    arrivals: Mapping[Transfer, _Arrival],
    headers: Mapping[Transfer, StoredPart],
    nbytes: int,
) -> None:
    """Read own parts, and meanwhile send and receive the others, message by message."""
    with ThreadPoolExecutor(_NUM_READERS, "part-reader") as pool:
        reading = [
            pool.submit(_read_own, arrival, sources[t.part_id], message)
            for t, arrival in arrivals.items()
            if t.sender == comm.rank
            for message in _messages(headers[t], nbytes)
        ]
        for step in plan.steps:
            outgoing = _mine(step, comm.rank, sending=True)
            incoming = _mine(step, comm.rank, sending=False)
            _run_step(
                comm,
                outgoing and _Outgoing(outgoing, sources, headers, nbytes, pool),
                incoming and arrivals[incoming],
                nbytes,
            )
        for done in reading:
            done.result()


def _run_step(
    comm: Communicator, outgoing: _Outgoing | None, incoming: _Arrival | None, nbytes: int
) -> None:
    """Send a part, receive a part, or both, side by side."""
    expected = iter(_messages(incoming.stored, nbytes) if incoming else ())
    while True:
        sends = outgoing.next() if outgoing else []
        message = next(expected, None)
        if message is None and not sends:
            return
        receives = []
        if incoming is not None and message is not None:
            memory = incoming.memory(message)
            receives = [Receive(incoming.transfer.sender, memory)]
        comm.exchange(sends, receives)
        if incoming is not None and message is not None:
            incoming.take(message, memory)


class _Outgoing:
    """The messages of a part that this rank reads for another; one is read ahead."""

    def __init__(
        self,
        transfer: Transfer,
        sources: Mapping[str, _Source],
        headers: Mapping[Transfer, StoredPart],
        nbytes: int,
        pool: ThreadPoolExecutor,
    ) -> None:
        self._receiver = transfer.receiver
        self._source = sources[transfer.part_id]
        self._messages = iter(_messages(headers[transfer], nbytes))
        self._memory = [np.empty(0, np.uint8) for _ in range(_NUM_BUCKETS)]
        self._turn = 0
        self._pool = pool
        self._ahead = self._begin()

    def next(self) -> list[Send]:
        """The next message; none if all are sent."""
        if self._ahead is None:
            return []
        content = self._ahead.result()
        self._ahead = self._begin()
        return [Send(self._receiver, content)]

    def _begin(self) -> Future[Bytes] | None:
        message = next(self._messages, None)
        return None if message is None else self._pool.submit(self._read, message)

    def _read(self, message: Message) -> Bytes:
        place, self._turn = self._turn, (self._turn + 1) % _NUM_BUCKETS
        if self._memory[place].size < message.nbytes:
            self._memory[place] = np.empty(message.nbytes, np.uint8)
        content = self._memory[place][: message.nbytes]
        self._source.read(message.byte_offset, content)
        return content


def _read_own(arrival: _Arrival, source: _Source, message: Message) -> None:
    memory = arrival.memory(message)
    source.read(message.byte_offset, memory)
    arrival.take(message, memory)


def _messages(stored: StoredPart, max_nbytes: int) -> tuple[Message, ...]:
    sizes = [buffer.nbytes for buffer in stored.part.buffers]
    return build_messages(stored.layout.byte_offsets, sizes, max_nbytes)


def _mine(step: Sequence[Transfer], rank: int, *, sending: bool) -> Transfer | None:
    ends = ((t.sender if sending else t.receiver, t) for t in step)
    return next((t for end, t in ends if end == rank), None)


def _findings(
    comm: Communicator, sources: Mapping[str, _Source], arrivals: Mapping[Transfer, _Arrival]
) -> tuple[BadCopy, ...]:
    """Every copy that cannot be used, the same on every rank."""

    def found() -> list[list[object]]:
        own = [
            [comm.rank, part_id, str(source.failure)]
            for part_id, source in sources.items()
            if source.failure is not None
        ]
        arrived = [
            [t.sender, t.part_id, damage]
            for t, arrival in arrivals.items()
            if (damage := arrival.damage()) is not None
        ]
        return own + arrived

    everyone = agree_and_gather(comm, found)
    bad: dict[tuple[int, str], str] = {}
    for rank, part_id, reason in (one for some in everyone for one in some):
        bad.setdefault((rank, part_id), reason)
    return tuple(BadCopy(*where, reason) for where, reason in sorted(bad.items()))
