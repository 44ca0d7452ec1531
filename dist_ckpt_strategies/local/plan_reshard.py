"""Which ranks send which parts of the shards that they hold to those that want others."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dist_ckpt_strategies.core.array import DType, Region, Shape, ShardId, ShardSpec
from dist_ckpt_strategies.errors import CoverageError, PlanError, ShapeMismatchError


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


def build_reshard_plan(
    held: Sequence[Sequence[ShardSpec]], wanted: Sequence[Sequence[ShardSpec]]
) -> tuple[Piece, ...]:
    """Cover every wanted shard by parts of held ones, from the rank itself if possible.

    Args:
        held: for each rank of the group what it holds; replicas are welcome.
        wanted: for each rank what it wants and does not hold as it is.

    Raises:
        CoverageError: no rank holds a part of something that is wanted; names rank and key.
        ShapeMismatchError: an array is held with another shape than it is wanted with.
    """
    holders: defaultdict[str, defaultdict[Region, list[int]]] = defaultdict(
        lambda: defaultdict(list)
    )
    arrays: dict[str, tuple[Shape, DType]] = {}
    for rank, specs in enumerate(held):
        for spec in specs:
            array = (spec.array_shape, spec.dtype)
            if arrays.setdefault(spec.key, array) != array:
                raise PlanError(f"{spec.key}: ranks hold it as {arrays[spec.key]} and as {array}")
            having = holders[spec.key][spec.region]
            if not having or having[-1] != rank:  # ranks come in order
                having.append(rank)
    kept = {key: _KeptArray.of(of_key) for key, of_key in holders.items()}
    load: Counter[int] = Counter()
    pieces: list[Piece] = []
    for rank, specs in enumerate(wanted):
        for spec in sorted(specs, key=lambda spec: spec.id):
            _require_same_shape(spec, arrays, rank)
            pieces += _pieces(spec, kept[spec.key], arrays[spec.key][1], rank, load)
    return tuple(pieces)


@dataclass(frozen=True, slots=True)
class _KeptArray:
    """The regions of an array that some rank holds, ordered along the dim that tells most apart.

    Attributes:
        holders: the ranks that hold each.
        dim: along which they are ordered.
        regions: by their first element along it.
        starts: those elements.
        longest: the most extent along it.
    """

    holders: Mapping[Region, Sequence[int]]
    dim: int
    regions: Sequence[Region]
    starts: Sequence[int]
    longest: int

    @classmethod
    def of(cls, holders: Mapping[Region, Sequence[int]]) -> _KeptArray:
        ndim = next(iter(holders)).ndim
        if ndim == 0:
            return cls(holders, 0, tuple(holders), (0,), 1)
        dim = max(range(ndim), key=lambda d: len({region.offset[d] for region in holders}))
        regions = sorted(holders, key=lambda region: region.offset[dim])
        starts = [region.offset[dim] for region in regions]
        return cls(holders, dim, regions, starts, max(region.shape[dim] for region in regions))

    def near(self, region: Region) -> list[Region]:
        """Every region that shares an element with this one, and perhaps others, sorted."""
        if region.ndim == 0:
            return list(self.regions)
        first = bisect_right(self.starts, region.offset[self.dim] - self.longest)
        stop = bisect_left(self.starts, region.end[self.dim])
        return sorted(self.regions[first:stop])


def _require_same_shape(
    spec: ShardSpec, arrays: Mapping[str, tuple[Shape, DType]], rank: int
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
    kept: _KeptArray,
    dtype: DType,
    rank: int,
    load: Counter[int],
) -> list[Piece]:
    """Parts of held shards that make up a wanted one: one held whole, else all that it meets."""
    exact = spec.region in kept.holders
    sources = [spec.region] if exact else kept.near(spec.region)
    found = []
    for source in sources:
        shared = source.intersect(spec.region)
        if shared is None:
            continue
        able = kept.holders[source]
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
