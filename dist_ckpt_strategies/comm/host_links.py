"""Bytes between ranks of one host, through memory that they share instead of a socket.

Each rank has a ring of slots that its neighbours, the ranks of its group on its host, may read. A
sender copies a piece of a message into a free slot once, for all neighbours that it is for; each of
them copies it to where it belongs. A pipe for each direction between two ranks carries one byte for
every piece: the slot that is full, and back, that it has been emptied. Pipes put the copies in
order on every processor, and nobody has to look again and again.

What a neighbour opens, it finds below ``/proc``, which shows it to processes of one user alone.
"""

from __future__ import annotations

import errno
import mmap
import os
import select
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import torch

from dist_ckpt_strategies.comm.agree import agree_and_gather
from dist_ckpt_strategies.comm.base import Buffer, Bytes, Communicator, Receive, Send
from dist_ckpt_strategies.comm.processes import host_name
from dist_ckpt_strategies.errors import PeerLostError, PeerTimeoutError

SLOT_NBYTES = 2 << 20
"""A piece stays in the processor's cache from the sender's copy to the receivers'."""

MAX_SLOTS = 16
"""A byte has seven bits for the number of a slot."""

_NONCE_NBYTES = 16
_EMPTIED = 0x80
"""Set in the byte for a slot that its reader has copied from."""

_SLICE_S = 0.25
"""Longest wait without a look at Python's own affairs, such as an exception for this thread."""

_GRACE_S = 1.0
"""A neighbour that has closed its links knows why; for so long, this rank looks for that itself."""


@dataclass(frozen=True, slots=True)
class _Neighbour:
    """Another rank on this host.

    Attributes:
        rank: within the group.
        global_rank: for messages.
        slots: its ring, to read.
        news: where its bytes arrive.
        told: where bytes for it go.
        life: readable once its process has ended.
        full: slots that it has filled for this rank, and that are not read yet.
    """

    rank: int
    global_rank: int
    slots: Bytes
    news: int
    told: int
    life: int
    full: deque[int] = field(default_factory=deque)


@dataclass(frozen=True, slots=True)
class _Limit:
    """How long to wait in an exchange, and what its ranks do, for messages."""

    timeout_s: float
    what: str

    def late(self, rank: int) -> PeerTimeoutError:
        reason = f"rank {rank} did not arrive within {self.timeout_s:g} s: {self.what}"
        return PeerTimeoutError(rank, reason)

    def lost(self, rank: int, why: str = "its process has ended") -> PeerLostError:
        return PeerLostError(rank, f"lost contact with rank {rank}: {self.what}: {why}")


class HostLinks:
    """The neighbours of this rank, and its own ring; see ``link_hosts``.

    An exchange that fails closes them, and with them its neighbours': what is in the slots and
    pipes belongs to nobody then, and no later exchange may take it for its own.

    Attributes:
        slots: the own ring, one slot in each row.
        neighbours: by their ranks; none once this is closed.
        ranks: of the group, that bytes go to and come from through these links.
    """

    def __init__(self, slots: Bytes, neighbours: Sequence[_Neighbour]) -> None:
        self.slots = slots
        self.neighbours = {neighbour.rank: neighbour for neighbour in neighbours}
        self.ranks = frozenset(self.neighbours)
        self._closing = [
            weakref.finalize(self, os.close, handle)
            for neighbour in neighbours
            for handle in (neighbour.news, neighbour.told, neighbour.life)
        ]

    @property
    def nbytes(self) -> int:
        """Memory of all rings."""
        return self.slots.nbytes + sum(n.slots.nbytes for n in self.neighbours.values())

    def close(self) -> None:
        """Give all of it back; nothing can be sent or received any more."""
        self.slots = self.slots[:0].copy()
        self.neighbours = {}
        for close in self._closing:
            close()

    def require_open(self, what: str) -> None:
        """Raise PeerLostError if this is closed; its handles may be those of other files by now."""
        if not self.neighbours:
            reason = (
                f"the memory shared with other ranks was given up by an earlier failure: {what}"
            )
            raise PeerLostError(None, reason)

    def begin(
        self, sends: Sequence[Send], receives: Sequence[Receive], timeout_s: float, what: str
    ) -> Carrying:
        """Begin an exchange with neighbours; see Communicator.begin_exchange.

        Args:
            sends: to neighbours.
            receives: from neighbours.
            timeout_s: longest wait.
            what: the ranks do, for messages.

        Raises:
            PeerLostError: an earlier exchange has failed.
        """
        self.require_open(what)
        carrying = Carrying(self, _Limit(timeout_s, what))
        carrying.add(sends, receives)
        with carrying.or_closed():
            carrying.fill_slots()
        return carrying


