"""Carry out a GroupPlan: while one round is passed on between the ranks, the next ones are read."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch

from dist_ckpt_strategies.comm.agree import agree
from dist_ckpt_strategies.comm.base import Communicator, Exchange, Receive, Send
from dist_ckpt_strategies.config import Options
from dist_ckpt_strategies.core.array import ArraySpec
from dist_ckpt_strategies.core.inner_grid import stored_nbytes
from dist_ckpt_strategies.core.region import Region
from dist_ckpt_strategies.core.report import BroadcastReport
from dist_ckpt_strategies.device import (
    Copies,
    as_bytes,
    begin_copies,
    copy_into,
    host_view,
    is_in_order,
    torch_dtype,
)
from dist_ckpt_strategies.errors import CheckpointError
from dist_ckpt_strategies.sharded.transfer import TensorRead, run_reads
from dist_ckpt_strategies.storage.base import ArrayRead, ArrayReader, Transfer
from dist_ckpt_strategies.two_stage.plan import Batch, GroupPlan, Slice

_ROUNDS_AHEAD = 2
"""Rounds that are being read, or copied to the device, while one is sent."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Target:
    """A tensor, of any dtype, strides and device, to be filled with a region of an array.

    Attributes:
        array: number of the array.
        region: in its coordinates.
        tensor: has the region's shape.
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

    Args:
        plan: equal on every rank.
        arrays: those that the plan was made for.
        targets: this rank's tensors. Overwritten in place; after an error their content is
            undefined.
        open_reader: gives what reads the arrays; called once, where errors reach all ranks.
        comm: the group that the plan was made for.
        options: timeout and memory budget.

    Raises:
        StorageError: on the rank that met it; PeerError of the same class elsewhere.
    """
    started = time.monotonic()
    clock = _Clock()
    ahead: list[_ReadAhead] = []
    nbytes: list[int] = []

    def read_alone() -> None:
        reader = open_reader()
        ahead.append(_ReadAhead(plan, arrays, targets, reader, comm))
        alone = [target for target in targets if (target.array, target.region) not in plan.shared]
        nbytes.extend(_counted(plan, arrays, targets, alone, comm.rank))
        reads = [TensorRead(arrays[t.array], t.region, t.tensor.detach()) for t in alone]
        with clock.on("reading"):
            run_reads(reader, reads, options)

    clock.agree(comm, read_alone)
    if plan.rounds:
        try:
            for _ in plan.rounds:
                current = clock.agree(comm, partial(ahead[0].turn, clock, options))
                current.exchange = comm.begin_exchange(current.sends, current.receives)
            clock.agree(comm, partial(ahead[0].finish, clock, options))
        finally:
            ahead[0].abandon(options.timeout_s)
    filled_nbytes, read_nbytes, received_nbytes = nbytes
    return BroadcastReport(
        num_tensors=len(targets),
        filled_nbytes=filled_nbytes,
        read_nbytes=read_nbytes,
        received_nbytes=received_nbytes,
        reading_s=clock.seconds["reading"],
        sending_s=clock.seconds["sending"],
        copying_s=clock.seconds["copying"],
        meeting_s=clock.seconds["waiting"],
        seconds=time.monotonic() - started,
    )


def _counted(
    plan: GroupPlan,
    arrays: Sequence[ArraySpec],
    targets: Sequence[Target],
    alone: Sequence[Target],
    rank: int,
) -> tuple[int, int, int]:
    """Bytes that a rank fills, reads from storage, and gets from other ranks."""
    filled = sum(target.region.numel * arrays[target.array].dtype.itemsize for target in targets)
    own = [(b, each) for batches in plan.rounds_of(rank) for b in batches for each in b.slices]
    read = [(target.array, target.region) for target in alone]
    read += [(each.array, each.region) for batch, each in own if batch.reader == rank]
    received = sum(each.nbytes for batch, each in own if batch.reader != rank)
    return filled, sum(stored_nbytes(arrays[n], region) for n, region in read), received


