"""Which ranks send which parts of the shards that they hold to those that want others."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from dist_ckpt_strategies.errors import CoverageError, PlanError, ShapeMismatchError
from dist_ckpt_strategies.spec.dtype import DType
from dist_ckpt_strategies.spec.region import Extent, Region
from dist_ckpt_strategies.spec.shard import ShardId, ShardSpec


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a shard, from a rank that holds it to one that wants something around it.

    Attributes:
        source: the shard that is held.
        target: the shard that is wanted.
        region: what they share.
        dtype: of the elements.
        sender: who holds it, within the group.
        receiver: who wants it; may be the same.
    """

    source: ShardId
    target: ShardId
    region: Region
    dtype: DType
    sender: int
    receiver: int

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return self.region.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class ReshardPlan:
    """What moves where.

    Attributes:
        dtypes: element type of each array.
        local: pieces that stay on their rank.
        rounds: pieces that travel, in groups that bound what a rank sends and receives at once.
    """

    dtypes: Mapping[str, DType]
    local: tuple[Piece, ...]
    rounds: tuple[tuple[Piece, ...], ...]


def build_reshard_plan(
    held: Sequence[Sequence[ShardSpec]],
    wanted: Sequence[Sequence[ShardSpec]],
    *,
    max_inflight_bytes: int,
) -> ReshardPlan:
    """Cover every wanted shard by parts of held ones, from the rank itself if possible.

    Args:
        held: for each rank of the group what it holds; replicas are welcome.
        wanted: for each rank what it wants and does not hold as it is.
        max_inflight_bytes: bound, per rank and round, on what it sends and on what it receives; a
            larger piece has a round of its own.

    Raises:
        CoverageError: nobody holds a part of something that is wanted; names rank and key.
        ShapeMismatchError: an array is held with another shape than it is wanted with.
    """
    holders: defaultdict[str, defaultdict[Region, list[int]]] = defaultdict(
        lambda: defaultdict(list)
    )
    arrays: dict[str, tuple[Extent, DType]] = {}
    for rank, specs in enumerate(held):
        for spec in specs:
            array = (spec.array_shape, spec.dtype)
            if arrays.setdefault(spec.key, array) != array:
                raise PlanError(f"{spec.key}: ranks hold it as {arrays[spec.key]} and as {array}")
            if rank not in holders[spec.key][spec.region]:
                holders[spec.key][spec.region].append(rank)
    load: Counter[int] = Counter()
    pieces: list[Piece] = []
    for rank, specs in enumerate(wanted):
        for spec in sorted(specs, key=lambda spec: spec.id):
            _require_same_shape(spec, arrays, rank)
            pieces += _pieces(spec, holders[spec.key], arrays[spec.key][1], rank, load)
    local = tuple(piece for piece in pieces if piece.sender == piece.receiver)
    moving = [piece for piece in pieces if piece.sender != piece.receiver]
    dtypes = {key: dtype for key, (_, dtype) in sorted(arrays.items())}
    return ReshardPlan(dtypes, local, tuple(_rounds(moving, max_inflight_bytes)))


def _require_same_shape(
    spec: ShardSpec, arrays: Mapping[str, tuple[Extent, DType]], rank: int
) -> None:
    if spec.key not in arrays:
        raise CoverageError(
            f"{spec.key}: rank {rank} wants {spec.region}, but no part of the checkpoint has it",
            key=spec.key,
        )
    shape, _ = arrays[spec.key]
    if shape != spec.array_shape:
        raise ShapeMismatchError(
            f"{spec.key}: shape {shape} in the checkpoint, {spec.array_shape} requested by rank "
            f"{rank}",
            key=spec.key,
        )


def _pieces(
    spec: ShardSpec,
    holders: Mapping[Region, Sequence[int]],
    dtype: DType,
    rank: int,
    load: Counter[int],
) -> list[Piece]:
    """Parts of held shards that make up a wanted one: one held whole, else all that it meets."""
    exact = holders.get(spec.region)
    sources = [spec.region] if exact else sorted(holders)
    found = []
    for source in sources:
        shared = source.intersect(spec.region)
        if shared is None:
            continue
        able = holders[source]
        sender = rank if rank in able else min(able, key=lambda one: (load[one], one))
        piece = Piece(ShardId(spec.key, source), spec.id, shared, dtype, sender, rank)
        if sender != rank:
            load[sender] += piece.nbytes
        found.append(piece)
    covered = sum(piece.region.numel for piece in found)
    if covered != spec.region.numel:
        raise CoverageError(
            f"{spec.key}: rank {rank} wants {spec.region}, of {spec.region.numel} elements; the "
            f"parts of the checkpoint hold {covered} of them",
            key=spec.key,
        )
    return found


def _rounds(pieces: Iterable[Piece], bound: int) -> Iterable[tuple[Piece, ...]]:
    """The pieces in their order, cut wherever a rank's share would grow too large."""
    round_: list[Piece] = []
    sent: Counter[int] = Counter()
    received: Counter[int] = Counter()
    for piece in pieces:
        fullest = max(sent[piece.sender], received[piece.receiver]) + piece.nbytes
        if round_ and fullest > bound:
            yield tuple(round_)
            round_.clear()
            sent.clear()
            received.clear()
        round_.append(piece)
        sent[piece.sender] += piece.nbytes
        received[piece.receiver] += piece.nbytes
    if round_:
        yield tuple(round_)
