"""Carry out a GroupPlan: while one round is sent between the ranks, the next ones are read."""

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice

import torch

from dist_ckpt_strategies.comm.base import Communicator, Parcel, run_collectively
from dist_ckpt_strategies.config import Options
from dist_ckpt_strategies.core.array import ArraySpec, Region
from dist_ckpt_strategies.core.report import BroadcastReport
from dist_ckpt_strategies.device import (
    as_bytes,
    copy_into,
    host_memory,
    host_view,
    is_in_order,
    torch_dtype,
    uses_cuda,
)
from dist_ckpt_strategies.errors import CheckpointError
from dist_ckpt_strategies.sharded.read import run_reads
from dist_ckpt_strategies.storage.io_pool import Deadline, Transfer
from dist_ckpt_strategies.storage.store import ArrayRead, BeginReads
from dist_ckpt_strategies.two_stage.plan import ROUNDS_IN_FLIGHT, Batch, GroupPlan, Slice

READING = 3 / 8
"""Share of ``timeout_s`` for what a rank waits for from storage in a round."""

Target = tuple[int, Region, torch.Tensor]
"""An array's number, a region of it, and the tensor to fill: of any dtype, strides and device."""

Seconds = defaultdict[str, float]
"""Seconds that this rank has waited, by cause."""


def run_group_plan(
    plan: GroupPlan,
    arrays: Sequence[ArraySpec],
    targets: Sequence[Target],
    open_reads: Callable[[], BeginReads],
    comm: Communicator,
    options: Options,
) -> BroadcastReport:
    """Fill every tensor; each region of the plan leaves storage once for all ranks of ``comm``.

    Collective: either every rank returns or every rank raises. One error check for what ranks read
    alone, one for each round, and one for the last. Contiguous tensors of the stored dtype are
    received into and read into directly; others are converted as ``copy_`` does, round by round.

    The plan is equal on every rank, and made for these arrays and this group. Targets are this
    rank's; they are overwritten in place, and after an error their content is undefined.
    ``open_reads`` is called once, within the first error check. A StorageError of one rank is a
    PeerError of the same class on the others.
    """
    began, limit_s = time.monotonic(), READING * options.timeout_s
    seconds: Seconds = defaultdict(float)
    alone = [(arrays[n], region, t) for n, region, t in targets if (n, region) not in plan.shared]

    def read_alone() -> BeginReads:
        with _timed(seconds, "reading"):
            begin = open_reads()
            run_reads(begin, alone, options, Deadline.after(limit_s))
        return begin

    begin = run_collectively(comm, read_alone)
    rounds = plan.rounds_of(comm.rank)
    targets_of: dict[int, list[Target]] = defaultdict(list)
    for target in targets:
        targets_of[target[0]].append(target)
    if rounds:
        _run_rounds(plan, rounds, arrays, targets_of, begin, comm, limit_s, seconds)
    batches = [batch for in_round in rounds for batch in in_round]
    nbytes = sum(region.numel * array.dtype.itemsize for array, region, _ in alone)
    total_s = time.monotonic() - began
    return BroadcastReport(
        num_tensors=len(targets),
        filled_nbytes=sum(region.numel * arrays[n].dtype.itemsize for n, region, _ in targets),
        read_nbytes=nbytes + sum(b.content_nbytes for b in batches if b.reader == comm.rank),
        received_nbytes=sum(b.content_nbytes for b in batches if b.reader != comm.rank),
        reading_s=seconds["reading"],
        sending_s=seconds["sending"],
        copying_s=seconds["copying"],
        waiting_s=total_s - sum(seconds.values()),
        seconds=total_s,
    )


@contextmanager
def _timed(seconds: Seconds, stage: str) -> Iterator[None]:
    """Add the seconds of a block to those of a stage."""
    began = time.monotonic()
    try:
        yield
    finally:
        seconds[stage] += time.monotonic() - began


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
    """A round on this rank: slices that it reads, reads once another rank has, and receives."""

    read: list[_Block] = field(default_factory=list)
    cached: list[_Block] = field(default_factory=list)
    received: list[_Block] = field(default_factory=list)
    sends: list[Parcel] = field(default_factory=list)
    receives: list[Parcel] = field(default_factory=list)


def _run_rounds(  # noqa: PLR0913, PLR0917
    plan: GroupPlan,
    rounds: Sequence[Sequence[Batch]],
    arrays: Sequence[ArraySpec],
    targets_of: Mapping[int, Sequence[Target]],
    begin: BeginReads,
    comm: Communicator,
    limit_s: float,
    seconds: Seconds,
) -> None:
    """Read and send the rounds; while one is sent the next ones are being read. Collective."""
    unread = iter(rounds)
    reading: deque[tuple[_Round, Transfer]] = deque()
    sending: list[tuple[_Round, Callable[[], None]]] = []  # at most one

    def step() -> None:
        # 1. The round before has been read by its readers on all ranks, and is being sent.
        if sending:
            _put_in_place(*sending.pop(), begin, limit_s, seconds)
        # 2. Its memory is free: begin to read further rounds.
        for batches in islice(unread, ROUNDS_IN_FLIGHT - len(reading)):
            round_ = _laid_out(batches, plan, arrays, targets_of, comm)
            reading.append((round_, _begin_reads(begin, round_.read)))
        # 3. Have this rank's part of the next round ready to be sent.
        if reading:
            _await_own_reads(*reading[0], limit_s, seconds)

    try:
        for _ in range(len(rounds) + 1):
            run_collectively(comm, step)
            if reading:
                round_, _ = reading.popleft()
                sending.append((round_, comm.begin_exchange(round_.sends, round_.receives)))
    finally:
        for _, transfer in reading:  # after a failure: they use memory that is about to be freed
            with suppress(CheckpointError):
                transfer.wait(limit_s)


