"""Decide who writes which chunk of which array, and which pieces have to move there first."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from dist_ckpt_strategies.errors import CoverageError, DuplicateWriterError, PlanError
from dist_ckpt_strategies.plan.chunking import (
    MAX_ASSEMBLED_NBYTES,
    MAX_OBJECT_NBYTES,
    chunk_parts,
    fills_grid,
    irregular_chunk_shape,
    object_chunk_shape,
    regular_chunk_shape,
)
from dist_ckpt_strategies.plan.coverage import Holding, require_partition
from dist_ckpt_strategies.plan.inner_chunks import cut_chunk
from dist_ckpt_strategies.plan.keys import require_storable_keys
from dist_ckpt_strategies.spec.array import ArraySpec
from dist_ckpt_strategies.spec.dtype import DType
from dist_ckpt_strategies.spec.object import ObjectId
from dist_ckpt_strategies.spec.region import Extent, Region
from dist_ckpt_strategies.spec.shard import RankShards, ShardId, ShardSpec

_MAX_SPOKEN = 8


class Cutting(Enum):
    """What the file of a chunk is made of."""

    WHOLE = "one piece"
    INNER = "inner chunks"
    INNER_CRC32C = "inner chunks, each with a CRC32C"
    BOUNDED = "inner chunks, few enough for one request"
    BOUNDED_CRC32C = "inner chunks, few enough for one request, each with a CRC32C"

    @property
    def has_crc32c(self) -> bool:
        """Whether a CRC32C follows every inner chunk."""
        return self in {Cutting.INNER_CRC32C, Cutting.BOUNDED_CRC32C}

    @property
    def is_bounded(self) -> bool:
        """Whether a file has about MAX_OBJECT_NBYTES at most."""
        return self in {Cutting.BOUNDED, Cutting.BOUNDED_CRC32C}


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a shard, in global coordinates, on the rank that holds it."""

    holder: int
    shard: ShardId
    region: Region


@dataclass(frozen=True, slots=True, order=True)
class ObjectHolding:
    """One shard of an object and the rank that holds its main replica."""

    id: ObjectId
    rank: int


@dataclass(frozen=True, slots=True)
class Move:
    """A piece that travels to the writer of its chunk. Order is the same on every rank."""

    piece: Piece
    writer: int
    dtype: DType

    @property
    def nbytes(self) -> int:
        """Bytes on the wire."""
        return self.piece.region.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class ChunkWrite:
    """``writer`` alone writes this chunk, out of pieces that cover its part of the array."""

    array: ArraySpec
    region: Region
    writer: int
    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        """Payload of the chunk, in bytes."""
        return self.region.numel * self.array.dtype.itemsize

    @property
    def is_whole_shard(self) -> bool:
        """Whether the chunk comes from one tensor of its writer, so that nothing is assembled."""
        return len(self.pieces) == 1 and self.pieces[0].holder == self.writer

    @property
    def moves(self) -> tuple[Move, ...]:
        """The pieces that have to travel to the writer."""
        away = (piece for piece in self.pieces if piece.holder != self.writer)
        return tuple(Move(piece, self.writer, self.array.dtype) for piece in away)


@dataclass(frozen=True, slots=True)
class ArrayCreation:
    """``creator`` alone writes the metadata of this array."""

    array: ArraySpec
    creator: int


