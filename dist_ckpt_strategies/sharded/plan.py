"""Decide who writes which chunk of which array, and which segment of the manifest."""

from __future__ import annotations

import math
import operator
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from dist_ckpt_strategies.core.array import (
    ArraySpec,
    DType,
    ObjectId,
    RankShards,
    Region,
    Shape,
    ShardId,
    ShardSpec,
    require_storable_keys,
)
from dist_ckpt_strategies.core.chunk_grids import (
    MAX_ASSEMBLED_NBYTES,
    ChunkLayout,
    ShardPlacement,
    chunk_parts,
    cut_chunk,
    find_chunk_shape,
    object_chunk_shape,
)
from dist_ckpt_strategies.core.inner_grid import InnerGrid
from dist_ckpt_strategies.errors import CoverageError, DuplicateWriterError, PlanError, some_of

_MAX_LISTED = 8


@dataclass(frozen=True, slots=True)
class ShardSlice:
    """A region of a shard, in global coordinates, on the rank that holds it."""

    holder: int
    shard: ShardId
    region: Region


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
    def moves(self) -> tuple[ShardSlice, ...]:
        """The slices that have to travel to the writer."""
        return tuple(s for s in self.slices if s.holder != self.writer)

    def nbytes_of(self, shard_slice: ShardSlice) -> int:
        """Bytes of one of the slices."""
        return shard_slice.region.numel * self.array.dtype.itemsize


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
        rounds: the chunks among them that are assembled from slices, in groups that bound the
            memory of each rank.
    """

    creations: tuple[ArrayCreation, ...]
    writes: tuple[WriteItem, ...]
    rounds: tuple[tuple[WriteItem, ...], ...]

    def share_of(self, rank: int) -> SavePlan:
        """The plan without what does not concern ``rank``; as many rounds as before."""
        return SavePlan(
            tuple(c for c in self.creations if c.creator == rank),
            tuple(w for w in self.writes if w.writer == rank),
            tuple(
                tuple(
                    write
                    for write in round_
                    if write.writer == rank or any(s.holder == rank for s in write.slices)
                )
                for round_ in self.rounds
            ),
        )

    @property
    def arrays(self) -> list[ArraySpec]:
        """Every array that is created or written to, once."""
        found = (*(c.array for c in self.creations), *(w.array for w in self.writes))
        return list({array.key: array for array in found}.values())


def build_save_plan(
    requests: Iterable[RankShards],
    objects: Iterable[tuple[ObjectId, int]] = (),
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
        objects: main replicas of the objects saved beside the arrays, and the ranks that hold
            them, to find collisions.
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
    object_ranks = _object_writers(objects)
    if chunk_layout is ChunkLayout.WHOLE:
        _require_storable(by_key, object_ranks)
    load: Counter[int] = Counter()
    num_created: Counter[int] = Counter()
    creations: list[ArrayCreation] = []
    writes: list[WriteItem] = []
    grids: dict[_Pattern, _Grid] = {}
    for key in sorted(by_key):
        held = by_key[key]
        main = _main_replicas(key, held)
        array, chunks = _array_of(held, main, grids, chunk_layout)
        # A rank that holds a part of the array, or knows an empty one.
        ranks = {placement.rank for placement, _ in main} or {rank for rank, _ in held}
        creator = min(ranks, key=lambda rank: (num_created[rank], rank))
        creations.append(ArrayCreation(array, creator))
        num_created[creator] += 1
        if chunks is None:
            found = [
                WriteItem(array, p.region, p.rank, (ShardSlice(p.rank, shard, p.region),))
                for p, shard in main
            ]
        else:
            found = _assembled_items(array, main, chunks, load)
        for write in found:
            load[write.writer] += write.nbytes
        writes.extend(found)
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


def _object_writers(objects: Iterable[tuple[ObjectId, int]]) -> dict[str, int]:
    """A writer of each object, by key, once all shards of each are known to have one writer."""
    by_key: dict[str, dict[ObjectId, int]] = defaultdict(dict)
    for found, rank in sorted(objects):
        of_key, offset, grid = by_key[found.key], found.offset, found.shape
        if found in of_key:
            raise DuplicateWriterError(
                f"{found.unique_key}: rank {of_key[found]} and rank {rank} both hold a main "
                "replica; give one of them another replica_id",
                key=found.key,
            )
        is_inside = all(0 <= at < num for at, num in zip(offset, grid, strict=False))
        if len(offset) != len(grid) or not grid or not is_inside:
            raise PlanError(
                f"{found.key}: rank {rank} holds shard {offset} of an object whose grid is {grid}; "
                "a grid has at least one dim, and its shards count from 0",
                key=found.key,
            ).at_rank(rank)
        of_key[found] = rank
    for key, of_key in by_key.items():
        ranks = {found.shape: rank for found, rank in reversed(of_key.items())}
        if len(ranks) > 1:
            shown = ", ".join(f"{shape} on rank {ranks[shape]}" for shape in sorted(ranks))
            raise PlanError(f"{key}: shards of objects of different grids: {shown}", key=key)
        num_shards = math.prod(next(iter(ranks)))
        if len(of_key) != num_shards:
            held = [f"{found.offset} on rank {rank}" for found, rank in of_key.items()]
            raise CoverageError(
                f"{key}: main replicas of {len(held)} of the {num_shards} shards of an object; "
                f"each needs one; there are {some_of(held, _MAX_LISTED)}",
                key=key,
            )
    return {key: next(iter(of_key.values())) for key, of_key in by_key.items()}


_Main = Sequence[tuple[ShardPlacement, ShardId]]
"""Who holds which main replica of an array, sorted."""


def _main_replicas(key: str, held: Sequence[tuple[int, ShardSpec]]) -> _Main:
    """The main replicas of one key; all ranks see one array there."""
    first_rank, first = held[0]
    for rank, shard in held:
        if shard.array_shape != first.array_shape or shard.dtype != first.dtype:
            if shard.array_shape == first.array_shape:
                name, mine, theirs = "dtype", shard.dtype.value, first.dtype.value
            else:
                name, mine, theirs = "array_shape", str(shard.array_shape), str(first.array_shape)
            raise PlanError(
                f"{key}: {name} {mine} on rank {rank}, {theirs} on rank {first_rank}", key=key
            ).at_rank(rank)
    main = [
        (ShardPlacement(region, rank), shard.id)
        for rank, shard in held
        if shard.is_main and (region := _stored_region(shard)) is not None
    ]
    # As placements are sorted, without a comparison of objects.
    return sorted(main, key=lambda m: (m[0].region.offset, m[0].region.shape, m[0].rank))


def _stored_region(shard: ShardSpec) -> Region | None:
    """The shard's elements that the array has; a padded shard may reach past its end."""
    if shard.may_mismatch:
        return shard.region.intersect(Region.whole(shard.array_shape))
    return shard.region if shard.region.numel else None


