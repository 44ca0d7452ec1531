"""Decide who writes which chunk of which array, and which slices have to move there first."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from dist_ckpt_strategies.core.array import (
    ArraySpec,
    DType,
    ObjectId,
    RankShards,
    ShardId,
    ShardSpec,
)
from dist_ckpt_strategies.core.chunk_grids import MAX_ASSEMBLED_NBYTES, ChunkLayout, ShardPlacement
from dist_ckpt_strategies.core.keys import require_storable_keys
from dist_ckpt_strategies.core.region import Region, Shape
from dist_ckpt_strategies.errors import CoverageError, DuplicateWriterError, PlanError
from dist_ckpt_strategies.sharded.plan_grids import ArrayGrids, ChunkSlices

_MAX_LISTED = 8


@dataclass(frozen=True, slots=True)
class ShardSlice:
    """A part of a shard, in global coordinates, on the rank that holds it."""

    holder: int
    shard: ShardId
    region: Region


@dataclass(frozen=True, slots=True, order=True)
class ObjectPlacement:
    """One shard of an object and the rank that holds its main replica."""

    id: ObjectId
    rank: int


@dataclass(frozen=True, slots=True)
class Move:
    """A slice that travels to the writer of its chunk. Order is the same on every rank."""

    shard_slice: ShardSlice
    writer: int
    dtype: DType

    @property
    def nbytes(self) -> int:
        """Bytes that are sent."""
        return self.shard_slice.region.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class WriteItem:
    """``writer`` alone writes this chunk, from slices that cover its region."""

    array: ArraySpec
    region: Region
    writer: int
    slices: tuple[ShardSlice, ...]

    @property
    def nbytes(self) -> int:
        """Payload of the chunk, in bytes."""
        return self.region.numel * self.array.dtype.itemsize

    @property
    def is_whole_shard(self) -> bool:
        """Whether the chunk comes from one tensor of its writer, so that nothing is assembled."""
        return len(self.slices) == 1 and self.slices[0].holder == self.writer

    @property
    def moves(self) -> tuple[Move, ...]:
        """The slices that have to travel to the writer."""
        away = (shard_slice for shard_slice in self.slices if shard_slice.holder != self.writer)
        return tuple(Move(shard_slice, self.writer, self.array.dtype) for shard_slice in away)


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
        rounds: the chunks among them that are put together from slices, in groups that bound the
            memory of each rank.
    """

    creations: tuple[ArrayCreation, ...]
    writes: tuple[WriteItem, ...]
    rounds: tuple[tuple[WriteItem, ...], ...]

    def creations_of(self, rank: int) -> tuple[ArraySpec, ...]:
        """Arrays whose metadata ``rank`` writes."""
        return tuple(c.array for c in self.creations if c.creator == rank)

    def writes_of(self, rank: int) -> tuple[WriteItem, ...]:
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

    def sent_nbytes(self, rank: int) -> int:
        """Bytes that ``rank`` sends to the writers of other chunks."""
        moves = (move for round_ in self.rounds for write in round_ for move in write.moves)
        return sum(move.nbytes for move in moves if move.shard_slice.holder == rank)

    @property
    def arrays(self) -> list[ArraySpec]:
        """Every array that is created or written to, once."""
        found = (*(c.array for c in self.creations), *(w.array for w in self.writes))
        return list({array.key: array for array in found}.values())


def _concerns(write: WriteItem, rank: int) -> bool:
    return write.writer == rank or any(move.shard_slice.holder == rank for move in write.moves)