class Carrying:
    """An exchange between neighbours; an Exchange.

    What the slots have room for is on its way from the start; the rest goes while this rank waits.
    """

    def __init__(self, links: HostLinks, limit: _Limit) -> None:
        self._links = links
        self._slots = links.slots
        self._neighbours = links.neighbours
        self._limit = limit
        self._outgoing: deque[tuple[Bytes, tuple[int, ...]]] = deque()
        self._free = deque(range(len(links.slots)))
        self._readers: dict[int, set[int]] = {}
        self._incoming: dict[int, deque[Bytes]] = {}
        self._left: dict[int, float] = {}

    def add(self, sends: Sequence[Send], receives: Sequence[Receive]) -> None:
        """What is to be carried."""
        self._outgoing.extend(_outgoing(sends, self._slots.shape[1]))
        for receive in receives:
            pieces = _pieces(receive.into, self._slots.shape[1])
            self._incoming.setdefault(receive.from_rank, deque()).extend(pieces)

    @contextmanager
    def or_closed(self) -> Iterator[None]:
        """Close the links where what is done meanwhile does not come to its end."""
        with ExitStack() as unless_done:
            unless_done.callback(self._links.close)
            yield
            unless_done.pop_all()

    def fill_slots(self) -> None:
        """Copy what is to be sent next into the slots that are free, and say so."""
        while self._outgoing and self._free:
            piece, ranks = self._outgoing.popleft()
            number = self._free.popleft()
            np.copyto(self._slots[number, : piece.size], piece)
            self._readers[number] = set(ranks)
            for rank in ranks:
                self._tell(self._neighbours[rank], number)

    def wait(self) -> None:
        """See Exchange."""
        deadline = time.monotonic() + self._limit.timeout_s
        self._links.require_open(self._limit.what)
        with self.or_closed():
            for neighbour in self._neighbours.values():
                self._take(neighbour)
            while awaited := self._awaited():
                ended = self._listen(awaited, deadline)
                for rank in awaited:
                    self._take(self._neighbours[rank])
                self.fill_slots()
                self._require_hope(self._awaited(), ended, deadline)

    def _awaited(self) -> set[int]:
        """Ranks that have yet to fill a slot for this one, or to read one of its own."""
        awaited = {rank for rank, pieces in self._incoming.items() if pieces}
        return awaited.union(*self._readers.values())

    def _listen(self, awaited: set[int], deadline: float) -> set[int]:
        """Hear what there is to hear; those whose processes have ended."""
        poll = select.poll()
        ears, lives = {}, {}
        for rank in awaited:
            neighbour = self._neighbours[rank]
            lives[neighbour.life] = rank
            poll.register(neighbour.life, select.POLLIN)
            if rank not in self._left:
                ears[neighbour.news] = neighbour
                poll.register(neighbour.news, select.POLLIN)
        left_s = max(0.0, deadline - time.monotonic())
        ready = [handle for handle, _ in poll.poll(1000 * min(left_s, _SLICE_S))]
        for handle in ready:
            if handle in ears:
                self._hear(ears[handle])
        return {lives[handle] for handle in ready if handle in lives}

    def _require_hope(self, awaited: set[int], ended: set[int], deadline: float) -> None:
        """Raise where not all that is awaited can come any more, or the time is up."""
        for rank in sorted(ended & awaited):
            raise self._limit.lost(self._neighbours[rank].global_rank)
        now = time.monotonic()
        silent = awaited - self._left.keys()
        if silent and now >= deadline:
            raise self._limit.late(self._neighbours[min(silent)].global_rank)
        for rank in sorted(awaited - silent):
            if now >= min(deadline, self._left[rank] + _GRACE_S):
                why = "it has closed its links; see what it has raised first"
                raise self._limit.lost(self._neighbours[rank].global_rank, why)

    def _hear(self, neighbour: _Neighbour) -> None:
        found = os.read(neighbour.news, 2 * MAX_SLOTS)
        if not found:
            self._left.setdefault(neighbour.rank, time.monotonic())
        for news in found:
            if news & _EMPTIED:
                self._emptied(news & ~_EMPTIED, neighbour.rank)
            else:
                neighbour.full.append(news)

    def _emptied(self, number: int, rank: int) -> None:
        readers = self._readers[number]
        readers.discard(rank)
        if not readers:
            del self._readers[number]
            self._free.append(number)

    def _take(self, neighbour: _Neighbour) -> None:
        """Copy what a neighbour has for this rank; more of it may belong to its next exchange."""
        wanted = self._incoming.get(neighbour.rank)
        while wanted and neighbour.full:
            number = neighbour.full.popleft()
            piece = wanted.popleft()
            np.copyto(piece, neighbour.slots[number, : piece.size])
            self._tell(neighbour, number | _EMPTIED)

    def _tell(self, neighbour: _Neighbour, news: int) -> None:
        try:
            os.write(neighbour.told, bytes([news]))
        except BrokenPipeError:
            self._left.setdefault(neighbour.rank, time.monotonic())