_Chunks = tuple[tuple[Region, tuple[tuple[int, Region], ...]], ...]
"""Each chunk's region, and the slices that cover it, with the numbers of their main replicas."""

_Grid = tuple[Shape, Shape | None, _Chunks | None]
"""Shape of the chunks and of their inner chunks; the chunks, None where every shard is one."""

_Pattern = tuple[Shape, DType, tuple[tuple[Shape, Shape, int], ...]]
"""Shape and dtype of an array, and offset, shape and holder of each main replica. Holders are
numbered as they come: who they are makes no difference to the grid. Thousands of groups of ranks
cut their optimizer's buffers in the same way, and the same way for each kind of state."""


def _array_of(
    held: Sequence[tuple[int, ShardSpec]],
    main: _Main,
    grids: dict[_Pattern, _Grid],
    chunk_layout: ChunkLayout,
) -> tuple[ArraySpec, _Chunks | None]:
    """The array that the shards make up, and its chunks; None where each main replica is one.

    ``held`` are all replicas, to say who holds what the ``main`` ones leave out. ``grids`` are
    those found so far; a new one is added.
    """
    first = held[0][1]
    array = ArraySpec(first.key, first.array_shape, first.dtype, (1,) * len(first.array_shape))
    numbers: dict[int, int] = {}
    shards = tuple(
        (p.region.offset, p.region.shape, numbers.setdefault(p.rank, len(numbers))) for p, _ in main
    )
    pattern = (array.shape, array.dtype, shards)
    if pattern not in grids:
        copies = (ShardPlacement(shard.region, rank) for rank, shard in held if not shard.is_main)
        grids[pattern] = _grid_of(array, [p for p, _ in main], copies, chunk_layout)
    chunk, inner, chunks = grids[pattern]
    return replace(array, chunk_shape=chunk, inner_shape=inner), chunks