def _await_own_reads(round_: _Round, transfer: Transfer, limit_s: float, seconds: Seconds) -> None:
    with _timed(seconds, "reading"):
        transfer.wait(limit_s)
    with _timed(seconds, "copying"):
        staged = [block for block in round_.read if block.host is not block.memory]
        copy_into([block.memory for block in staged], [block.host for block in staged])


def _put_in_place(
    round_: _Round,
    await_messages: Callable[[], None],
    begin: BeginReads,
    limit_s: float,
    seconds: Seconds,
) -> None:
    """Wait for what is sent, read what a rank of this host has read, and fill the tensors."""
    cached = Transfer((), 0)
    try:
        cached = _begin_reads(begin, round_.cached)
    finally:  # whatever fails: messages and reads use memory that is about to be freed
        try:
            with _timed(seconds, "sending"):
                await_messages()
        finally:
            with _timed(seconds, "reading"):
                cached.wait(limit_s)
    blocks = [*round_.read, *round_.cached, *round_.received]
    with _timed(seconds, "copying"):
        copy_into(
            [tensor for block in blocks for tensor in block.copies],
            [block.memory for block in blocks for _ in block.copies],
        )


def _begin_reads(begin: BeginReads, blocks: Sequence[_Block]) -> Transfer:
    return begin([ArrayRead(b.array, b.region, host_view(b.host)) for b in blocks])


def _laid_out(
    batches: Sequence[Batch],
    plan: GroupPlan,
    arrays: Sequence[ArraySpec],
    targets_of: Mapping[int, Sequence[Target]],
    comm: Communicator,
) -> _Round:
    """Memory for a round: a message of several slices has a buffer, others the tensors' own."""
    round_ = _Round()
    for batch in batches:
        receivers = plan.receivers(batch)
        is_read = batch.reader == comm.rank
        is_message = bool(receivers) if is_read else comm.rank in receivers
        is_packed = is_message and len(batch.slices) > 1
        message = _buffer(batch.nbytes, comm.device) if is_packed else None
        is_staged = is_read and comm.device.type != "cpu"  # page caches are shared on hosts alone
        host = host_memory(batch.nbytes, is_pinned=True) if is_staged else None
        blocks = []
        for each, start in zip(batch.slices, batch.starts, strict=True):
            array, copies = arrays[each.array], _views(each, targets_of[each.array])
            if message is None:
                memory = _direct(each, array, copies, comm.device)
            else:
                memory = _typed(message[start : start + each.nbytes], each, array)
            read_to = memory if host is None else _typed(host[start:][: each.nbytes], each, array)
            blocks.append(_Block(array, each.region, memory, read_to, copies))
        content = as_bytes(blocks[0].memory) if message is None else message
        if is_read:
            round_.read += blocks
            round_.sends += [(receiver, content) for receiver in receivers]
        elif is_message:
            round_.received += blocks
            round_.receives.append((batch.reader, content))
        else:
            round_.cached += blocks
    return round_


def _views(each: Slice, targets: Sequence[Target]) -> list[torch.Tensor]:
    """The parts of this rank's tensors that a slice fills."""
    return [
        tensor.detach()[each.region.within(region).slices()]
        for _, region, tensor in targets
        if region.contains(each.region)
    ]


def _direct(
    each: Slice, array: ArraySpec, copies: list[torch.Tensor], device: torch.device
) -> torch.Tensor:
    """The first of ``copies`` that can be filled directly, taken from them; else a buffer."""
    for number, tensor in enumerate(copies):
        is_there = tensor.device.type == device.type and device.index in {None, tensor.device.index}
        if is_there and tensor.dtype == torch_dtype(array.dtype) and is_in_order(tensor):
            return copies.pop(number)
    return _typed(_buffer(each.nbytes, device), each, array)


def _buffer(nbytes: int, device: torch.device) -> torch.Tensor:
    """Uninitialised bytes on the device; pinned on the host, where this process uses CUDA."""
    if device.type == "cpu":
        return host_memory(nbytes, is_pinned=uses_cuda())
    return torch.empty(nbytes, dtype=torch.uint8, device=device)


def _typed(content: torch.Tensor, each: Slice, array: ArraySpec) -> torch.Tensor:
    """The bytes of a slice as elements of its dtype, in its shape."""
    return content.view(torch_dtype(array.dtype)).reshape(each.region.shape)