class _Clock:
    """Seconds that this rank spent waiting, by what it waited for."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def on(self, stage: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds[stage] += time.monotonic() - began

    def agree(self, comm: Communicator, step: Callable[[], T]) -> T:
        """Run a step with an error check; what it does not take itself is waiting. Collective."""
        before = sum(self.seconds.values())
        began = time.monotonic()
        result = agree(comm, step)
        inside = sum(self.seconds.values()) - before
        self.seconds["waiting"] += time.monotonic() - began - inside
        return result


@dataclass(frozen=True, slots=True)
class _Part:
    """A slice on this rank.

    Attributes:
        array: what it is a slice of.
        region: in the array's coordinates.
        memory: its elements, on the communicator's device.
        host: where it is read to; ``memory`` itself, if that is on the host.
        copies: tensors that are copied from ``memory`` once it is filled.
    """

    array: ArraySpec
    region: Region
    memory: torch.Tensor
    host: torch.Tensor
    copies: tuple[torch.Tensor, ...]

    def as_read(self) -> ArrayRead:
        return ArrayRead(self.array, self.region, host_view(self.host))


@dataclass(frozen=True, slots=True)
class _Load:
    """A batch on this rank.

    Attributes:
        batch: what it is.
        parts: its slices.
        content: the message that is sent or received; None for none.
    """

    batch: Batch
    parts: tuple[_Part, ...]
    content: torch.Tensor | None


class _Round:
    """A round on this rank: read from storage or received, then put in place.

    Args:
        loads: its batches.
        plan: says which of them are sent, and which are in the page cache.
        reader: reads the arrays.
        rank: this one.

    Attributes:
        sends: what is passed on over the network once it is read.
        receives: what arrives at the same time.
        exchange: these, under way.
    """

    def __init__(
        self, loads: Sequence[_Load], plan: GroupPlan, reader: ArrayReader, rank: int
    ) -> None:
        self._loads = loads
        self._reader = reader
        own = [load for load in loads if load.batch.reader == rank]
        cached = [load for load in loads if plan.is_cached_for(rank, load.batch)]
        self._cached = [part for load in cached for part in load.parts]
        self._own = [part for load in own for part in load.parts]
        self.sends = [
            Send(receiver, load.content)
            for load in own
            if load.content is not None
            for receiver in plan.receivers(load.batch)
        ]
        self.receives = [
            Receive(load.batch.reader, load.content)
            for load in loads
            if load.content is not None and load.batch.reader != rank
        ]
        self.exchange: Exchange | None = None
        self._from_cache: Transfer | None = None
        self._reading: Transfer | None = None
        if self._own:
            self._reading = reader.begin_reads([part.as_read() for part in self._own])

    def wait_for_reads(self, timeout_s: float) -> Copies:
        """Return once this rank's own slices are read; copies of them to the device are begun."""
        if self._reading is not None:
            self._reading.wait(timeout_s)
        return _begin_uploads(self._own)

    def begin_cached_reads(self) -> None:
        """Begin to read from the page cache what others have read into it."""
        if self._cached:
            self._from_cache = self._reader.begin_reads([part.as_read() for part in self._cached])

    def finish(self, timeout_s: float, clock: _Clock) -> None:
        """Wait for what is under way, and copy it to the tensors where it did not land there."""
        try:
            with clock.on("sending"):
                if self.exchange is not None:
                    self.exchange.wait()
        finally:
            with clock.on("reading"):
                if self._from_cache is not None:
                    self._from_cache.wait(timeout_s)
        parts = [part for load in self._loads for part in load.parts]
        with clock.on("copying"):
            _begin_uploads(self._cached).wait()
            copy_into(
                [tensor for part in parts for tensor in part.copies],
                [part.memory for part in parts for _ in part.copies],
            )

    def abandon(self, timeout_s: float) -> None:
        """Wait for reads whose memory is about to be freed: an earlier failure is being raised."""
        for transfer in (self._reading, self._from_cache):
            try:
                if transfer is not None:
                    transfer.wait(timeout_s)
            except CheckpointError:
                continue


def _begin_uploads(parts: Sequence[_Part]) -> Copies:
    staged = [part for part in parts if part.host is not part.memory]
    return begin_copies([part.memory for part in staged], [part.host for part in staged])


