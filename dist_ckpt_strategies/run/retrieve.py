"""Bring parts from the disks that have them into the memory of the ranks that want them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dist_ckpt_strategies.comm.agree import agree, agree_and_gather
from dist_ckpt_strategies.comm.base import Bytes, Communicator, Receive, Send
from dist_ckpt_strategies.plan.messages import (
    MESSAGE_NBYTES,
    Message,
    build_messages,
    build_stretches,
)
from dist_ckpt_strategies.plan.retrieve import ExchangePlan, Transfer
from dist_ckpt_strategies.run.part_streams import BufferDigests, MemorySink, PartSource
from dist_ckpt_strategies.run.report import RetrievalReport
from dist_ckpt_strategies.spec.part import Part
from dist_ckpt_strategies.storage.parts.format import StoredPart, decode_header

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

    Collective: every rank of ``comm`` calls this for an equal plan. Three meetings and the
    exchanges. A copy that is damaged or cannot be read is no error: it is listed on every rank.

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
        headers, arrivals = agree(comm, lambda: _made_room(comm.rank, plan, arrived))
        _exchange_content(comm, plan, sources, arrivals, headers, bound)
        bad = _findings(comm, sources, arrivals)
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


def _made_room(
    rank: int, plan: ExchangePlan, arrived: Mapping[Transfer, bytes]
) -> tuple[dict[Transfer, StoredPart], dict[Transfer, _Arrival]]:
    """What this rank's headers say, and memory for what it gets."""
    headers = {t: decode_header(content) for t, content in arrived.items()}
    return headers, {t: _Arrival.of(t, headers[t]) for t in plan.received_by(rank)}


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
) -> tuple[ExchangePlan, dict[Transfer, bytes]]:
    """What is left of the plan without copies that cannot be opened, and this rank's headers.

    Args:
        comm: the ranks.
        plan: who gets what.
        sources: this rank's copies.
        sizes: for each rank, of the headers of its copies that can be opened, in bytes.
    """
    good = plan.without([t for t in plan.transfers if t.id_ not in sizes[t.sender]])
    headers = {
        t: np.frombuffer(bytearray(sources[t.id_].header or b""), np.uint8)
        for t in good.transfers
        if t.sender == comm.rank
    }
    for step in good.steps:
        into = {
            t: np.empty(sizes[t.sender][t.id_], np.uint8) for t in step if t.receiver == comm.rank
        }
        comm.exchange(
            [Send(t.receiver, headers[t]) for t in step if t.sender == comm.rank],
            [Receive(t.sender, memory) for t, memory in into.items()],
        )
        headers |= into
    return good, {t: memory.tobytes() for t, memory in headers.items()}


def _exchange_content(
    comm: Communicator,
    plan: ExchangePlan,
    sources: Mapping[str, PartSource],
    arrivals: Mapping[Transfer, _Arrival],
    headers: Mapping[Transfer, StoredPart],
    nbytes: int,
) -> None:
    """Read own parts, and meanwhile send and receive the others, message by message."""
    with (
        ThreadPoolExecutor(_num_readers(), "part-reader") as readers,
        ThreadPoolExecutor(1, "part-sender") as sender,
        ThreadPoolExecutor(1, "part-checker") as checker,
    ):
        works = [
            readers.submit(arrival.read, sources[t.id_], stretch)
            for t, arrival in arrivals.items()
            if t.sender == comm.rank
            for stretch in build_stretches(_messages(headers[t], min(nbytes, _READ_NBYTES)))
        ]
        for step in plan.steps:
            outgoing = _mine(step, comm.rank, sending=True)
            incoming = _mine(step, comm.rank, sending=False)
            works += _run_step(
                comm,
                _Outgoing(outgoing, sources, headers, nbytes, sender) if outgoing else None,
                arrivals[incoming] if incoming else None,
                nbytes,
                checker,
            )
        for work in works:
            work.result()


def _num_readers() -> int:
    """Threads that read this rank's own parts: a few, as many as there are processors for."""
    return min(_MAX_READERS, os.cpu_count() or 1)


def _run_step(
    comm: Communicator,
    outgoing: _Outgoing | None,
    incoming: _Arrival | None,
    nbytes: int,
    checker: ThreadPoolExecutor,
) -> list[Future[None]]:
    """Send a part, receive a part, or both, side by side; digests may still be being taken."""
    expected = iter(_messages(incoming.stored, nbytes) if incoming else ())
    works: list[Future[None]] = []
    while True:
        sends = outgoing.next() if outgoing else []
        message = next(expected, None)
        if message is None and not sends:
            return works
        if incoming is None or message is None:
            comm.exchange(sends, [])
            continue
        memory = incoming.sink.place(message)
        comm.exchange(sends, [Receive(incoming.transfer.sender, memory)])
        works.append(checker.submit(incoming.digests.take, message, memory))


class _Outgoing:
    """The messages of a part that this rank reads for another; one is read ahead."""

    def __init__(
        self,
        transfer: Transfer,
        sources: Mapping[str, PartSource],
        headers: Mapping[Transfer, StoredPart],
        nbytes: int,
        pool: ThreadPoolExecutor,
    ) -> None:
        self._receiver = transfer.receiver
        self._source = sources[transfer.id_]
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
        self._source.read_into(message, content)
        return content


def _messages(stored: StoredPart, max_nbytes: int) -> tuple[Message, ...]:
    sizes = [buffer.nbytes for buffer in stored.part.buffers]
    return build_messages(stored.layout.byte_offsets, sizes, max_nbytes)


def _mine(step: Sequence[Transfer], rank: int, *, sending: bool) -> Transfer | None:
    ends = ((t.sender if sending else t.receiver, t) for t in step)
    return next((t for end, t in ends if end == rank), None)


def _findings(
    comm: Communicator, sources: Mapping[str, PartSource], arrivals: Mapping[Transfer, _Arrival]
) -> tuple[BadCopy, ...]:
    """Every copy that cannot be used, the same on every rank."""

    def found() -> list[list[object]]:
        own = [
            [comm.rank, part_id, str(source.failure)]
            for part_id, source in sources.items()
            if source.failure is not None
        ]
        arrived = [
            [t.sender, t.id_, damage]
            for t, arrival in arrivals.items()
            if (damage := arrival.damage()) is not None
        ]
        return own + arrived

    everyone = agree_and_gather(comm, found)
    bad: dict[tuple[int, str], str] = {}
    for rank, part_id, reason in (one for some in everyone for one in some):
        bad.setdefault((rank, part_id), reason)
    return tuple(BadCopy(*where, reason) for where, reason in sorted(bad.items()))
