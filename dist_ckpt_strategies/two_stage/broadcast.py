"""Carry out a GroupPlan: while one round is sent between the ranks, the next ones are read."""

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from dist_ckpt_strategies.comm.base import Communicator, Receive, Send, run_collectively
from dist_ckpt_strategies.config import Options
from dist_ckpt_strategies.core.array import ArraySpec, Region
from dist_ckpt_strategies.core.report import BroadcastReport
from dist_ckpt_strategies.device import (
    as_bytes,
    begin_copies,
    copy_into,
    host_memory,
    host_view,
    is_in_order,
    torch_dtype,
)
from dist_ckpt_strategies.errors import CheckpointError
from dist_ckpt_strategies.sharded.load import run_reads
from dist_ckpt_strategies.storage.io_pool import Deadline, Transfer
from dist_ckpt_strategies.storage.store import ArrayRead, ArrayReader
from dist_ckpt_strategies.two_stage.plan import Batch, GroupPlan, Slice

_ROUNDS_AHEAD = 2
"""Rounds that are being read, or copied to the device, while one is sent."""

READING = 3 / 8
"""Share of ``timeout_s`` for what a rank waits for from storage in a round."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Target:
    """A tensor, of any dtype, strides and device, to be filled with a region of an array.

    The array is a number; the region, in its coordinates, has the tensor's shape.
    """

    array: int
    region: Region
    tensor: torch.Tensor


def run_group_plan(
    plan: GroupPlan,
    arrays: Sequence[ArraySpec],
    targets: Sequence[Target],
    open_reader: Callable[[], ArrayReader],
    comm: Communicator,
    options: Options,
) -> BroadcastReport:
    """Fill every tensor; each region of the plan leaves storage once for all ranks of ``comm``.

    Collective: either every rank returns or every rank raises. One error check for what ranks read
    alone, one for each round, and one for the last. The check of a round also tells the ranks that
    share the reader's page cache that they can read it. Contiguous tensors of the stored dtype are
    received into and read into directly; others are converted as ``copy_`` does, round by round.

    The plan is equal on every rank, and made for these arrays and this group. Targets are this
    rank's; they are overwritten in place, and after an error their content is undefined.
    ``open_reader`` is called once, within the first error check. A StorageError of one rank is a
    PeerError of the same class on the others.
    """
    started = time.monotonic()
    clock = _Clock()
    alone = [target for target in targets if (target.array, target.region) not in plan.shared]
    opened: list[_Rounds] = []

    def read_alone() -> None:
        with clock.on("reading"):
            reader = open_reader()
            opened.append(
                _Rounds(plan, arrays, targets, reader, comm, READING * options.timeout_s, clock)
            )
            reads = [(arrays[t.array], t.region, t.tensor.detach()) for t in alone]
            run_reads(reader, reads, options, Deadline.after(READING * options.timeout_s))

    clock.run_collectively(comm, read_alone)
    if plan.rounds:
        rounds = opened[0]
        try:
            for _ in plan.rounds:
                current = clock.run_collectively(comm, rounds.advance)
                current.await_bytes = comm.begin_exchange(current.sends, current.receives)
            clock.run_collectively(comm, rounds.finish)
        finally:
            rounds.abandon()
    own = [(b, each) for batches in plan.rounds_of(comm.rank) for b in batches for each in b.slices]
    read = [(target.array, target.region) for target in alone]
    read += [(each.array, each.region) for batch, each in own if batch.reader == comm.rank]
    return BroadcastReport(
        num_tensors=len(targets),
        filled_nbytes=sum(t.region.numel * arrays[t.array].dtype.itemsize for t in targets),
        read_nbytes=sum(region.numel * arrays[array].dtype.itemsize for array, region in read),
        received_nbytes=sum(each.nbytes for batch, each in own if batch.reader != comm.rank),
        reading_s=clock.seconds["reading"],
        sending_s=clock.seconds["sending"],
        copying_s=clock.seconds["copying"],
        waiting_s=clock.seconds["waiting"],
        seconds=time.monotonic() - started,
    )


class _Clock:
    """Seconds that this rank spent, by what it waited for."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def on(self, stage: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds[stage] += time.monotonic() - began

    def run_collectively(self, comm: Communicator, step: Callable[[], T]) -> T:
        """Run a step with an error check; the time beside the step's stages is waiting."""
        before = sum(self.seconds.values())
        began = time.monotonic()
        result = run_collectively(comm, step)
        inside = sum(self.seconds.values()) - before
        self.seconds["waiting"] += time.monotonic() - began - inside
        return result