@dataclass(frozen=True, slots=True)
class SavePlan:
    """The whole save, the same on every rank. Ranks are global ones.

    Attributes:
        creations: who writes the metadata of each array, and flushes its directory.
        writes: every chunk.
        rounds: the chunks among them that are put together from pieces, in groups that bound the
            memory of each rank.
    """

    creations: tuple[ArrayCreation, ...]
    writes: tuple[ChunkWrite, ...]
    rounds: tuple[tuple[ChunkWrite, ...], ...]

    def creations_of(self, rank: int) -> tuple[ArraySpec, ...]:
        """Arrays whose metadata ``rank`` writes."""
        return tuple(c.array for c in self.creations if c.creator == rank)

    def writes_of(self, rank: int) -> tuple[ChunkWrite, ...]:
        """Chunks that ``rank`` writes."""
        return tuple(w for w in self.writes if w.writer == rank)

    def share_of(self, rank: int) -> SavePlan:
        """The plan without what does not concern ``rank``; as many rounds as before."""
        return SavePlan(
            tuple(c for c in self.creations if c.creator == rank),
            self.writes_of(rank),
            tuple(
                tuple(write for write in round_ if _concerns(write, rank)) for round_ in self.rounds
            ),
        )

    def sends_of(self, rank: int) -> tuple[Move, ...]:
        """Pieces that ``rank`` gives away."""
        moves = (move for round_ in self.rounds for write in round_ for move in write.moves)
        return tuple(move for move in moves if move.piece.holder == rank)


def _concerns(write: ChunkWrite, rank: int) -> bool:
    return write.writer == rank or any(move.piece.holder == rank for move in write.moves)


def build_save_plan(
    requests: Iterable[RankShards],
    objects: Iterable[ObjectHolding] = (),
    *,
    max_inflight_bytes: int = MAX_ASSEMBLED_NBYTES,
    cutting: Cutting = Cutting.WHOLE,
) -> SavePlan:
    """Give each chunk of each array one writer, the rank that holds most of it.

    Where the main replicas lie on a regular grid, a chunk is a shard and nothing moves. Elsewhere,
    and where inner chunks fit no factors of the shards, the plan chooses a grid
    (``irregular_chunk_shape``, ``cut_chunk``) and moves pieces to the writers.

    Args:
        requests: what each rank of the group holds, replicas included, one entry per rank.
        objects: main replicas of the objects saved beside the arrays, to find collisions.
        max_inflight_bytes: bound, per rank and round, on chunks being assembled and on pieces
            being sent; a larger chunk has a round of its own. Equal on all ranks.
        cutting: what the file of a chunk is made of. Any key can be stored in inner chunks.

    Raises:
        CoverageError: the main replicas of an array leave a gap or reach outside.
        DuplicateWriterError: two main replicas share an element.
        PlanError: ranks disagree on an array's shape or dtype, or a key cannot be stored.
    """
    by_key: dict[str, list[tuple[int, ShardSpec]]] = defaultdict(list)
    for request in requests:
        for shard in request.shards:
            by_key[shard.key].append((request.rank, shard))
    object_keys = _single_writer_keys(objects)
    if cutting is Cutting.WHOLE:
        require_storable_keys(by_key.keys(), object_keys)
    load: Counter[int] = Counter()
    num_created: Counter[int] = Counter()
    creations: list[ArrayCreation] = []
    writes: list[ChunkWrite] = []
    for key in sorted(by_key):
        made = _array_of(key, by_key[key], cutting)
        creator = _creator(made.main, by_key[key], num_created)
        creations.append(ArrayCreation(made.array, creator))
        num_created[creator] += 1
        chunk_writes = _shard_writes(made) if made.is_regular else _chunk_writes(made, load)
        for write in chunk_writes:
            load[write.writer] += write.nbytes
        writes.extend(chunk_writes)
    return SavePlan(tuple(creations), tuple(writes), tuple(_rounds(writes, max_inflight_bytes)))


def _single_writer_keys(objects: Iterable[ObjectHolding]) -> frozenset[str]:
    """The keys of the objects, once each shard of each is known to have one writer."""
    writers: dict[ObjectId, int] = {}
    for holding in sorted(objects):
        if holding.id in writers:
            raise DuplicateWriterError(
                f"{holding.id.unique_key}: rank {writers[holding.id]} and rank {holding.rank} both "
                "hold a main replica; give one of them another replica_id",
                key=holding.id.key,
            )
        writers[holding.id] = holding.rank
    _require_whole_objects(writers)
    return frozenset(object_id.key for object_id in writers)


