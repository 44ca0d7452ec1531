"""Carry out a BroadcastPlan: while one round travels between the ranks, the next ones are read."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch

from dist_ckpt_strategies.comm.agree import agree
from dist_ckpt_strategies.comm.base import Communicator, Exchange, Receive, Send
from dist_ckpt_strategies.config import Options
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
from dist_ckpt_strategies.plan.broadcast import BroadcastPlan, Delivery, Message, Rounds
from dist_ckpt_strategies.plan.spans import stored_nbytes
from dist_ckpt_strategies.run.report import BroadcastReport
from dist_ckpt_strategies.spec.array import ArraySpec
from dist_ckpt_strategies.spec.box import Box
from dist_ckpt_strategies.storage.base import ArrayRead, ArrayReader, Transfer

_NUM_BEGUN = 2
"""Rounds that are being read, or copied to the device, while one is sent."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class BoxTarget:
    """A tensor, of any strides and on any device, to be filled with a box of an array."""

    box: Box
    tensor: torch.Tensor


Targets = Mapping[int, Sequence[BoxTarget]]
"""A rank's targets, by the number of their array."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a delivery lands on this rank, and the tensors to copy it to from there.

    Where it lands in the tensor itself, nothing is left to copy.
    """

    delivery: Delivery
    memory: torch.Tensor
    copies: tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class _Parcel:
    """A message with the memory that it is sent from, or received into, on this rank.

    Attributes:
        message: what is in it.
        content: its bytes, on the communicator's device.
        places: where each delivery is, within the content.
        host: the same bytes on the host, where the reader reads them; the content itself if that
            is on the host.
    """

    message: Message
    content: torch.Tensor
    places: tuple[_Place, ...]
    host: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Round:
    parcels: tuple[_Parcel, ...]
    reading: Transfer


def run_broadcast(
    plan: BroadcastPlan,
    arrays: Sequence[ArraySpec],
    targets: Sequence[BoxTarget],
    store: ArrayReader,
    comm: Communicator,
    options: Options,
) -> BroadcastReport:
    """Fill every tensor; each box of the plan leaves storage once for all ranks of ``comm``.

    Collective: every rank of ``comm`` calls this with an equal plan, and either every rank returns
    or every rank raises. One meeting for each round, and two more. Contiguous tensors on the
    communicator's device are received into directly, and on the host read into directly.

    Args:
        plan: what is read by whom, and sent to whom.
        arrays: those that the plan was made for.
        targets: this rank's tensors, each of the shape and dtype of its box. Overwritten in place;
            after an error their content is undefined.
        store: where the arrays are.
        comm: the group that the plan was made for.
        options: timeout; the plan bounds the memory.

    Raises:
        PlanError, StorageError: on the rank that met it; PeerError of the same class elsewhere.
    """
    started = time.monotonic()
    clock = _Clock()
    rounds = agree(comm, lambda: plan.rounds_of(comm.rank, arrays))
    with _reading_ahead(rounds, targets, store, comm, options) as begun:
        sent = _Sent((), None)
        for _ in range(plan.num_rounds):
            parcels = clock.meeting(comm, partial(_turn, begun, sent, clock, options))
            with clock.on("sending"):
                sent = _send(parcels, comm)
        clock.meeting(comm, partial(sent.finish, clock))
    own = [delivery for messages in rounds for m in messages for delivery in m.deliveries]
    return BroadcastReport(
        num_tensors=len(targets),
        filled_nbytes=sum(target.box.nbytes for target in targets),
        read_nbytes=sum(stored_nbytes(d.array, d.region) for d in own if d.reader == comm.rank),
        received_nbytes=sum(d.nbytes for d in own if d.reader != comm.rank),
        reading_s=clock.seconds["reading"],
        sending_s=clock.seconds["sending"],
        copying_s=clock.seconds["copying"],
        meeting_s=clock.seconds["meeting"],
        seconds=time.monotonic() - started,
    )


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

    def meeting(self, comm: Communicator, step: Callable[[], T]) -> T:
        """Agree on a step; what it does not take itself is waiting for the others. Collective."""
        before = sum(self.seconds.values())
        began = time.monotonic()
        result = agree(comm, step)
        inside = sum(self.seconds.values()) - before
        self.seconds["meeting"] += time.monotonic() - began - inside
        return result


@dataclass(frozen=True, slots=True)
class _Sent:
    """A round that is travelling."""

    parcels: tuple[_Parcel, ...]
    exchange: Exchange | None

    def finish(self, clock: _Clock) -> None:
        """Wait for it, and copy to its tensors what did not land in them."""
        if self.exchange is None:
            return
        with clock.on("sending"):
            self.exchange.wait()
        places = [place for parcel in self.parcels for place in parcel.places]
        with clock.on("copying"):
            copy_into(
                [tensor for place in places for tensor in place.copies],
                [place.memory for place in places for _ in place.copies],
            )


def _turn(begun: _Rounds, sent: _Sent, clock: _Clock, options: Options) -> tuple[_Parcel, ...]:
    """The next round, ready to be sent; the one before has arrived then."""
    try:
        round_ = begun.next()
        with clock.on("reading"):
            round_.reading.wait(options.timeout_s)
        uploads = _begin_uploads(round_)
    except Exception:
        sent.finish(clock)  # its memory is about to be freed
        raise
    sent.finish(clock)
    with clock.on("copying"):
        uploads.wait()
    return round_.parcels


