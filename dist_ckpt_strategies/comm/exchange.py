"""Carry blocks of bytes between the ranks of a group, in rounds of bounded messages.

Every ordered pair of ranks has its own sequence of messages, and round n carries the n-th message
of each pair, in one batch. So no rank waits for a message of a later round, over NCCL either.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self, TypeVar

import torch
import xxhash

from dist_ckpt_strategies.comm.base import (
    Communicator,
    Message,
    run_and_gather,
    run_collectively,
)
from dist_ckpt_strategies.comm.tensor_bytes import TensorBytes
from dist_ckpt_strategies.device import HostSnapshot, host_memory, to_host, uses_cuda
from dist_ckpt_strategies.errors import CorruptCheckpointError, StorageTimeoutError
from dist_ckpt_strategies.storage.io_pool import Deadline, OrderedQueues, settled

T = TypeVar("T")

MESSAGE_NBYTES = 8 << 20
"""A larger message gains nothing, and leaves the processor's cache before its digest is taken."""

_NUM_THREADS = 4
"""Most threads that read, and most that take what has arrived: one of each for each rank."""

_SEND_SLOTS = 3
_RECEIVE_SLOTS = 2
"""Buffers of each pair: one message is read ahead, and one is taken while the next arrives."""


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A block of bytes for another rank, or for this one.

    ``read`` is called on a worker thread with a message's byte offset and a buffer. It returns the
    message's bytes, in that buffer or in other memory that stays as it is.
    """

    name: str
    to_rank: int
    nbytes: int
    read: Callable[[int, torch.Tensor], torch.Tensor]

    @classmethod
    def of(cls, name: str, to_rank: int, source: TensorBytes) -> Self:
        """The bytes of tensors."""
        return cls(name, to_rank, source.nbytes, source.read)


@dataclass(frozen=True, slots=True)
class Incoming:
    """A block of bytes from another rank, or from this one.

    ``take`` is called on a worker thread, in order, with a message's byte offset and its bytes.
    ``landing`` is called with the byte offset and the size, and says where the message is to
    arrive, on the host or on the communicator's device; None: anywhere. ``key`` is for errors.
    """

    name: str
    from_rank: int
    nbytes: int
    take: Callable[[int, torch.Tensor], None]
    landing: Callable[[int, int], torch.Tensor | None] = lambda _start, _nbytes: None
    key: str | None = None

    @classmethod
    def of(
        cls,
        name: str,
        from_rank: int,
        target: TensorBytes,
        device: torch.device,
        key: str | None = None,
    ) -> Self:
        """Bytes that fill tensors, over a communicator of this device."""

        def take(start: int, content: torch.Tensor) -> None:
            target.write(start, content)
            if start + content.numel() == target.nbytes:
                target.write_back()

        def landing(start: int, nbytes: int) -> torch.Tensor | None:
            return target.landing(start, nbytes, device)

        return cls(name, from_rank, target.nbytes, take, landing, key)


Blocks = tuple[Sequence[Outgoing], Sequence[Incoming]]


def exchange(
    comm: Communicator,
    prepare: Callable[[], Blocks],
    finish: Callable[[Deadline], Message] | None = None,
    *,
    complete: Callable[[], None] = lambda: None,
    max_inflight_nbytes: int,
    storage_s: float | None = None,
) -> list[Message]:
    """Carry the blocks of all ranks; returns what ``finish`` returned on every rank, by rank.

    Collective: a gather before and two after the messages, with ``finish`` one. Either every rank
    returns, or every rank raises. Between two ranks the n-th outgoing
    block meets the n-th incoming one, of the same size. A local failure does not stop the exchange:
    this rank sends placeholder bytes, and every rank raises at the end.

    Args:
        comm: the ranks.
        prepare: makes this rank's blocks; what it raises, every rank raises, as of the next two.
        finish: called when all has been taken, where the caller compares what arrived itself, with
            the end of ``storage_s``. Without it, digests are compared, and a block that is not as
            it was sent is a CorruptCheckpointError.
        complete: without ``finish``, called once all digests are equal on this rank.
        max_inflight_nbytes: bound on what travels at once in each direction; where ranks give
            different ones, the least counts. Takes up to five times as much memory.
        storage_s: the longest that blocks may take to be read and taken; None: no limit.
    """
    with ExitStack() as stack:
        made: list[Rounds] = []

        def begin() -> list[int]:
            outgoing, incoming = prepare()
            digests = finish is None
            made.append(Rounds(comm, outgoing, incoming, max_inflight_nbytes, digests=digests))
            stack.enter_context(made[0].threads)
            return [max_inflight_nbytes, made[0].num_peers]

        bounds = run_and_gather(comm, begin)
        share = min(nbytes for nbytes, _ in bounds) // max(1, *(peers for _, peers in bounds))
        rounds = made[0]
        deadline = Deadline.after() if storage_s is None else Deadline.after(storage_s)
        rounds.run(max(1, min(share, MESSAGE_NBYTES)), deadline)

        def end() -> Message:
            rounds.require_success()
            return finish(deadline) if finish else rounds.sent_digests()

        answers = run_and_gather(comm, end, follows=True)

        def check() -> None:
            rounds.compare(answers)
            complete()

        if finish is None:
            run_collectively(comm, check)
    return answers


@dataclass(frozen=True, slots=True)
class _Part:
    """One message: the block's place among those of its pair, the first byte, and the size."""

    block: int
    start: int
    nbytes: int


