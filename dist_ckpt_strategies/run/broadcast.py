"""Carry out a BroadcastPlan: while one round travels between the ranks, the next ones are read."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from dist_ckpt_strategies.comm.agree import agree
from dist_ckpt_strategies.comm.base import Bytes, Communicator, Receive, Send
from dist_ckpt_strategies.config import Options
from dist_ckpt_strategies.device import (
    as_bytes,
    copy_into,
    host_buffer,
    host_view,
    is_host_readable,
)
from dist_ckpt_strategies.errors import CheckpointError
from dist_ckpt_strategies.plan.broadcast import Box, BroadcastPlan, Delivery, Message
from dist_ckpt_strategies.run.report import BroadcastReport
from dist_ckpt_strategies.storage.base import ArrayRead, ArrayStore, Transfer

_READ_AHEAD = 2
"""Rounds that are being read while one is sent."""


@dataclass(frozen=True, slots=True)
class BoxTarget:
    """A tensor, of any strides and on any device, to be filled with a box of an array."""

    box: Box
    tensor: torch.Tensor


Targets = Mapping[Box, Sequence[torch.Tensor]]


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a delivery lands on this rank: host memory, and the tensors to copy it to from there.

    Where it lands in the tensor itself, nothing is left to copy.
    """

    delivery: Delivery
    memory: torch.Tensor
    copies: tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class _Parcel:
    """A message with the memory that it is sent from, or received into, on this rank."""

    message: Message
    content: Bytes
    places: tuple[_Place, ...]


@dataclass(frozen=True, slots=True)
class _Round:
    parcels: tuple[_Parcel, ...]
    reading: Transfer


def run_broadcast(
    plan: BroadcastPlan,
    targets: Sequence[BoxTarget],
    store: ArrayStore,
    comm: Communicator,
    options: Options,
) -> BroadcastReport:
    """Fill every tensor; each box leaves storage once for all ranks of ``comm``.

    Collective: every rank of ``comm`` calls this with an equal plan, and either every rank returns
    or every rank raises. Contiguous CPU tensors are read and received into directly.

    Args:
        plan: what is read by whom, and sent to whom.
        targets: this rank's tensors, each of the shape and dtype of its box. Overwritten in place;
            after an error their content is undefined.
        store: where the arrays are.
        comm: the group that the plan was made for.
        options: timeout; the plan bounds the memory.

    Raises:
        StorageError: a read failed here; PeerError of the same class on the other ranks.
    """
    started = time.monotonic()
    by_box: dict[Box, list[torch.Tensor]] = defaultdict(list)
    for target in targets:
        by_box[target.box].append(target.tensor.detach())
    reading_s = sending_s = 0.0
    with _reading_ahead(plan, by_box, store, comm.rank, options) as rounds:
        for _ in plan.rounds:
            began = time.monotonic()
            round_ = agree(comm, lambda: _read_round(rounds, options))
            arrived = time.monotonic()
            _exchange(round_, comm)
            agree(comm, partial(_put_in_place, round_))
            reading_s += arrived - began
            sending_s += time.monotonic() - arrived
    return BroadcastReport(
        num_tensors=len(targets),
        read_nbytes=plan.read_nbytes(comm.rank),
        received_nbytes=sum(d.nbytes for d in plan.deliveries if comm.rank in d.receivers),
        reading_s=reading_s,
        sending_s=sending_s,
        seconds=time.monotonic() - started,
    )