def _require_whole_objects(writers: Mapping[ObjectId, int]) -> None:
    """Raise unless the shards of each object are all those of one grid."""
    by_key: dict[str, dict[ObjectId, int]] = defaultdict(dict)
    for object_id in sorted(writers):
        by_key[object_id.key][object_id] = writers[object_id]
    for key, of_key in by_key.items():
        ranks = {object_id.shape: rank for object_id, rank in reversed(of_key.items())}
        if len(ranks) > 1:
            shown = ", ".join(f"{shape} on rank {ranks[shape]}" for shape in sorted(ranks))
            raise PlanError(f"{key}: shards of objects of different grids: {shown}", key=key)
        (grid,) = ranks
        for object_id, rank in of_key.items():
            _require_in_grid(object_id, rank)
        if len(of_key) != math.prod(grid):
            raise CoverageError(
                f"{key}: main replicas of {len(of_key)} of the {math.prod(grid)} shards of an "
                f"object; each needs one; there are {_spoken_shards(of_key)}",
                key=key,
            )


def _require_in_grid(object_id: ObjectId, rank: int) -> None:
    offset, grid = object_id.offset, object_id.shape
    is_inside = len(offset) == len(grid) and all(
        0 <= o < n for o, n in zip(offset, grid, strict=True)
    )
    if not grid or not is_inside:
        raise PlanError(
            f"{object_id.key}: rank {rank} holds shard {offset} of an object whose grid is {grid}; "
            "a grid has at least one dim, and its shards count from 0",
            key=object_id.key,
        )


def _spoken_shards(writers: Mapping[ObjectId, int]) -> str:
    shown = [f"{object_id.offset} on rank {rank}" for object_id, rank in writers.items()]
    more = ", ..." if len(shown) > _MAX_SPOKEN else ""
    return ", ".join(shown[:_MAX_SPOKEN]) + more


@dataclass(frozen=True, slots=True)
class _Made:
    """An array, and the shards that make it up.

    Attributes:
        array: with its chunk grid.
        main: who holds which main replica, sorted.
        is_regular: whether each main replica is one chunk.
    """

    array: ArraySpec
    main: Mapping[Holding, ShardId]
    is_regular: bool


def _array_of(key: str, held: Sequence[tuple[int, ShardSpec]], cutting: Cutting) -> _Made:
    """The array that the shards of one key make up."""
    first_rank, first = held[0]
    for rank, shard in held:
        if shard.array_shape != first.array_shape or shard.dtype != first.dtype:
            name = "dtype" if shard.array_shape == first.array_shape else "array_shape"
            mine, theirs = (_spoken(getattr(spec, name)) for spec in (shard, first))
            raise PlanError(
                f"{key}: {name} {mine} on rank {rank}, {theirs} on rank {first_rank}", key=key
            )
    shape = first.array_shape
    main = sorted(
        (Holding(region, rank), shard.id)
        for rank, shard in held
        if shard.is_main and (region := _stored_part(shard)) is not None
    )
    holdings = [holding for holding, _ in main]
    regions = [holding.region for holding in holdings]
    chunk = regular_chunk_shape(shape, regions)
    if chunk is None or not fills_grid(shape, chunk, regions):
        copies = [Holding(shard.region, rank) for rank, shard in held if not shard.is_main]
        require_partition(key, shape, holdings, copies)
    whole = ArraySpec(key, shape, first.dtype, chunk if chunk is not None else (1,) * len(shape))
    if chunk is not None:
        small = _bounded(whole, cutting)
        if (array := _cut(small, cutting, is_movable=False)) is not None:
            return _Made(array, dict(main), is_regular=small is whole)
        chunk = small.chunk_shape
    else:
        chunk = irregular_chunk_shape(shape, first.dtype.itemsize, holdings)
    moved = _cut(_bounded(replace(whole, chunk_shape=chunk), cutting), cutting, is_movable=True)
    assert moved is not None  # noqa: S101 - where boundaries may move, every chunk can be cut
    return _Made(moved, dict(main), is_regular=False)