class _Rounds:
    """This rank's rounds, begun ahead of their use."""

    def __init__(
        self, rounds: Rounds, targets: Targets, store: ArrayReader, comm: Communicator
    ) -> None:
        self._waiting = deque(rounds)
        self._begun: deque[_Round] = deque()
        self._targets = targets
        self._store = store
        self._rank = comm.rank
        self._device = comm.device

    def next(self) -> _Round:
        """The next round, which may still be read; those after it are begun."""
        while self._waiting and len(self._begun) < _NUM_BEGUN:
            self._begun.append(self._begin(self._waiting.popleft()))
        return self._begun.popleft()

    def abandon(self, timeout_s: float) -> None:
        """Wait for the reads under way, which use memory that is about to be freed."""
        while self._begun:
            _settle(self._begun.popleft().reading, timeout_s)

    def _begin(self, messages: Sequence[Message]) -> _Round:
        parcels = tuple(_parcel(m, self._targets, self._rank, self._device) for m in messages)
        reads = [
            ArrayRead(place.delivery.array, place.delivery.region, host_view(on_host))
            for parcel in parcels
            if parcel.message.reader == self._rank
            for place, on_host in zip(parcel.places, _on_host(parcel), strict=True)
        ]
        return _Round(parcels, self._store.begin_reads(reads))


@contextmanager
def _reading_ahead(
    rounds: Rounds,
    targets: Sequence[BoxTarget],
    store: ArrayReader,
    comm: Communicator,
    options: Options,
) -> Iterator[_Rounds]:
    by_array: dict[int, list[BoxTarget]] = defaultdict(list)
    for target in targets:
        by_array[target.box.array].append(target)
    begun = _Rounds(rounds, by_array, store, comm)
    try:
        yield begun
    finally:
        begun.abandon(options.timeout_s)


def _settle(reading: Transfer, timeout_s: float) -> None:
    """Wait for a read whose outcome no longer matters: an earlier failure is being raised."""
    try:
        reading.wait(timeout_s)
    except CheckpointError:
        return


def _parcel(message: Message, targets: Targets, rank: int, device: torch.device) -> _Parcel:
    """Memory for a message: the tensor's own where it is alone and fits, else a buffer."""
    if len(message.deliveries) == 1:
        place = _own_place(message.deliveries[0], targets, device)
        content, places = as_bytes(place.memory), [place]
    else:
        content = _buffer(message.nbytes, device, targets)
        places = [
            _Place(delivery, _typed(content, start, delivery), tuple(_parts(delivery, targets)))
            for delivery, start in zip(message.deliveries, message.starts, strict=True)
        ]
    is_staged = message.reader == rank and content.device.type != "cpu"
    host = content
    if is_staged:
        host = torch.empty(content.shape, dtype=torch.uint8, pin_memory=True, device="cpu")
    return _Parcel(message, content, tuple(places), host)


def _own_place(delivery: Delivery, targets: Targets, device: torch.device) -> _Place:
    parts = list(_parts(delivery, targets))
    fitting = (n for n, part in enumerate(parts) if _lies_on(part, device) and is_in_order(part))
    direct = next(fitting, None)
    if direct is not None:
        memory = parts.pop(direct)
        return _Place(delivery, memory, tuple(parts))
    content = _buffer(delivery.nbytes, device, targets)
    return _Place(delivery, _typed(content, 0, delivery), tuple(parts))


def _lies_on(tensor: torch.Tensor, device: torch.device) -> bool:
    return tensor.device.type == device.type and device.index in {None, tensor.device.index}


def _parts(delivery: Delivery, targets: Targets) -> Iterator[torch.Tensor]:
    """The delivery's part of each of this rank's tensors that hold it."""
    for target in targets.get(delivery.box.array, ()):
        if target.box.region.contains(delivery.region):
            yield target.tensor.detach()[delivery.region.within(target.box.region).slices()]


def _buffer(nbytes: int, device: torch.device, targets: Targets) -> torch.Tensor:
    """Uninitialised bytes on a device; pinned on the host, where this rank's tensors are not."""
    some = next((target.tensor for of in targets.values() for target in of), None)
    pinned = device.type == "cpu" and some is not None and some.device.type == "cuda"
    return torch.empty(nbytes, dtype=torch.uint8, device=device, pin_memory=pinned)


def _typed(content: torch.Tensor, start: int, delivery: Delivery) -> torch.Tensor:
    """A part of the bytes as elements of the delivery's dtype, in its shape."""
    part = content[start : start + delivery.nbytes]
    return part.view(torch_dtype(delivery.array.dtype)).reshape(delivery.region.shape)


def _on_host(parcel: _Parcel) -> Iterator[torch.Tensor]:
    """Where each delivery of a parcel is read to."""
    for place, start in zip(parcel.places, parcel.message.starts, strict=True):
        is_there = parcel.host is parcel.content
        yield place.memory if is_there else _typed(parcel.host, start, place.delivery)


def _begin_uploads(round_: _Round) -> Copies:
    """Copy to the device what was read for it."""
    staged = [parcel for parcel in round_.parcels if parcel.host is not parcel.content]
    return begin_copies([parcel.content for parcel in staged], [parcel.host for parcel in staged])


def _send(parcels: tuple[_Parcel, ...], comm: Communicator) -> _Sent:
    """Begin to send what this rank has read, and to receive what it wants. Collective."""
    sends = [
        Send(rank, parcel.content)
        for parcel in parcels
        if parcel.message.reader == comm.rank
        for rank in parcel.message.receivers
    ]
    receives = [
        Receive(parcel.message.reader, parcel.content)
        for parcel in parcels
        if parcel.message.reader != comm.rank
    ]
    return _Sent(parcels, comm.begin_exchange(sends, receives))
