"""Decide who reads which box of which array, once for a group of ranks, and to whom it goes."""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from dist_ckpt_strategies.errors import PlanError
from dist_ckpt_strategies.plan.spans import raw_spans
from dist_ckpt_strategies.spec.array import ArraySpec
from dist_ckpt_strategies.spec.region import Region

MAX_PIECE_NBYTES = 64 << 20
"""A larger box is read and sent in parts, so that several ranks can share the reading."""

MIN_PIECE_NBYTES = 64 << 10
"""A box is not cut into smaller parts than this: each costs a read and a message."""

MAX_PACKED_NBYTES = 16 << 20
"""Small boxes travel together, up to this: a message of 64 KiB takes gloo as long as 1 MiB."""

MAX_SMALL_NBYTES = 1 << 20
"""Boxes below this are copied into a message with others; larger ones go without a copy."""

_PIECES_PER_RANK = 16
_ALIGNMENT = 16
_NUM_IN_FLIGHT = 3
"""Rounds that take memory at a time: one being read, one being sent, one being put in place."""

_MIN_ROUNDS = 6
"""So that reading one round hides behind sending another."""


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """A box of a stored array that some rank wants: what is in storage, read whole."""

    key: str
    region: Region


@dataclass(frozen=True, slots=True)
class Delivery:
    """A part of a box, read by one rank and sent to those that want it.

    Attributes:
        array: the stored array.
        box: the wanted box that this is a part of.
        region: the part, in coordinates of the array.
        reader: the rank that reads it, counted in the group.
        receivers: the ranks that it is sent to, sorted; the reader is never among them.
    """

    array: ArraySpec
    box: Box
    region: Region
    reader: int
    receivers: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes that are read, and sent to each receiver."""
        return self.region.numel * self.array.dtype.itemsize

    def concerns(self, rank: int) -> bool:
        """Whether the rank reads or receives it."""
        return rank == self.reader or rank in self.receivers


@dataclass(frozen=True, slots=True)
class Message:
    """Deliveries that one rank sends to the same ranks in one go, one behind the other."""

    deliveries: tuple[Delivery, ...]

    @property
    def reader(self) -> int:
        """Who sends it."""
        return self.deliveries[0].reader

    @property
    def receivers(self) -> tuple[int, ...]:
        """Who gets it; nobody where only the reader wants it."""
        return self.deliveries[0].receivers

    @property
    def nbytes(self) -> int:
        """Bytes on the wire, to each receiver; with the gaps that keep every delivery aligned."""
        return self.starts[-1] + self.deliveries[-1].nbytes

    @property
    def starts(self) -> tuple[int, ...]:
        """Byte offset of each delivery within the message."""
        found = [0]
        for delivery in self.deliveries[:-1]:
            found.append(-(-(found[-1] + delivery.nbytes) // _ALIGNMENT) * _ALIGNMENT)
        return tuple(found)


@dataclass(frozen=True, slots=True)
class BroadcastPlan:
    """What a group of ranks reads and sends, the same on every rank of it.

    Attributes:
        rounds: messages that are read together and then sent together.
    """

    rounds: tuple[tuple[Message, ...], ...]

    @property
    def deliveries(self) -> Iterator[Delivery]:
        """Every delivery, in order."""
        return (d for messages in self.rounds for message in messages for d in message.deliveries)

    def read_nbytes(self, rank: int) -> int:
        """Bytes that a rank reads from storage."""
        return sum(d.nbytes for d in self.deliveries if d.reader == rank)


def build_broadcast_plan(
    wants: Sequence[Iterable[Box]],
    arrays: Mapping[str, ArraySpec],
    *,
    max_inflight_bytes: int,
) -> BroadcastPlan:
    """Give every wanted box one reader, so that all ranks read about the same.

    Boxes are compared as a whole: two that overlap and are not equal are read separately. Larger
    boxes come first and go to a rank that wants them while that rank has read less than its share,
    else to the rank that has read least.

    Args:
        wants: for each rank of the group, in its order, the boxes that it wants; each lies inside
            its array and has an element. The same box may come several times.
        arrays: the stored array of each key.
        max_inflight_bytes: bound, per rank, on the bytes that are read and received in the rounds
            under way at a time; a single larger delivery has a round of its own.

    Raises:
        PlanError: a box does not lie inside its array, or ``arrays`` lacks its key.
    """
    num_ranks = len(wants)
    wanted_by: dict[Box, list[int]] = defaultdict(list)
    for rank, boxes in enumerate(wants):
        for box in dict.fromkeys(boxes):
            wanted_by[box].append(rank)
    _require_stored(wanted_by, arrays)
    pieces = _pieces(wanted_by, arrays, num_ranks)
    deliveries = _assigned(pieces, wanted_by, num_ranks)
    return BroadcastPlan(tuple(_rounds(deliveries, num_ranks, max_inflight_bytes)))


def _require_stored(boxes: Iterable[Box], arrays: Mapping[str, ArraySpec]) -> None:
    for box in boxes:
        array = arrays.get(box.key)
        if array is None:
            raise PlanError(f"{box.key}: no array of that key was looked up", key=box.key)
        if not (box.region.numel and Region.whole(array.shape).contains(box.region)):
            raise PlanError(
                f"{box.key}: {box.region} is not a part of the array's shape {array.shape}",
                key=box.key,
            )


@dataclass(frozen=True, slots=True)
class _Piece:
    array: ArraySpec
    box: Box
    region: Region

    @property
    def nbytes(self) -> int:
        return self.region.numel * self.array.dtype.itemsize


def _pieces(boxes: Iterable[Box], arrays: Mapping[str, ArraySpec], num_ranks: int) -> list[_Piece]:
    """The boxes, large ones cut, the largest first."""
    total = sum(box.region.numel * arrays[box.key].dtype.itemsize for box in boxes)
    share = total // (num_ranks * _PIECES_PER_RANK)
    limit = min(MAX_PIECE_NBYTES, max(MIN_PIECE_NBYTES, share))
    pieces = [
        _Piece(arrays[box.key], box, region)
        for box in boxes
        for region in _cut(arrays[box.key], box.region, limit)
    ]
    return sorted(pieces, key=lambda piece: (-piece.nbytes, piece.box, piece.region))


def _cut(array: ArraySpec, region: Region, limit_nbytes: int) -> Iterator[Region]:
    """The region in slabs along its first dim that has any extent.

    Only where each slab is read on its own at no extra cost: from raw chunks, in long runs.
    """
    nbytes = region.numel * array.dtype.itemsize
    dim = next((d for d, extent in enumerate(region.shape) if extent > 1), None)
    if nbytes <= limit_nbytes or dim is None or raw_spans(array, region) is None:
        yield region
        return
    extent = region.shape[dim]
    num_slabs = min(extent, -(-nbytes // limit_nbytes))
    for number in range(num_slabs):
        start, stop = (extent * n // num_slabs for n in (number, number + 1))
        offset = (*region.offset[:dim], region.offset[dim] + start, *region.offset[dim + 1 :])
        yield Region(offset, (*region.shape[:dim], stop - start, *region.shape[dim + 1 :]))


def _assigned(
    pieces: Sequence[_Piece], wanted_by: Mapping[Box, Sequence[int]], num_ranks: int
) -> list[Delivery]:
    """Every piece with its reader; the pieces come largest first."""
    load = [0] * num_ranks
    least = [(0, rank) for rank in range(num_ranks)]
    share = math.ceil(sum(piece.nbytes for piece in pieces) / num_ranks)
    found = []
    for piece in pieces:
        wanting = wanted_by[piece.box]
        reader = min(wanting, key=lambda rank: (load[rank], rank))
        if load[reader] + piece.nbytes > share:
            reader = _least_loaded(least, load)
        load[reader] += piece.nbytes
        heapq.heappush(least, (load[reader], reader))
        receivers = tuple(rank for rank in wanting if rank != reader)
        found.append(Delivery(piece.array, piece.box, piece.region, reader, receivers))
    return found


def _least_loaded(heap: list[tuple[int, int]], load: Sequence[int]) -> int:
    """The rank that has read least; entries that are out of date are dropped on the way."""
    while load[heap[0][1]] != heap[0][0]:
        heapq.heappop(heap)
    return heap[0][1]


def _rounds(
    deliveries: Sequence[Delivery], num_ranks: int, budget_nbytes: int
) -> Iterator[tuple[Message, ...]]:
    """Messages in rounds; in each, every rank reads about the same, within the memory bound."""
    queues: list[list[Message]] = [[] for _ in range(num_ranks)]
    for message in _messages(deliveries):
        queues[message.reader].append(message)
    most = max((sum(m.nbytes for m in queue) for queue in queues), default=0)
    per_round = max(1, min(budget_nbytes // (_NUM_IN_FLIGHT * num_ranks), -(-most // _MIN_ROUNDS)))
    shares = [list(_shares(queue, per_round)) for queue in queues]
    for number in range(max(map(len, shares), default=0)):
        yield tuple(m for share in shares if number < len(share) for m in share[number])


def _shares(queue: Sequence[Message], limit_nbytes: int) -> Iterator[list[Message]]:
    """One reader's messages, cut where they exceed the limit; a larger one goes alone."""
    share: list[Message] = []
    held = 0
    for message in queue:
        if share and held + message.nbytes > limit_nbytes:
            yield share
            share, held = [], 0
        share.append(message)
        held += message.nbytes
    if share:
        yield share


def _messages(deliveries: Sequence[Delivery]) -> Iterator[Message]:
    """Large deliveries alone, small ones packed by sender and receivers."""
    small: dict[tuple[int, tuple[int, ...]], list[Delivery]] = defaultdict(list)
    for delivery in deliveries:
        if delivery.nbytes >= MAX_SMALL_NBYTES:
            yield Message((delivery,))
        else:
            small[delivery.reader, delivery.receivers].append(delivery)
    for packed in small.values():
        for share in _shares([Message((d,)) for d in packed], MAX_PACKED_NBYTES):
            yield Message(tuple(message.deliveries[0] for message in share))