def _bounded(array: ArraySpec, cutting: Cutting) -> ArraySpec:
    """The array with chunks that fit an object; itself where they do."""
    if not cutting.is_bounded or array.chunk_nbytes <= MAX_OBJECT_NBYTES:
        return array
    chunk = object_chunk_shape(array.chunk_shape, array.dtype.itemsize)
    return replace(array, chunk_shape=chunk)


def _cut(array: ArraySpec, cutting: Cutting, *, is_movable: bool) -> ArraySpec | None:
    """The array with inner chunks; None where its chunks have no factors for them."""
    if cutting is Cutting.WHOLE:
        return array
    cut = cut_chunk(array.chunk_shape, array.shape, array.dtype.itemsize, is_movable=is_movable)
    if cut is None:
        return None
    return replace(
        array,
        chunk_shape=cut.chunk_shape,
        inner_shape=cut.inner_shape,
        has_crc32c=cutting.has_crc32c,
    )


def _spoken(fact: DType | Extent) -> str:
    return fact.value if isinstance(fact, DType) else str(fact)


def _stored_part(shard: ShardSpec) -> Region | None:
    """The shard's elements that the array has; a padded shard may reach past its end."""
    if shard.may_mismatch:
        return shard.region.intersect(Region.whole(shard.array_shape))
    return shard.region if shard.region.numel else None


def _creator(
    main: Iterable[Holding], held: Sequence[tuple[int, ShardSpec]], num_created: Counter[int]
) -> int:
    """A rank that holds a part of the array, or knows an empty one: who has created least."""
    ranks = {holding.rank for holding in main} or {rank for rank, _ in held}
    return min(ranks, key=lambda rank: (num_created[rank], rank))


def _shard_writes(made: _Made) -> list[ChunkWrite]:
    """One write for each shard, which is a chunk; ``_chunk_writes`` would find the same."""
    return [
        ChunkWrite(made.array, h.region, h.rank, (Piece(h.rank, shard, h.region),))
        for h, shard in made.main.items()
    ]


def _chunk_writes(made: _Made, load_before: Counter[int]) -> list[ChunkWrite]:
    """One write for each chunk of the array, put together from parts of the shards."""
    array = made.array
    pieces: dict[Extent, list[Piece]] = defaultdict(list)
    for holding, shard in made.main.items():
        for index, part in chunk_parts(array.chunk_shape, holding.region):
            pieces[index].append(Piece(holding.rank, shard, part))
    load = load_before.copy()
    writes = []
    for index in sorted(pieces):
        region = array.chunk_region(index).intersect(Region.whole(array.shape))
        assert region is not None  # noqa: S101 - a chunk of the grid overlaps its array
        writer = _writer(pieces[index], load)
        write = ChunkWrite(array, region, writer, tuple(pieces[index]))
        load[writer] += write.nbytes
        writes.append(write)
    return writes


def _writer(pieces: Sequence[Piece], load: Counter[int]) -> int:
    """The rank that holds most of the chunk; among equals the one with least to write."""
    held: Counter[int] = Counter()
    for piece in pieces:
        held[piece.holder] += piece.region.numel
    return min(held, key=lambda rank: (-held[rank], load[rank], rank))


def _rounds(writes: Iterable[ChunkWrite], budget_nbytes: int) -> Iterable[tuple[ChunkWrite, ...]]:
    """Chunks that are assembled, in plan order, cut where a rank's memory would run over."""
    round_: list[ChunkWrite] = []
    used: Counter[int] = Counter()
    for write in writes:
        if write.is_whole_shard:
            continue
        needed = Counter({write.writer: 2 * write.nbytes})
        for move in write.moves:
            needed[move.piece.holder] += move.nbytes
        if round_ and any(used[rank] + needed[rank] > budget_nbytes for rank in needed):
            yield tuple(round_)
            round_, used = [], Counter()
        round_.append(write)
        used.update(needed)
    if round_:
        yield tuple(round_)