def _grid_of(
    array: ArraySpec,
    placements: Sequence[ShardPlacement],
    copies: Iterable[ShardPlacement],
    chunk_layout: ChunkLayout,
) -> _Grid:
    key, shape, itemsize = array.key, array.shape, array.dtype.itemsize
    shard, is_regular = find_chunk_shape(key, shape, itemsize, placements, copies)
    if chunk_layout is ChunkLayout.WHOLE:
        return shard, None, None if is_regular else _chunks_of(shape, shard, placements)
    is_bounded = chunk_layout is ChunkLayout.BOUNDED
    chunk = object_chunk_shape(shard, itemsize) if is_bounded else shard
    cut = cut_chunk(chunk, shape, itemsize, is_movable=not is_regular)
    if cut is not None and is_regular and chunk == shard:
        return *cut, None
    cut = cut or cut_chunk(chunk, shape, itemsize, is_movable=True)
    assert cut is not None  # noqa: S101 - where boundaries may move, every chunk can be cut
    return *cut, _chunks_of(shape, cut[0], placements)


def _chunks_of(shape: Shape, chunk: Shape, placements: Sequence[ShardPlacement]) -> _Chunks:
    parts: dict[Shape, list[tuple[int, Region]]] = defaultdict(list)
    for number, placement in enumerate(placements):
        for index, part in chunk_parts(chunk, placement.region):
            parts[index].append((number, part))
    chunks = []
    for index in sorted(parts):
        offset = tuple(map(operator.mul, index, chunk))
        region = Region(offset, tuple(map(min, chunk, map(operator.sub, shape, offset))))
        chunks.append((region, tuple(parts[index])))
    return tuple(chunks)


def _assembled_items(
    array: ArraySpec, main: _Main, chunks: _Chunks, load: Counter[int]
) -> list[WriteItem]:
    """One write for each chunk of the array, assembled from slices of the shards."""
    added: Counter[int] = Counter()
    writes = []
    for region, parts in chunks:
        slices = []
        for number, part in parts:
            placement, shard = main[number]
            slices.append(ShardSlice(placement.rank, shard, part))
        writer = _writer(slices, load, added)
        write = WriteItem(array, region, writer, tuple(slices))
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
            needed[move.holder] = needed.get(move.holder, 0) + write.nbytes_of(move)
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


MAX_SEGMENT_NBYTES = 4 << 20
"""About the size of a segment: what a rank holds of the manifest while it is written."""

_ENTRY_NBYTES = 160
_CHUNK_NBYTES = 48
_DIGEST_NBYTES = 16


@dataclass(frozen=True, slots=True)
class ManifestPlan:
    """The first key that each segment of the manifest may hold, and the group rank that writes it.

    The empty key comes first.
    """

    firsts: tuple[str, ...]
    owners: tuple[int, ...]


def build_manifest_plan(
    arrays: Sequence[ArraySpec],
    object_keys: Iterable[str],
    num_ranks: int,
    max_segment_nbytes: int = MAX_SEGMENT_NBYTES,
) -> ManifestPlan:
    """Cut the keys into ranges of about equal description, one to a segment; at most one to a rank.

    ``arrays`` are all of the checkpoint. ``object_keys`` has the key of an object once for each
    shard. ``max_segment_nbytes`` is the wanted size of a segment.
    """
    sizes: dict[str, int] = {}
    for array in arrays:
        sizes[array.key] = sizes.get(array.key, 0) + _described_nbytes(array)
    for key in object_keys:
        sizes[key] = sizes.get(key, 0) + _ENTRY_NBYTES + len(key)
    total = sum(sizes.values())
    num_segments = max(1, min(num_ranks, -(-total // max_segment_nbytes)))
    firsts = [""]
    seen = 0
    for key in sorted(sizes):
        if len(firsts) < num_segments and seen >= len(firsts) * total / num_segments:
            firsts.append(key)
        seen += sizes[key]
    owners = tuple(number * num_ranks // len(firsts) for number in range(len(firsts)))
    return ManifestPlan(tuple(firsts), owners)


def _described_nbytes(array: ArraySpec) -> int:
    """About the bytes that the manifest has about an array."""
    if not array.num_chunks:
        return _ENTRY_NBYTES + len(array.key)
    digests = InnerGrid.of(array, (0,) * len(array.shape)).num_chunks + 1
    of_chunks = array.num_chunks * (_CHUNK_NBYTES + digests * _DIGEST_NBYTES)
    return _ENTRY_NBYTES + len(array.key) + of_chunks
