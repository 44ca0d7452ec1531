"""Decide who reads which box of which array, once for a group of ranks, and to whom it goes."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from dist_ckpt_strategies.errors import PlanError
from dist_ckpt_strategies.plan.bundles import Bundle, build_bundles
from dist_ckpt_strategies.plan.pieces import disjoint_pieces, distinct_pieces, small_pieces
from dist_ckpt_strategies.spec.array import ArraySpec
from dist_ckpt_strategies.spec.box import Box, BoxTable
from dist_ckpt_strategies.spec.region import Region

MAX_BUNDLE_NBYTES = 64 << 20
"""What one rank reads and sends in one go, unless a single box that cannot be cut is larger."""

MIN_BUNDLE_NBYTES = 4 << 10
"""A box is not cut into smaller parts than this: each costs a read and a message."""

MAX_PACKED_NBYTES = 16 << 20
"""Small boxes travel together, up to this: a message of 64 KiB takes gloo as long as 1 MiB."""

MAX_SMALL_NBYTES = 1 << 20
"""Boxes below this are copied into a message with others; larger ones go without a copy."""

_MIN_SHARED_NBYTES = 1 << 20
"""In groups so large that a round has not room for a bundle of every rank: no smaller than this."""

_BUNDLES_PER_RANK = 24
"""So many even out what the ranks read to a few percent."""

_ALIGNMENT = 16
_NUM_IN_FLIGHT = 3
"""Rounds that take memory at a time: one being read, one being sent, one being put in place."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """A box that one rank reads and sends to those that want it, or something around it.

    Attributes:
        array: the stored array.
        box: what is read.
        reader: the rank that reads it, counted in the group.
        audience: the ranks that want it, sorted; the reader may be one of them.
    """

    array: ArraySpec
    box: Box
    reader: int
    audience: tuple[int, ...]

    @property
    def receivers(self) -> tuple[int, ...]:
        """The ranks that it is sent to, sorted."""
        return tuple(rank for rank in self.audience if rank != self.reader)

    @property
    def region(self) -> Region:
        """What is read, in coordinates of the array."""
        return self.box.region

    @property
    def nbytes(self) -> int:
        """Bytes that are read, and sent to each receiver."""
        return self.box.nbytes


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


Rounds = tuple[tuple[Message, ...], ...]
"""Messages that are read together and then sent together, round by round."""


@dataclass(frozen=True, slots=True, eq=False)
class BroadcastPlan:
    """What a group of ranks reads and sends, the same on every rank of it.

    Attributes:
        boxes: all that is read; no two of them are equal.
        audiences: sets of ranks that want the same, each sorted.
        bundles: who reads what for whom, and when; by round.
        num_ranks: ranks in the group.
    """

    boxes: BoxTable
    audiences: tuple[tuple[int, ...], ...]
    bundles: tuple[Bundle, ...]
    num_ranks: int

    @property
    def num_rounds(self) -> int:
        """Rounds, on every rank."""
        return self.bundles[-1].round + 1 if self.bundles else 0

    def read_nbytes(self) -> tuple[int, ...]:
        """Bytes that each rank reads from storage."""
        found = [0] * self.num_ranks
        for bundle in self.bundles:
            found[bundle.reader] += bundle.nbytes
        return tuple(found)

    def read_by(self, rank: int) -> Iterator[Box]:
        """The boxes that one rank reads."""
        for bundle in self.bundles:
            if bundle.reader == rank:
                yield from self.boxes.at(slice(bundle.first, bundle.stop))

    def rounds_of(self, rank: int, arrays: Sequence[ArraySpec]) -> Rounds:
        """What one rank reads, sends and receives.

        Args:
            rank: counted in the group.
            arrays: those that the plan was made for; only those that concern the rank are taken.

        Raises:
            PlanError: a box that some rank asks for does not lie inside its array.
        """
        wanting = [_has(audience, rank) for audience in self.audiences]
        rounds: list[list[Message]] = [[] for _ in range(self.num_rounds)]
        for bundle in self.bundles:
            if bundle.reader == rank or wanting[bundle.audience]:
                rounds[bundle.round].extend(_messages(self._deliveries(bundle, arrays)))
        return tuple(map(tuple, rounds))

    def _deliveries(self, bundle: Bundle, arrays: Sequence[ArraySpec]) -> Iterator[Delivery]:
        for box in self.boxes.at(slice(bundle.first, bundle.stop)):
            array = arrays[box.array]
            _require_inside(box, array)
            yield Delivery(array, box, bundle.reader, self.audiences[bundle.audience])

    def _content(self) -> tuple[object, ...]:
        return self.boxes.to_bytes(), self.audiences, self.bundles, self.num_ranks

    def __eq__(self, other: object) -> bool:
        """Whether the other is the same plan."""
        return isinstance(other, BroadcastPlan) and self._content() == other._content()

    def __hash__(self) -> int:
        """Equal for equal plans."""
        return hash(self._content())


def build_broadcast_plan(
    wants: Sequence[BoxTable],
    arrays: Sequence[ArraySpec],
    *,
    max_inflight_bytes: int,
    is_cut: bool = True,
) -> BroadcastPlan:
    """Give every wanted element one reader, so that all ranks read about the same.

    Small boxes that the same ranks want are kept together, and large ones cut.

    Args:
        wants: for each rank of the group, in its order, the boxes that it wants.
        arrays: the stored arrays, by the numbers in the tables.
        max_inflight_bytes: bound, per rank, on the bytes that are read and received in the rounds
            under way at a time; a single larger box has a round of its own.
        is_cut: whether a box may be read in parts, by several ranks: large ones, and those that
            overlap others. Otherwise all are read whole, and what overlaps is read twice.

    Memory: some ten times the distinct tables; 0.5 GB for a million boxes.
    """
    num_ranks = len(wants)
    pieces = distinct_pieces(wants)
    round_nbytes = max_inflight_bytes // _NUM_IN_FLIGHT
    share = int(pieces.boxes.nbytes.sum()) // num_ranks
    limit = max(MIN_BUNDLE_NBYTES, share // _BUNDLES_PER_RANK)
    limit = min(limit, MAX_BUNDLE_NBYTES, max(_MIN_SHARED_NBYTES, round_nbytes // num_ranks))
    if is_cut:
        pieces = small_pieces(disjoint_pieces(pieces), arrays, limit)
    pieces = pieces.by_audience(MAX_SMALL_NBYTES)
    bundles = build_bundles(pieces, num_ranks, bundle_nbytes=limit, round_nbytes=round_nbytes)
    return BroadcastPlan(pieces.boxes, tuple(pieces.audiences), tuple(bundles), num_ranks)


def _has(audience: Sequence[int], rank: int) -> bool:
    at = bisect.bisect_left(audience, rank)
    return at < len(audience) and audience[at] == rank


def _require_inside(box: Box, array: ArraySpec) -> None:
    fits = box.region.ndim == len(array.shape) and box.itemsize == array.dtype.itemsize
    if not (fits and box.region.numel and Region.whole(array.shape).contains(box.region)):
        raise PlanError(
            f"{array.key}: {box.region} of elements of {box.itemsize} bytes is not a part of an "
            f"array of shape {array.shape} and dtype {array.dtype}",
            key=array.key,
        )


def _messages(deliveries: Iterable[Delivery]) -> Iterator[Message]:
    """Large deliveries alone, small ones packed."""
    packed: list[Delivery] = []
    nbytes = 0
    for delivery in deliveries:
        if delivery.nbytes >= MAX_SMALL_NBYTES:
            yield Message((delivery,))
            continue
        if packed and nbytes + delivery.nbytes > MAX_PACKED_NBYTES:
            yield Message(tuple(packed))
            packed, nbytes = [], 0
        packed.append(delivery)
        nbytes += delivery.nbytes + _ALIGNMENT
    if packed:
        yield Message(tuple(packed))