class _ReadAhead:
    """This rank's rounds, begun ahead of their use."""

    def __init__(
        self,
        plan: GroupPlan,
        arrays: Sequence[ArraySpec],
        targets: Sequence[Target],
        reader: ArrayReader,
        comm: Communicator,
    ) -> None:
        self._plan = plan
        self._arrays = arrays
        self._targets: dict[int, list[Target]] = defaultdict(list)
        for target in targets:
            self._targets[target.array].append(target)
        self._is_pinned = any(target.tensor.device.type == "cuda" for target in targets)
        self._reader = reader
        self._rank = comm.rank
        self._device = comm.device
        self._waiting = deque(plan.rounds_of(comm.rank))
        self._begun: deque[_Round] = deque()
        self._current = _Round((), plan, reader, comm.rank)

    def turn(self, clock: _Clock, options: Options) -> _Round:
        """The next round, ready to be passed on; the one before is in place then."""
        before = self._current
        try:
            before.begin_cached_reads()
            while self._waiting and len(self._begun) < _ROUNDS_AHEAD:
                loads = [self._load(batch) for batch in self._waiting.popleft()]
                self._begun.append(_Round(loads, self._plan, self._reader, self._rank))
            self._current = self._begun.popleft()
            with clock.on("reading"):
                uploads = self._current.wait_for_reads(options.timeout_s)
        finally:
            before.finish(options.timeout_s, clock)  # after a failure too: it uses memory
        with clock.on("copying"):
            uploads.wait()
        return self._current

    def finish(self, clock: _Clock, options: Options) -> None:
        """Put the last round in place."""
        self._current.begin_cached_reads()
        self._current.finish(options.timeout_s, clock)

    def abandon(self, timeout_s: float) -> None:
        """Wait for the reads under way, which use memory that is about to be freed."""
        for round_ in (self._current, *self._begun):
            round_.abandon(timeout_s)

    def _load(self, batch: Batch) -> _Load:
        """Memory for a batch: a message of several slices has a buffer, others the tensors' own."""
        is_read = self._rank == batch.reader
        receivers = self._plan.receivers(batch)
        is_message = bool(receivers) if is_read else self._rank in receivers
        is_staged = self._device.type != "cpu" and (is_read or not is_message)
        if not is_message or len(batch.slices) == 1:
            parts = tuple(self._part(each, is_staged=is_staged) for each in batch.slices)
            return _Load(batch, parts, as_bytes(parts[0].memory) if is_message else None)
        content = self._buffer(batch.nbytes)
        host = _pinned(content) if is_staged else content
        parts = tuple(
            _Part(
                self._arrays[each.array],
                each.region,
                memory := self._typed(content, start, each),
                self._typed(host, start, each) if is_staged else memory,
                tuple(self._pieces(each)),
            )
            for each, start in zip(batch.slices, batch.starts, strict=True)
        )
        return _Load(batch, parts, content)

    def _part(self, each: Slice, *, is_staged: bool) -> _Part:
        """A slice in a tensor's own memory, or in a buffer where it fits none."""
        copies = list(self._pieces(each))
        dtype = torch_dtype(self._arrays[each.array].dtype)
        direct = next((n for n, tensor in enumerate(copies) if self._fits(tensor, dtype)), None)
        if direct is None:
            memory = self._typed(self._buffer(each.nbytes), 0, each)
        else:
            memory = copies.pop(direct)
        host = _pinned(memory) if is_staged else memory
        return _Part(self._arrays[each.array], each.region, memory, host, tuple(copies))

    def _pieces(self, each: Slice) -> Iterator[torch.Tensor]:
        """The slice's part of each of this rank's tensors that have it."""
        for target in self._targets[each.array]:
            if target.region.contains(each.region):
                yield target.tensor.detach()[each.region.within(target.region).slices()]

    def _fits(self, tensor: torch.Tensor, dtype: torch.dtype) -> bool:
        """Whether bytes of that dtype can be received into the tensor's own memory."""
        device = self._device
        is_there = tensor.device.type == device.type and device.index in {None, tensor.device.index}
        return is_there and tensor.dtype == dtype and is_in_order(tensor)

    def _buffer(self, nbytes: int) -> torch.Tensor:
        """Uninitialised bytes on the device; pinned on the host, where this rank uses CUDA."""
        pinned = self._device.type == "cpu" and self._is_pinned
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device, pin_memory=pinned)

    def _typed(self, content: torch.Tensor, start: int, each: Slice) -> torch.Tensor:
        """A part of the bytes as elements of the slice's dtype, in its shape."""
        part = content[start : start + each.nbytes]
        dtype = torch_dtype(self._arrays[each.array].dtype)
        return part.view(dtype).reshape(each.region.shape)


def _pinned(like: torch.Tensor) -> torch.Tensor:
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=True, device="cpu")