class _Rounds:
    """This rank's rounds, begun ahead of their use."""

    def __init__(self, plan: BroadcastPlan, targets: Targets, store: ArrayStore, rank: int) -> None:
        self._waiting = deque(plan.rounds)
        self._begun: deque[_Round] = deque()
        self._targets = targets
        self._store = store
        self._rank = rank

    def next(self) -> _Round:
        """The next round, which may still be read; those after it are begun."""
        while self._waiting and len(self._begun) <= _READ_AHEAD:
            self._begun.append(self._begin(self._waiting.popleft()))
        return self._begun.popleft()

    def abandon(self, timeout_s: float) -> None:
        """Wait for the reads under way, which use memory that is about to be freed."""
        while self._begun:
            _settle(self._begun.popleft().reading, timeout_s)

    def _begin(self, messages: Sequence[Message]) -> _Round:
        parcels = tuple(
            _parcel(message, self._targets)
            for message in messages
            if self._rank == message.reader or self._rank in message.receivers
        )
        reads = [
            ArrayRead(place.delivery.array, place.delivery.region, host_view(place.memory))
            for parcel in parcels
            if parcel.message.reader == self._rank
            for place in parcel.places
        ]
        return _Round(parcels, self._store.begin_reads(reads))


@contextmanager
def _reading_ahead(
    plan: BroadcastPlan, targets: Targets, store: ArrayStore, rank: int, options: Options
) -> Iterator[_Rounds]:
    rounds = _Rounds(plan, targets, store, rank)
    try:
        yield rounds
    finally:
        rounds.abandon(options.timeout_s)


def _settle(reading: Transfer, timeout_s: float) -> None:
    """Wait for a read whose outcome no longer matters: an earlier failure is being raised."""
    try:
        reading.wait(timeout_s)
    except CheckpointError:
        return


def _read_round(rounds: _Rounds, options: Options) -> _Round:
    round_ = rounds.next()
    round_.reading.wait(options.timeout_s)
    return round_


def _parcel(message: Message, targets: Targets) -> _Parcel:
    """Memory for a message: the tensor's own where it is alone and fits, else a buffer."""
    if len(message.deliveries) == 1:
        place = _own_place(message.deliveries[0], targets)
        return _Parcel(message, as_bytes(host_view(place.memory)), (place,))
    packed = torch.empty(message.nbytes, dtype=torch.uint8)
    places = []
    for delivery, start in zip(message.deliveries, message.starts, strict=True):
        memory = _typed(packed[start : start + delivery.nbytes], delivery)
        places.append(_Place(delivery, memory, tuple(_parts(delivery, targets))))
    return _Parcel(message, packed.numpy(), tuple(places))


def _own_place(delivery: Delivery, targets: Targets) -> _Place:
    parts = list(_parts(delivery, targets))
    direct = next((number for number, part in enumerate(parts) if is_host_readable(part)), None)
    if direct is not None:
        memory = parts.pop(direct)
        return _Place(delivery, memory, tuple(parts))
    shape, dtype = delivery.region.shape, delivery.array.dtype
    like = parts[0] if parts else torch.empty(0)
    return _Place(delivery, host_buffer(shape, dtype, like=like), tuple(parts))


def _parts(delivery: Delivery, targets: Targets) -> Iterator[torch.Tensor]:
    """The delivery's part of each of this rank's tensors that hold its box."""
    slices = delivery.region.within(delivery.box.region).slices()
    return (tensor[slices] for tensor in targets.get(delivery.box, ()))


def _typed(content: torch.Tensor, delivery: Delivery) -> torch.Tensor:
    """The bytes as elements of the delivery's dtype, in its shape."""
    dtype: torch.dtype = getattr(torch, delivery.array.dtype.value)
    return content.view(dtype).reshape(delivery.region.shape)


def _exchange(round_: _Round, comm: Communicator) -> None:
    """Send what this rank has read, receive what it wants. Collective."""
    sends = [
        Send(rank, parcel.content)
        for parcel in round_.parcels
        if parcel.message.reader == comm.rank
        for rank in parcel.message.receivers
    ]
    receives = [
        Receive(parcel.message.reader, parcel.content)
        for parcel in round_.parcels
        if parcel.message.reader != comm.rank
    ]
    comm.exchange(sends, receives)


def _put_in_place(round_: _Round) -> None:
    """Copy what did not land in its tensor itself."""
    pairs = [
        (tensor, place.memory)
        for parcel in round_.parcels
        for place in parcel.places
        for tensor in place.copies
    ]
    copy_into([tensor for tensor, _ in pairs], [memory for _, memory in pairs])