def build_save_plan(
    requests: Iterable[RankShards],
    objects: Iterable[ObjectPlacement] = (),
    *,
    max_inflight_bytes: int = MAX_ASSEMBLED_NBYTES,
    chunk_layout: ChunkLayout = ChunkLayout.WHOLE,
) -> SavePlan:
    """Give each chunk of each array one writer, the rank that holds most of it.

    Where the main replicas lie on a regular grid, a chunk is a shard and nothing moves. Elsewhere,
    and where inner chunks fit no factors of the shards, the plan chooses a grid
    (``irregular_chunk_shape``, ``cut_chunk``) and moves slices to the writers.

    Args:
        requests: what each rank of the group holds, replicas included, one entry per rank.
        objects: main replicas of the objects saved beside the arrays, to find collisions.
        max_inflight_bytes: bound, per rank and round, on chunks being assembled and on slices
            being sent; a larger chunk has a round of its own. Equal on all ranks.
        chunk_layout: what the file of a chunk is made of. Any key can be stored in inner chunks.

    Raises:
        CoverageError: the main replicas of an array leave a gap or reach outside.
        DuplicateWriterError: two main replicas share an element.
        PlanError: ranks disagree on an array's shape or dtype, or a key cannot be stored.
    """
    by_key: dict[str, list[tuple[int, ShardSpec]]] = defaultdict(list)
    for request in requests:
        for shard in request.shards:
            by_key[shard.key].append((request.rank, shard))
    object_ranks = _single_writers(objects)
    if chunk_layout is ChunkLayout.WHOLE:
        _require_storable(by_key, object_ranks)
    load: Counter[int] = Counter()
    num_created: Counter[int] = Counter()
    creations: list[ArrayCreation] = []
    writes: list[WriteItem] = []
    grids = ArrayGrids(chunk_layout)
    for key in sorted(by_key):
        made = _array_of(key, by_key[key], grids)
        creator = _creator(made.main, by_key[key], num_created)
        creations.append(ArrayCreation(made.array, creator))
        num_created[creator] += 1
        chunk_writes = _shard_writes(made) if made.chunks is None else _chunk_writes(made, load)
        for write in chunk_writes:
            load[write.writer] += write.nbytes
        writes.extend(chunk_writes)
    return SavePlan(tuple(creations), tuple(writes), _rounds(writes, max_inflight_bytes))


def _require_storable(
    by_key: Mapping[str, Sequence[tuple[int, ShardSpec]]], object_ranks: Mapping[str, int]
) -> None:
    """Raise where a key cannot be stored; on every rank it is the first of its holders at fault."""
    try:
        require_storable_keys(by_key.keys(), object_ranks.keys())
    except PlanError as error:
        key = error.key or ""
        error.at_rank(by_key[key][0][0] if key in by_key else object_ranks[key])
        raise


def _single_writers(objects: Iterable[ObjectPlacement]) -> dict[str, int]:
    """A writer of each object, by key, once each shard of each is known to have one."""
    writers: dict[ObjectId, int] = {}
    for placement in sorted(objects):
        if placement.id in writers:
            raise DuplicateWriterError(
                f"{placement.id.unique_key}: rank {writers[placement.id]} and rank "
                f"{placement.rank} both hold a main replica; give one of them another replica_id",
                key=placement.id.key,
            )
        writers[placement.id] = placement.rank
    _require_whole_objects(writers)
    return {object_id.key: rank for object_id, rank in reversed(writers.items())}


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
                f"object; each needs one; there are {_listed_shards(of_key)}",
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


def _listed_shards(writers: Mapping[ObjectId, int]) -> str:
    shown = [f"{object_id.offset} on rank {rank}" for object_id, rank in writers.items()]
    more = ", ..." if len(shown) > _MAX_LISTED else ""
    return ", ".join(shown[:_MAX_LISTED]) + more


@dataclass(frozen=True, slots=True)
class _Made:
    """An array, and the shards that make it up.

    Attributes:
        array: with its chunk grid.
        main: who holds which main replica, sorted.
        chunks: what each chunk is put together from; None where each main replica is one.
    """

    array: ArraySpec
    main: Sequence[tuple[ShardPlacement, ShardId]]
    chunks: tuple[ChunkSlices, ...] | None


def _array_of(key: str, held: Sequence[tuple[int, ShardSpec]], grids: ArrayGrids) -> _Made:
    """The array that the shards of one key make up."""
    first_rank, first = held[0]
    for rank, shard in held:
        if shard.array_shape != first.array_shape or shard.dtype != first.dtype:
            name = "dtype" if shard.array_shape == first.array_shape else "array_shape"
            mine, theirs = (_text_of(getattr(spec, name)) for spec in (shard, first))
            raise PlanError(
                f"{key}: {name} {mine} on rank {rank}, {theirs} on rank {first_rank}", key=key
            ).at_rank(rank)
    main = [
        (ShardPlacement(region, rank), shard.id)
        for rank, shard in held
        if shard.is_main and (region := _stored_part(shard)) is not None
    ]
    main.sort(key=_place)
    grid = grids.of(
        ArraySpec(key, first.array_shape, first.dtype, (1,) * len(first.array_shape)),
        [placement for placement, _ in main],
        (ShardPlacement(shard.region, rank) for rank, shard in held if not shard.is_main),
    )
    array = ArraySpec(
        key, first.array_shape, first.dtype, grid.chunk_shape, inner_shape=grid.inner_shape
    )
    return _Made(array, main, grid.chunks)