def _outgoing(sends: Sequence[Send], nbytes: int) -> Iterator[tuple[Bytes, tuple[int, ...]]]:
    """Pieces in the order of the sends, each with all ranks that are to have it next."""
    at = 0
    while at < len(sends):
        ranks = [sends[at].to_rank]
        data = sends[at].data
        at += 1
        while at < len(sends) and sends[at].data is data and sends[at].to_rank not in ranks:
            ranks.append(sends[at].to_rank)
            at += 1
        for piece in _pieces(data, nbytes):
            yield piece, tuple(ranks)


def _pieces(data: Buffer, nbytes: int) -> Iterator[Bytes]:
    content = data.numpy() if isinstance(data, torch.Tensor) else data
    return (content[start : start + nbytes] for start in range(0, content.size, nbytes))


def link_hosts(
    comm: Communicator, nbytes: int, *, slot_nbytes: int = SLOT_NBYTES
) -> HostLinks | None:
    """Share memory with the ranks of the group that are on this host; None where there are none.

    Collective, with one meeting, and two more where any host has several ranks of the group. Ranks
    that cannot reach each other's memory, in containers of their own or as other users, are no
    neighbours.

    Args:
        comm: the group.
        nbytes: bound on the memory of all rings that this rank maps, its own and its neighbours';
            less than a slot for each gives no links.
        slot_nbytes: size of a slot, the same on all ranks.
    """
    hosts = agree_and_gather(comm, _host)
    mine = hosts[comm.rank]
    if len(set(hosts) - {None}) == sum(host is not None for host in hosts):
        return None
    near = [r for r, host in enumerate(hosts) if mine and host == mine and r != comm.rank]
    num_slots = min(MAX_SLOTS, nbytes // (slot_nbytes * (1 + len(near))))
    with _Handles() as handles:
        offers = agree_and_gather(comm, lambda: handles.offer(near, num_slots, slot_nbytes))
        opened = agree_and_gather(comm, lambda: handles.open(offers, comm.rank))
        linked = [rank for rank in opened[comm.rank] if comm.rank in opened[rank]]
        return handles.links(linked, comm)


def _host() -> str | None:
    """This host, where its processes can share memory."""
    is_able = hasattr(os, "memfd_create") and hasattr(os, "pidfd_open")
    return host_name() if is_able else None


class _Handles:
    """The file descriptors of links in the making; those that no link keeps are closed at the end.

    Whatever the system refuses gives fewer links, and no error.
    """

    def __init__(self) -> None:
        self._open: set[int] = set()
        self._news: dict[int, int] = {}
        self._theirs: dict[int, tuple[Bytes, int, int]] = {}
        self._slots: Bytes | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        for handle in self._open:
            os.close(handle)

    def offer(self, near: Sequence[int], num_slots: int, slot_nbytes: int) -> Any:
        """Memory and pipes for neighbours, as they are told of them; None where there are none."""
        if not (near and num_slots):
            return None
        try:
            ring = self._kept(os.memfd_create("dist_ckpt-ring", os.MFD_CLOEXEC))
            os.posix_fallocate(ring, 0, mmap.PAGESIZE + num_slots * slot_nbytes)
            memory = mmap.mmap(ring, 0)
            ends = [[rank, self._pipe_from(rank)] for rank in near]
        except OSError:
            return None
        nonce = os.urandom(_NONCE_NBYTES)
        memory[:_NONCE_NBYTES] = nonce
        self._slots = _slots_in(memory, num_slots)
        return [os.getpid(), nonce.hex(), ring, num_slots, ends]

    def open(self, offers: Sequence[Any], rank: int) -> list[int]:
        """Open what is offered to this rank; the ranks with which that has worked."""
        for peer in self._news:
            with suppress(OSError, ValueError):  # the latter for a file too short to map
                if offers[peer] is not None:
                    self._theirs[peer] = self._opened(offers[peer], rank)
        return sorted(self._theirs)

    def links(self, ranks: Sequence[int], comm: Communicator) -> HostLinks | None:
        """The links to some ranks; None for none."""
        if self._slots is None or not ranks:
            return None
        neighbours = []
        for rank in ranks:
            slots, told, life = self._theirs[rank]
            news = self._news[rank]
            neighbours.append(_Neighbour(rank, comm.global_rank(rank), slots, news, told, life))
            self._open -= {news, told, life}
        return HostLinks(self._slots, neighbours)

    def _kept(self, handle: int) -> int:
        self._open.add(handle)
        return handle

    def _pipe_from(self, rank: int) -> int:
        """A pipe that a neighbour is to write to: the end that it has to open."""
        self._news[rank], write = map(self._kept, os.pipe())
        return write

    def _opened(self, offer: Sequence[Any], rank: int) -> tuple[Bytes, int, int]:
        """A neighbour's slots, the pipe to it, and a handle of its process.

        Raises:
            OSError: it cannot be reached, or is another process.
        """
        pid, nonce, ring, num_slots, ends = offer
        life = self._kept(os.pidfd_open(pid))
        memory = mmap.mmap(
            self._kept(os.open(f"/proc/{pid}/fd/{ring}", os.O_RDONLY | os.O_CLOEXEC)),
            0,
            prot=mmap.PROT_READ,
        )
        if memory[:_NONCE_NBYTES].hex() != nonce:
            raise OSError(errno.ESRCH, f"process {pid} is another one here")
        path = f"/proc/{pid}/fd/{dict(ends)[rank]}"
        told = self._kept(os.open(path, os.O_WRONLY | os.O_CLOEXEC))
        return _slots_in(memory, num_slots), told, life


def _slots_in(memory: mmap.mmap, num_slots: int) -> Bytes:
    """The slots of a ring, one in each row."""
    return np.frombuffer(memory, np.uint8, offset=mmap.PAGESIZE).reshape(num_slots, -1)