@dataclass(frozen=True, slots=True)
class _Block:
    """Memory for a slice of an array on this rank."""

    array: ArraySpec
    region: Region
    memory: torch.Tensor  # on the communicator's device
    host: torch.Tensor  # where it is read to; ``memory`` itself, if that is on the host
    copies: list[torch.Tensor]  # tensors that are copied from ``memory`` once it is filled


@dataclass(slots=True)
class _Round:
    """A round on this rank: what it reads itself, or once another rank has read it, or receives."""

    own: list[_Block] = field(default_factory=list)
    cached: list[_Block] = field(default_factory=list)
    received: list[_Block] = field(default_factory=list)
    sends: list[Send] = field(default_factory=list)
    receives: list[Receive] = field(default_factory=list)
    transfers: list[Transfer] = field(default_factory=list)
    await_bytes: Callable[[], None] | None = None


class _Rounds:
    """This rank's rounds in turn: one is put in place, one is sent, later ones are being read."""

    def __init__(  # noqa: PLR0913, PLR0917 - those of run_group_plan
        self,
        plan: GroupPlan,
        arrays: Sequence[ArraySpec],
        targets: Sequence[Target],
        reader: ArrayReader,
        comm: Communicator,
        timeout_s: float,
        clock: _Clock,
    ) -> None:
        self._plan, self._arrays, self._reader = plan, arrays, reader
        self._targets: dict[int, list[Target]] = defaultdict(list)
        for target in targets:
            self._targets[target.array].append(target)
        self._uses_cuda = any(target.tensor.device.type == "cuda" for target in targets)
        self._rank, self._device = comm.rank, comm.device
        self._timeout_s, self._clock = timeout_s, clock
        self._waiting = deque(plan.rounds_of(comm.rank))
        self._begun: deque[_Round] = deque()
        self._current = _Round()

    def advance(self) -> _Round:
        """The next round, read and ready to be sent; the tensors of the one before are filled."""
        before = self._current
        try:
            self._begin_reads(before, before.cached)
            while self._waiting and len(self._begun) < _ROUNDS_AHEAD:
                self._begun.append(self._begin_round(self._waiting.popleft()))
            self._current = self._begun.popleft()
            with self._clock.on("reading"):
                self._wait_for_reads(self._current)
            wait_for_uploads = _begin_uploads(self._current.own)
        finally:
            self._fill(before)  # after a failure too: its reads and messages use memory
        with self._clock.on("copying"):
            wait_for_uploads()
        return self._current

    def finish(self) -> None:
        """Fill the tensors of the last round."""
        self._begin_reads(self._current, self._current.cached)
        self._fill(self._current)

    def abandon(self) -> None:
        """Wait for the reads under way, which use memory that is about to be freed."""
        for round_ in (self._current, *self._begun):
            while round_.transfers:
                with suppress(CheckpointError):  # an earlier failure is being raised
                    self._wait_for_reads(round_)

    def _begin_round(self, batches: Sequence[Batch]) -> _Round:
        found = _Round()
        for batch in batches:
            receivers = self._plan.receivers(batch)
            is_read = batch.reader == self._rank
            is_message = bool(receivers) if is_read else self._rank in receivers
            blocks, message = self._memory_for(batch, is_read=is_read, is_message=is_message)
            if is_read:
                found.own += blocks
            elif is_message:
                found.received += blocks
            else:
                found.cached += blocks
            if message is not None and is_read:
                found.sends += [Send(receiver, message) for receiver in receivers]
            elif message is not None:
                found.receives.append(Receive(batch.reader, message))
        self._begin_reads(found, found.own)
        return found

    def _begin_reads(self, round_: _Round, blocks: Sequence[_Block]) -> None:
        if blocks:
            reads = [ArrayRead(b.array, b.region, host_view(b.host)) for b in blocks]
            round_.transfers.append(self._reader.begin_reads(reads))

    def _wait_for_reads(self, round_: _Round) -> None:
        while round_.transfers:
            round_.transfers.pop(0).wait(self._timeout_s)

    def _fill(self, round_: _Round) -> None:
        """Wait for what is under way, and copy it to the tensors that it is not read into."""
        try:
            with self._clock.on("sending"):
                if round_.await_bytes is not None:
                    round_.await_bytes()
        finally:
            with self._clock.on("reading"):
                self._wait_for_reads(round_)
        blocks = [*round_.own, *round_.cached, *round_.received]
        with self._clock.on("copying"):
            wait_for_uploads = _begin_uploads(round_.cached)
            wait_for_uploads()
            copy_into(
                [tensor for block in blocks for tensor in block.copies],
                [block.memory for block in blocks for _ in block.copies],
            )

    def _memory_for(
        self, batch: Batch, *, is_read: bool, is_message: bool
    ) -> tuple[list[_Block], torch.Tensor | None]:
        """Memory for a batch: a message of several slices has a buffer, others the tensors' own."""
        is_staged = self._device.type != "cpu" and (is_read or not is_message)
        if not is_message or len(batch.slices) == 1:
            blocks = [self._block(each, is_staged=is_staged) for each in batch.slices]
            return blocks, as_bytes(blocks[0].memory) if is_message else None
        content = self._buffer(batch.nbytes)
        host = _pinned(content) if is_staged else content
        blocks = []
        for each, start in zip(batch.slices, batch.starts, strict=True):
            memory = self._typed(content, start, each)
            read_to = self._typed(host, start, each) if is_staged else memory
            array = self._arrays[each.array]
            blocks.append(_Block(array, each.region, memory, read_to, self._tensors_of(each)))
        return blocks, content

    def _block(self, each: Slice, *, is_staged: bool) -> _Block:
        """A slice in a tensor's own memory, or in a buffer where no tensor is suitable."""
        array, copies = self._arrays[each.array], self._tensors_of(each)
        dtype = torch_dtype(array.dtype)
        direct = next((n for n, tensor in enumerate(copies) if self._fits(tensor, dtype)), None)
        if direct is None:
            memory = self._typed(self._buffer(each.nbytes), 0, each)
        else:
            memory = copies.pop(direct)
        return _Block(array, each.region, memory, _pinned(memory) if is_staged else memory, copies)

    def _tensors_of(self, each: Slice) -> list[torch.Tensor]:
        """The views of this rank's tensors that the slice fills."""
        return [
            target.tensor.detach()[each.region.within(target.region).slices()]
            for target in self._targets[each.array]
            if target.region.contains(each.region)
        ]

    def _fits(self, tensor: torch.Tensor, dtype: torch.dtype) -> bool:
        """Whether bytes of that dtype can be received into the tensor's own memory."""
        device = self._device
        is_there = tensor.device.type == device.type and device.index in {None, tensor.device.index}
        return is_there and tensor.dtype == dtype and is_in_order(tensor)

    def _buffer(self, nbytes: int) -> torch.Tensor:
        """Uninitialised bytes on the device; pinned on the host, where this rank uses CUDA."""
        if self._device.type == "cpu" and self._uses_cuda:
            return host_memory(nbytes, is_pinned=True)
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def _typed(self, content: torch.Tensor, start: int, each: Slice) -> torch.Tensor:
        """The slice's bytes as elements of its dtype, in its shape."""
        dtype = torch_dtype(self._arrays[each.array].dtype)
        return content[start : start + each.nbytes].view(dtype).reshape(each.region.shape)


def _begin_uploads(blocks: Sequence[_Block]) -> Callable[[], None]:
    staged = [block for block in blocks if block.host is not block.memory]
    return begin_copies([block.memory for block in staged], [block.host for block in staged])


def _pinned(like: torch.Tensor) -> torch.Tensor:
    memory = host_memory(like.numel() * like.element_size(), is_pinned=True)
    return memory.view(like.dtype).reshape(like.shape)