def _place(held: tuple[ShardPlacement, ShardId]) -> tuple[Shape, Shape, int]:
    """Sorts as placements do, without a comparison of objects."""
    placement, _ = held
    return placement.region.offset, placement.region.shape, placement.rank


def _text_of(fact: DType | Shape) -> str:
    return fact.value if isinstance(fact, DType) else str(fact)


def _stored_part(shard: ShardSpec) -> Region | None:
    """The shard's elements that the array has; a padded shard may reach past its end."""
    if shard.may_mismatch:
        return shard.region.intersect(Region.whole(shard.array_shape))
    return shard.region if shard.region.numel else None


def _creator(
    main: Iterable[tuple[ShardPlacement, ShardId]],
    held: Sequence[tuple[int, ShardSpec]],
    num_created: Counter[int],
) -> int:
    """A rank that holds a part of the array, or knows an empty one: who has created least."""
    ranks = {placement.rank for placement, _ in main} or {rank for rank, _ in held}
    return min(ranks, key=lambda rank: (num_created[rank], rank))


def _shard_writes(made: _Made) -> list[WriteItem]:
    """One write for each shard, which is a chunk; ``_chunk_writes`` would find the same."""
    return [
        WriteItem(made.array, h.region, h.rank, (ShardSlice(h.rank, shard, h.region),))
        for h, shard in made.main
    ]


def _chunk_writes(made: _Made, load: Counter[int]) -> list[WriteItem]:
    """One write for each chunk of the array, put together from parts of the shards."""
    added: Counter[int] = Counter()
    writes = []
    for chunk in made.chunks or ():
        slices = []
        for number, part in chunk.slices:
            placement, shard = made.main[number]
            slices.append(ShardSlice(placement.rank, shard, part))
        writer = _writer(slices, load, added)
        write = WriteItem(made.array, chunk.region, writer, tuple(slices))
        added[writer] += write.nbytes
        writes.append(write)
    return writes


def _writer(slices: Sequence[ShardSlice], load: Counter[int], added: Counter[int]) -> int:
    """The rank that holds most of the chunk; among equals the one with least to write."""
    first = slices[0].holder
    if all(shard_slice.holder == first for shard_slice in slices):
        return first
    held: Counter[int] = Counter()
    for shard_slice in slices:
        held[shard_slice.holder] += shard_slice.region.numel
    return min(held, key=lambda rank: (-held[rank], load[rank] + added[rank], rank))


def _rounds(writes: Iterable[WriteItem], budget_nbytes: int) -> tuple[tuple[WriteItem, ...], ...]:
    """Chunks that are assembled, each in the first round in which its ranks have memory for it.

    No rank goes back to an earlier round, and ranks that have nothing to do with each other share
    rounds: there are as many as the rank with most to do needs, however many groups of ranks there
    are. Every round is a collective of all ranks.
    """
    rounds: list[list[WriteItem]] = []
    last: dict[int, int] = {}
    used: Counter[int] = Counter()  # of the last round of each rank
    for write in writes:
        if write.is_whole_shard:
            continue
        needed = {write.writer: 2 * write.nbytes}
        for move in write.moves:
            holder = move.shard_slice.holder
            needed[holder] = needed.get(holder, 0) + move.nbytes
        number = max(last.get(rank, 0) for rank in needed)
        present = [rank for rank in needed if last.get(rank) == number]
        if any(used[rank] + needed[rank] > budget_nbytes for rank in present):
            number += 1
        for rank, nbytes in needed.items():
            used[rank] = nbytes + (used[rank] if last.get(rank) == number else 0)
            last[rank] = number
        if number == len(rounds):
            rounds.append([])
        rounds[number].append(write)
    return tuple(map(tuple, rounds))
