"""Bring parts from the disks that have them into the memory of the ranks that want them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dist_ckpt_strategies.comm.agree import agree, agree_and_gather
from dist_ckpt_strategies.comm.base import Bytes, Communicator, Receive, Send
from dist_ckpt_strategies.core.messages import (
    MESSAGE_NBYTES,
    Message,
    build_messages,
    build_stretches,
)
from dist_ckpt_strategies.core.report import RetrievalReport
from dist_ckpt_strategies.errors import StorageTimeoutError
from dist_ckpt_strategies.local.part_format import Part, StoredPart, decode_header
from dist_ckpt_strategies.local.part_streams import BufferDigests, MemorySink, PartSource
from dist_ckpt_strategies.local.plan import ExchangePlan, Transfer
from dist_ckpt_strategies.storage.io_pool import OrderedQueues, settled

_MAX_READERS = 4
_NUM_BUCKETS = 2

_READ_NBYTES = 2 << 20
"""Read at once: little enough to be in the processor's cache still when its digest is taken."""


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
    decide: Callable[[], ExchangePlan],
    open_source: Callable[[str], PartSource],
    *,
    message_nbytes: int,
) -> Retrieval:
    """Carry out a plan: read, send, receive, and compare every digest.

    Collective: every rank of ``comm`` calls this for an equal plan. Three meetings, one more where
    something travels, and the exchanges. A copy that is damaged or cannot be read is no error: it
    is listed on every rank.

    Args:
        comm: the ranks that the plan was made for.
        decide: says who reads what for whom; what it raises, every rank raises.
        open_source: this rank's copy of a part that the plan has it read.
        message_nbytes: bound on a message; where ranks give different ones, the least. Beside what
            it wants, a rank takes three times this much memory.

    Raises:
        PeerError: a rank does not take part any more.
    """
    started = time.monotonic()
    with ExitStack() as stack:
        sources: dict[str, PartSource] = {}
        plans: list[ExchangePlan] = []

        def begin() -> list[Any]:
            plans.append(plan := decide())
            for part_id in sorted({t.id_ for t in plan.transfers if t.sender == comm.rank}):
                sources[part_id] = open_source(part_id)
                stack.callback(sources[part_id].close)
            headers = {i: len(s.header) for i, s in sources.items() if s.header is not None}
            return [message_nbytes, headers]

        begun = agree_and_gather(comm, begin)
        bound = min(MESSAGE_NBYTES, *(bound for bound, _ in begun))
        plan, arrived = _exchange_headers(comm, plans[0], sources, [sizes for _, sizes in begun])

        def prepare() -> _Content:
            headers = {t: decode_header(content.tobytes()) for t, content in arrived.items()}
            return _Content.of(comm.rank, plan, sources, headers, bound, stack)

        content = agree(comm, prepare)
        content.exchange(comm)
        bad = _findings(comm, sources, content)
    arrivals = content.arrivals
    unusable = {(one.rank, one.part_id) for one in bad}
    parts = {
        t.id_: RetrievedPart(arrival.stored.part, arrival.sink.tensors)
        for t, arrival in arrivals.items()
        if (t.sender, t.id_) not in unusable
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


@dataclass(frozen=True, slots=True)
class _Arrival:
    """A part on its way into this rank's memory."""

    transfer: Transfer
    stored: StoredPart
    sink: MemorySink
    digests: BufferDigests

    @classmethod
    def of(cls, transfer: Transfer, stored: StoredPart) -> _Arrival:
        """One of which nothing is there yet."""
        part, layout = stored.part, stored.layout
        return cls(transfer, stored, MemorySink(part, layout), BufferDigests(part, layout))

    def read(self, source: PartSource, stretch: Sequence[Message]) -> None:
        """Read messages, and take their digests while they are in the processor's cache."""
        for message in stretch:
            memory = self.sink.place(message)
            source.read_into(message, memory)
            self.digests.take(message, memory)

    def damage(self) -> str | None:
        """What is not as its digest says, once all is there."""
        pairs = zip(self.stored.digests, self.digests.values(), strict=True)
        for buffer, (expected, found) in zip(self.stored.part.buffers, pairs, strict=True):
            if found != expected:
                return (
                    f"{buffer.name}: {self.stored.part.part_id} has digest {found:016x}, expected "
                    f"{expected:016x}"
                )
        return None


def _exchange_headers(
    comm: Communicator,
    plan: ExchangePlan,
    sources: Mapping[str, PartSource],
    sizes: Sequence[Mapping[str, int]],
) -> tuple[ExchangePlan, dict[Transfer, Bytes]]:
    """What is left of the plan without copies that cannot be opened, and this rank's headers.

    Args:
        comm: the ranks.
        plan: who gets what.
        sources: this rank's copies.
        sizes: for each rank, of the headers of its copies that can be opened, in bytes.
    """
    good = plan.without([t for t in plan.transfers if t.id_ not in sizes[t.sender]])

    def make_room() -> dict[Transfer, Bytes]:
        own = {
            t: np.frombuffer(bytearray(sources[t.id_].header or b""), np.uint8)
            for t in good.transfers
            if t.sender == comm.rank
        }
        return own | {
            t: np.empty(sizes[t.sender][t.id_], np.uint8)
            for t in good.received_by(comm.rank)
            if t.sender != comm.rank
        }

    headers = agree(comm, make_room) if good.steps else make_room()
    for step in good.steps:
        comm.exchange(
            [Send(t.receiver, headers[t]) for t in step if t.sender == comm.rank],
            [Receive(t.sender, headers[t]) for t in step if t.receiver == comm.rank],
        )
    return good, headers


@dataclass(frozen=True, slots=True)
class _Content:
    """The way of parts into memory, with all threads and all memory for it.

    Attributes:
        plan: who gets what.
        headers: of what this rank sends or gets.
        nbytes: bound on a message.
        arrivals: what this rank gets.
        outgoing: what it sends.
        readers: threads that read its own parts.
        checker: a thread that takes digests of what has arrived.
        works: all that was given to threads, with the file that it reads.
    """

    plan: ExchangePlan
    headers: Mapping[Transfer, StoredPart]
    nbytes: int
    arrivals: Mapping[Transfer, _Arrival]
    outgoing: Mapping[Transfer, _Outgoing]
    checker: OrderedQueues
    works: list[tuple[object, Future[None]]]

    @classmethod
    def of(
        cls,
        rank: int,
        plan: ExchangePlan,
        sources: Mapping[str, PartSource],
        headers: Mapping[Transfer, StoredPart],
        nbytes: int,
        stack: ExitStack,
    ) -> _Content:
        """The way for one rank, open as long as the stack; its own parts are being read."""
        readers = stack.enter_context(OrderedQueues(_num_readers()))
        sender = stack.enter_context(OrderedQueues(1))
        checker = stack.enter_context(OrderedQueues(1))
        arrivals = {t: _Arrival.of(t, headers[t]) for t in plan.received_by(rank)}
        sent = [t for step in plan.steps for t in step if t.sender == rank]
        buckets = _Buckets.of([_messages(headers[t], nbytes) for t in sent])
        own = [
            (arrival, sources[t.id_], stretch)
            for t, arrival in arrivals.items()
            if t.sender == rank
            for stretch in build_stretches(_messages(headers[t], min(nbytes, _READ_NBYTES)))
        ]
        works: list[tuple[object, Future[None]]] = [
            (source, readers.submit(number % _num_readers(), arrival.read, source, stretch))
            for number, (arrival, source, stretch) in enumerate(own)
        ]
        outgoing = {
            t: _Outgoing(t, sources[t.id_], _messages(headers[t], nbytes), buckets, sender)
            for t in sent
        }
        return cls(plan, headers, nbytes, arrivals, outgoing, checker, works)

    def exchange(self, comm: Communicator) -> None:
        """Send and receive message by message; own parts are read meanwhile. Collective.

        Nothing here raises but for a peer that is gone: what goes wrong is kept for ``require``.
        """
        for step in self.plan.steps:
            outgoing = _mine(step, comm.rank, sending=True)
            incoming = _mine(step, comm.rank, sending=False)
            self._exchange(
                comm,
                self.outgoing[outgoing] if outgoing else None,
                self.arrivals[incoming] if incoming else None,
            )

    def _exchange(
        self, comm: Communicator, outgoing: _Outgoing | None, incoming: _Arrival | None
    ) -> None:
        """Send a part, receive a part, or both, side by side; digests may still be being taken."""
        expected = iter(_messages(incoming.stored, self.nbytes) if incoming else ())
        while True:
            sends = outgoing.next() if outgoing else []
            message = next(expected, None)
            if message is None and not sends:
                return
            if incoming is None or message is None:
                comm.exchange(sends, [])
                continue
            memory = incoming.sink.place(message)
            comm.exchange(sends, [Receive(incoming.transfer.sender, memory)])
            taken = self.checker.submit(0, incoming.digests.take, message, memory)
            self.works.append((incoming.transfer.id_, taken))

    def require(self) -> None:
        """Return when all threads are done; raises what one of them has raised."""
        for source, work in self.works:
            settled(work, source)
        for outgoing in self.outgoing.values():
            outgoing.require()


def _num_readers() -> int:
    """Threads that read this rank's own parts: a few, as many as there are processors for."""
    return min(_MAX_READERS, os.cpu_count() or 1)


@dataclass(frozen=True, slots=True)
class _Buckets:
    """Memory that messages are read to before they are sent, by turns."""

    memory: tuple[Bytes, ...]

    @classmethod
    def of(cls, messages: Sequence[Sequence[Message]]) -> _Buckets:
        """Room for the largest of them."""
        largest = max((m.nbytes for part in messages for m in part), default=0)
        return cls(tuple(np.empty(largest, np.uint8) for _ in range(_NUM_BUCKETS)))


class _Outgoing:
    """The messages of a part that this rank reads for another; one is read ahead."""

    def __init__(
        self,
        transfer: Transfer,
        source: PartSource,
        messages: Sequence[Message],
        buckets: _Buckets,
        pool: OrderedQueues,
    ) -> None:
        self._receiver = transfer.receiver
        self._source = source
        self._messages = iter(messages)
        self._memory = buckets.memory
        self._turn = 0
        self._pool = pool
        self._ahead: Future[Bytes] | None = None
        self._next: Message | None = None
        self._has_begun = False
        self._failure: Exception | None = None

    def next(self) -> list[Send]:
        """The next message; none if all are sent."""
        if not self._has_begun:
            self._has_begun, self._ahead = True, self._begin()
        if self._ahead is None or self._next is None:
            return []
        try:
            content = settled(self._ahead, self._source)
        except StorageTimeoutError as error:
            self._failure = error
            content = self._memory[0][: self._next.nbytes]
        self._ahead = self._begin()
        return [Send(self._receiver, content)]

    def require(self) -> None:
        """Raise what went wrong, if something did."""
        if self._failure is not None:
            raise self._failure

    def _begin(self) -> Future[Bytes] | None:
        self._next = next(self._messages, None)
        return None if self._next is None else self._pool.submit(0, self._read, self._next)

    def _read(self, message: Message) -> Bytes:
        """A message in memory, whatever that holds where it cannot be read."""
        place, self._turn = self._turn, (self._turn + 1) % _NUM_BUCKETS
        content = self._memory[place][: message.nbytes]
        try:
            self._source.read_into(message, content)
        except Exception as error:  # noqa: BLE001 - raised at the end, when no peer waits for us
            self._failure = self._failure or error
        return content


def _messages(stored: StoredPart, max_nbytes: int) -> tuple[Message, ...]:
    sizes = [buffer.nbytes for buffer in stored.part.buffers]
    return build_messages(stored.layout.byte_offsets, sizes, max_nbytes)


def _mine(step: Sequence[Transfer], rank: int, *, sending: bool) -> Transfer | None:
    ends = ((t.sender if sending else t.receiver, t) for t in step)
    return next((t for end, t in ends if end == rank), None)


def _findings(
    comm: Communicator, sources: Mapping[str, PartSource], content: _Content
) -> tuple[BadCopy, ...]:
    """Every copy that cannot be used, the same on every rank."""

    def found() -> list[list[object]]:
        content.require()
        own = [
            [comm.rank, part_id, str(source.failure)]
            for part_id, source in sources.items()
            if source.failure is not None
        ]
        arrived = [
            [t.sender, t.id_, damage]
            for t, arrival in content.arrivals.items()
            if (damage := arrival.damage()) is not None
        ]
        return own + arrived

    everyone = agree_and_gather(comm, found)
    bad: dict[tuple[int, str], str] = {}
    for rank, part_id, reason in (one for some in everyone for one in some):
        bad.setdefault((rank, part_id), reason)
    return tuple(BadCopy(*where, reason) for where, reason in sorted(bad.items()))