class Rounds:
    """This rank's blocks, with all memory and threads for them: no round can lack any.

    ``exchange`` in steps, for a caller with error checks of its own: ``run``, and once all ranks
    know that every one's ``require_success`` returns, ``compare`` with all ranks' ``sent_digests``.
    """

    def __init__(
        self,
        comm: Communicator,
        outgoing: Sequence[Outgoing],
        incoming: Sequence[Incoming],
        max_nbytes: int,
        *,
        digests: bool,
    ) -> None:
        self._comm = comm
        self._outgoing: defaultdict[int, list[Outgoing]] = defaultdict(list)
        self._incoming: defaultdict[int, list[Incoming]] = defaultdict(list)
        for sent in outgoing:
            self._outgoing[sent.to_rank].append(sent)
        for wanted in incoming:
            self._incoming[wanted.from_rank].append(wanted)
        ends = self._outgoing.keys(), self._incoming.keys()
        self.num_peers = max(len(ranks - {comm.rank}) for ranks in ends)
        self._size = min(
            MESSAGE_NBYTES,
            max_nbytes // max(1, self.num_peers) or 1,
            max((*(b.nbytes for b in outgoing), *(b.nbytes for b in incoming)), default=0),
        )
        self._memory = {
            (is_sent, rank): [self._new_memory() for _ in range(slots)]
            for is_sent, ranks, slots in (
                (True, ends[0], _SEND_SLOTS),
                (False, ends[1] - {comm.rank}, _RECEIVE_SLOTS),
            )
            for rank in ranks
        }
        self._digests: dict[tuple[bool, int, int], Any] | None = {} if digests else None
        self._hosts: defaultdict[tuple[bool, int], HostSnapshot] = defaultdict(HostSnapshot)
        self._failures: list[Exception] = []
        self._failed: set[Outgoing | Incoming] = set()
        ranks = sorted(ends[0] | ends[1])
        self._num_threads = min(_NUM_THREADS, len(ranks))
        self._thread_of = {rank: n % self._num_threads for n, rank in enumerate(ranks)}
        self.threads = OrderedQueues(2 * self._num_threads)

    def _new_memory(self) -> torch.Tensor:
        if self._comm.device.type == "cpu":
            return host_memory(self._size, is_pinned=uses_cuda())
        return torch.empty(self._size, dtype=torch.uint8, device=self._comm.device)

    def expect(self, sizes: Sequence[int]) -> None:
        """State what comes from each rank, one block of it, where that was not known before."""
        for rank, (block, *_) in self._incoming.items():
            self._incoming[rank] = [replace(block, nbytes=sizes[rank])]

    def run(self, bound: int, deadline: Deadline) -> None:
        """Carry all messages, of at most ``bound`` bytes. Raises only where a peer is lost."""
        sent = {r: _parts((b.nbytes for b in found), bound) for r, found in self._outgoing.items()}
        wanted = {
            r: _parts((b.nbytes for b in found), bound) for r, found in self._incoming.items()
        }
        num_rounds = max(map(len, (*sent.values(), *wanted.values())), default=0)
        taking: deque[list[tuple[Incoming, Future[None]]]] = deque([[]] * _RECEIVE_SLOTS)
        ahead = self._begin_reads(sent, 0)
        for number in range(num_rounds):
            contents = {
                rank: self._settled(rank, *one, number, deadline) for rank, one in ahead.items()
            }
            self._finish_takes(taking.popleft(), deadline)  # so that their memory can be used again
            ahead = self._begin_reads(sent, number + 1)
            coming = {rank: parts[number] for rank, parts in wanted.items() if number < len(parts)}
            landed = {
                rank: self._landing(rank, part, number)
                for rank, part in coming.items()
                if rank != self._comm.rank
            }
            own = contents.pop(self._comm.rank, None)
            if contents or landed:
                self._comm.exchange([*contents.items()], [*landed.items()])
            if own is not None:
                landed[self._comm.rank] = own
            taking.append([])
            for rank, content in landed.items():
                block = self._incoming[rank][coming[rank].block]
                thread = self._num_threads + self._thread_of[rank]
                take = self.threads.submit(thread, self._take, rank, coming[rank], content)
                taking[-1].append((block, take))
        while taking:
            self._finish_takes(taking.popleft(), deadline)

    def _begin_reads(
        self, sent: Mapping[int, Sequence[_Part]], number: int
    ) -> dict[int, tuple[_Part, Future[torch.Tensor]]]:
        begun = {}
        for rank, parts in sent.items():
            if number < len(parts):
                memory = self._memory[True, rank][number % _SEND_SLOTS]
                part, thread = parts[number], self._thread_of[rank]
                read = self.threads.submit(thread, self._read, rank, part, memory)
                begun[rank] = parts[number], read
        return begun

    def _read(self, rank: int, part: _Part, memory: torch.Tensor) -> torch.Tensor:
        content = self._outgoing[rank][part.block].read(part.start, memory[: part.nbytes])
        if rank != self._comm.rank:
            self._take_digest((True, rank, part.block), content)
        return content

    def _settled(
        self,
        rank: int,
        part: _Part,
        content: Future[torch.Tensor],
        number: int,
        deadline: Deadline,
    ) -> torch.Tensor:
        """The bytes that were read; after a failure any bytes, since the peer waits for them."""
        block = self._outgoing[rank][part.block]
        found = self._attempt(block, partial(settled, content, block.name, deadline))
        if found is None:
            return self._memory[True, rank][number % _SEND_SLOTS][: part.nbytes]
        return found

    def _landing(self, rank: int, part: _Part, number: int) -> torch.Tensor:
        block = self._incoming[rank][part.block]
        found = self._attempt(block, partial(block.landing, part.start, part.nbytes))
        if found is None:
            return self._memory[False, rank][number % _RECEIVE_SLOTS][: part.nbytes]
        return found

    def _take(self, rank: int, part: _Part, content: torch.Tensor) -> None:
        block = self._incoming[rank][part.block]
        if rank != self._comm.rank:
            self._take_digest((False, rank, part.block), content)
        if block not in self._failed:
            block.take(part.start, content)

    def _finish_takes(
        self, takes: Sequence[tuple[Incoming, Future[None]]], deadline: Deadline
    ) -> None:
        for block, taken in takes:
            self._attempt(block, partial(settled, taken, block.name, deadline))

    def _attempt(self, block: Outgoing | Incoming, call: Callable[[], T | None]) -> T | None:
        """The result of a call for a block; None if it fails, which is raised at the end."""
        try:
            return call()
        except Exception as error:  # noqa: BLE001 - see above
            self._failures.append(error)
            self._failed.add(block)
            return None

    def _take_digest(self, which: tuple[bool, int, int], content: torch.Tensor) -> None:
        if self._digests is not None:
            digest = self._digests.setdefault(which, xxhash.xxh3_64())
            digest.update(to_host([content], self._hosts[which[:2]])[0].data)  # of one thread

    def require_success(self) -> None:
        """Raise what went wrong first; rather that storage did not answer, if it did not."""
        for error in sorted(self._failures, key=lambda e: not isinstance(e, StorageTimeoutError)):
            raise error

    def sent_digests(self) -> Message:
        """Of each block that went to another rank, in order, by receiver."""
        return {str(rank): self._found(rank, is_sent=True) for rank in self._outgoing}

    def compare(self, claimed: Sequence[Mapping[str, Sequence[str]]]) -> None:
        """Raise if a block is not what its sender says."""
        for rank, blocks in sorted(self._incoming.items()):
            digests = claimed[rank].get(str(self._comm.rank), ())
            for block, sent, found in zip(
                blocks, digests, self._found(rank, is_sent=False), strict=True
            ):
                if sent != found:
                    raise CorruptCheckpointError(
                        f"{block.name} from rank {self._comm.global_ranks[rank]} arrived damaged: "
                        f"digest {found}, expected {sent}",
                        key=block.key,
                    )

    def _found(self, rank: int, *, is_sent: bool) -> list[str]:
        blocks = self._outgoing[rank] if is_sent else self._incoming[rank]
        nothing = xxhash.xxh3_64()
        digests = self._digests or {}
        return [
            digests.get((is_sent, rank, number), nothing).hexdigest()
            for number in range(len(blocks))
        ]


def _parts(sizes: Iterable[int], bound: int) -> list[_Part]:
    return [
        _Part(number, start, min(bound, nbytes - start))
        for number, nbytes in enumerate(sizes)
        for start in range(0, nbytes, bound)
    ]
