"""Pure plans: which ranks hold replicas for each other, and who sends which shard to whom."""

import re
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from dist_ckpt_strategies.core.array import DType, Region, Shape, ShardId, ShardSpec
from dist_ckpt_strategies.errors import CoverageError, NoReplicasAvailableError, PlanError

_TIME_DIGITS = 20
_ID = re.compile(r"iter_(\d{7,99})_(\d{1,18})_local_([0-9a-f]{1,64})", re.ASCII)

Clique = tuple[int, ...]
"""Global ranks that keep copies for each other, ascending."""


@dataclass(frozen=True, slots=True, order=True)
class SaveId:
    """One save of all ranks together; shards of two saves never mix.

    Sorted, the newest save comes last. The stamp is of lower-case hexadecimal digits, led by the
    time of the save: a run that went back saves an iteration again, and its state may differ. After
    20 digits follows the id of the training, if there is one.
    """

    iteration: int
    stamp: str

    def __str__(self) -> str:
        """Such as ``0000100_18f2…``: iteration, stamp."""
        return f"{self.iteration:07d}_{self.stamp}"

    @property
    def training_id(self) -> str:
        """The id of the training that saved it; empty if there is none."""
        return self.stamp[_TIME_DIGITS:]


@dataclass(frozen=True, slots=True, order=True)
class LocalShardId:
    """What one rank saved in one save; any rank may hold a copy."""

    save: SaveId
    global_rank: int

    def __str__(self) -> str:
        """Such as ``iter_0000100_3_local_18f2…``: iteration, rank, stamp."""
        return f"iter_{self.save.iteration:07d}_{self.global_rank}_local_{self.save.stamp}"

    @classmethod
    def of(cls, save: str, global_rank: int) -> Self | None:
        """The id of a rank's shard, given the text of the save; None if it is none."""
        iteration, _, stamp = save.partition("_")
        return cls.parse(f"iter_{iteration}_{global_rank}_local_{stamp}")

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """The id that has this text; None if it is none."""
        match = _ID.fullmatch(text)
        if match is None:
            return None
        shard = cls(SaveId(int(match[1]), match[3]), int(match[2]))
        return shard if str(shard) == text else None


def build_cliques(
    world_size: int, replication_jump: int, replication_factor: int, *, allow_uneven: bool = False
) -> tuple[Clique, ...]:
    """The cliques of all ranks, in the order of their first ranks.

    With J (``replication_jump``) ranks between a copy and the next, and F (``replication_factor``)
    copies of each shard, its owner's among them, a clique is ``n, n+J, ..., n+(F-1)J`` for ``n =
    aJF + b``, ``0 <= b < J``. J is the number of ranks that fail together: those of a node, or of a
    rack.

    Where the world size is not divisible by JF, ``allow_uneven`` makes some cliques larger; none is
    smaller than F. The ranks left over join, in order, the last cliques, so that two of one node
    are never in one clique. Raises a PlanError if the numbers do not fit.

    Source: the replication groups of NVIDIA's resiliency extension.
    """
    for name, number in (
        ("world_size", world_size),
        ("replication_jump", replication_jump),
        ("replication_factor", replication_factor),
    ):
        if number < 1:
            raise PlanError(f"{name}: expected 1 or more, found {number}")
    block = replication_jump * replication_factor
    if world_size % block and not allow_uneven:
        raise PlanError(
            f"world size {world_size} is not divisible by replication_jump * replication_factor = "
            f"{replication_jump} * {replication_factor} = {block}; choose others, or "
            "allow_uneven=True for some larger cliques"
        )
    num_blocks = world_size // block
    if num_blocks == 0:
        raise PlanError(
            f"{replication_factor} copies of each shard need as many nodes of {replication_jump} "
            f"ranks (replication_jump); world size {world_size} makes "
            f"{world_size // replication_jump}"
        )
    starts = [a * block + b for a in range(num_blocks) for b in range(replication_jump)]
    cliques = [
        [start + copy * replication_jump for copy in range(replication_factor)] for start in starts
    ]
    taken = {rank for clique in cliques for rank in clique}
    left = [rank for rank in range(world_size) if rank not in taken]
    for place, rank in enumerate(left, start=-len(left) % len(cliques)):
        cliques[place % len(cliques)].append(rank)
    return tuple(tuple(sorted(clique)) for clique in cliques)


def build_retention(
    complete: Collection[SaveId], newest: SaveId, num_kept: int
) -> frozenset[SaveId]:
    """The saves to keep: the newest, and before it as many as there is to be.

    A save of a later iteration belongs to a run that went back since; kept, it would be taken for
    the newest. ``complete`` are the saves whose shards are all there.
    """
    earlier = sorted(
        (save for save in complete if save < newest and save.iteration < newest.iteration),
        reverse=True,
    )
    one_each: dict[int, SaveId] = {}
    for save in earlier:
        one_each.setdefault(save.iteration, save)
    return frozenset([newest, *list(one_each.values())[: num_kept - 1]])


@dataclass(frozen=True, slots=True)
class Transfer:
    """One shard, from a rank that can read it to one that wants it; both may be the same."""

    id_: str
    sender: int
    receiver: int


@dataclass(frozen=True, slots=True)
class ExchangePlan:
    """Who reads which shard for whom; equal on all ranks, but for ``own_rank``, who holds it.

    Entries are sorted by receiver, then by id.
    """

    entries: tuple[Transfer, ...]
    own_rank: int | None = field(default=None, compare=False)

    def required_ids(self, rank: int | None = None) -> set[str]:
        """Ids of the shards that a rank, by default this one, needs for itself or for others."""
        sender = self.own_rank if rank is None else rank
        return {t.id_ for t in self.entries if t.sender == sender}


def build_exchange_plan(
    available: Mapping[int, Collection[str]],
    wanted: Mapping[int, Sequence[str]],
    own_rank: int | None = None,
) -> ExchangePlan:
    """Let every rank read what it can, and spread the rest over those who can.

    For each rank there are the ids of the shards that it can read, and that it wants. Where no rank
    can read one of them, a NoReplicasAvailableError names it and who wants it.
    """
    holders: defaultdict[str, list[int]] = defaultdict(list)
    for rank in sorted(available):
        for shard_id in set(available[rank]):
            holders[shard_id].append(rank)
    transfers: list[Transfer] = []
    load: Counter[int] = Counter()
    for receiver in sorted(wanted):
        for shard_id in sorted(set(wanted[receiver])):
            able = holders.get(shard_id, ())
            if not able:
                raise NoReplicasAvailableError(
                    None,
                    f"no rank has a copy of {shard_id}, which rank {receiver} wants",
                    key=shard_id,
                )
            sender = _least_loaded(able, load, receiver)
            load[sender] += 1
            transfers.append(Transfer(shard_id, sender, receiver))
    return ExchangePlan(tuple(transfers), own_rank)


def _least_loaded(able: Collection[int], load: Mapping[int, int], receiver: int) -> int:
    """The receiver itself if it is able, else the rank that sends least so far."""
    return receiver if receiver in able else min(able, key=lambda rank: (load[rank], rank))


@dataclass(frozen=True, slots=True)
class Completeness:
    """What there is of one save; ``missing`` are the ranks whose shards no rank can read."""

    save: SaveId
    world_size: int
    missing: tuple[int, ...]


def group_saves(found: Iterable[tuple[LocalShardId, int]]) -> tuple[Completeness, ...]:
    """What there is of each save, the newest first, given id and world size of each shard.

    Shards that state different world sizes are of different saves, the largest world first.
    """
    ranks: defaultdict[tuple[SaveId, int], set[int]] = defaultdict(set)
    for shard_id, world_size in found:
        if shard_id.global_rank < world_size:
            ranks[shard_id.save, world_size].add(shard_id.global_rank)
    return tuple(
        Completeness(save, size, tuple(rank for rank in range(size) if rank not in there))
        for (save, size), there in sorted(ranks.items(), reverse=True)
    )


def build_distribution(held: Sequence[Sequence[ShardSpec]]) -> dict[ShardId, int]:
    """The main rank of each shard, one of its holders, given what each rank holds.

    Shards with few holders come first, since they leave the least choice, then the largest; each
    goes to the holder that has the least so far.
    """
    holders: defaultdict[ShardId, set[int]] = defaultdict(set)
    nbytes: dict[ShardId, int] = {}
    for rank, specs in enumerate(held):
        for spec in specs:
            holders[spec.id].add(rank)
            nbytes[spec.id] = spec.nbytes
    load: Counter[int] = Counter()
    main_ranks: dict[ShardId, int] = {}
    for shard in sorted(holders, key=lambda s: (len(holders[s]), -nbytes[s], s)):
        main_ranks[shard] = min(holders[shard], key=lambda rank: (load[rank], rank))
        load[main_ranks[shard]] += nbytes[shard]
    return main_ranks


@dataclass(frozen=True, slots=True)
class ShardSlice:
    """A part of a shard, from a rank that holds it to one that wants something around it.

    ``region`` is what the held shard, ``source``, and the wanted one, ``target``, share. Sender and
    receiver, within the group, may be the same.
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
) -> tuple[ShardSlice, ...]:
    """Cover every wanted shard by parts of held ones, from the rank itself if possible.

    For each rank there is what it holds, replicas are welcome, and what it wants and does not hold
    as it is; array shapes are equal. Raises a CoverageError if no rank holds a part of something
    that is wanted.
    """
    holders: defaultdict[str, dict[Region, list[int]]] = defaultdict(dict)
    arrays: dict[str, tuple[Shape, DType]] = {}
    for rank, specs in enumerate(held):
        for spec in specs:
            array = (spec.array_shape, spec.dtype)
            if arrays.setdefault(spec.key, array) != array:
                raise PlanError(f"{spec.key}: ranks hold it as {arrays[spec.key]} and as {array}")
            holders[spec.key].setdefault(spec.region, []).append(rank)
    regions = {key: _HeldArray(*arrays[key], of_key) for key, of_key in holders.items()}
    load: Counter[int] = Counter()
    slices: list[ShardSlice] = []
    for rank, specs in enumerate(wanted):
        for spec in sorted(specs, key=lambda spec: spec.id):
            slices += _slices(spec, regions.get(spec.key), rank, load)
    return tuple(slices)


class _HeldArray:
    """The regions of an array that some rank holds, sorted along the dim that divides it most."""

    def __init__(self, shape: Shape, dtype: DType, holders: Mapping[Region, list[int]]) -> None:
        self.dtype, self.holders = dtype, holders
        dims = range(len(shape))
        self._dim = max(dims, key=lambda d: len({r.offset[d] for r in holders}), default=None)
        self._regions = sorted(holders, key=self._first)
        self._starts = [self._first(region) for region in self._regions]
        self._longest = max(self._end(r) - self._first(r) for r in holders)

    def _first(self, region: Region) -> int:
        return 0 if self._dim is None else region.offset[self._dim]

    def _end(self, region: Region) -> int:
        return 1 if self._dim is None else region.end[self._dim]

    def near(self, region: Region) -> list[Region]:
        """Every region that shares an element with this one, and perhaps others, sorted."""
        first = bisect_right(self._starts, self._first(region) - self._longest)
        return sorted(self._regions[first : bisect_left(self._starts, self._end(region))])


def _slices(
    spec: ShardSpec, held: _HeldArray | None, rank: int, load: Counter[int]
) -> list[ShardSlice]:
    """Parts of held shards that make up a wanted one: one held whole, else all that it meets."""
    who = f"{spec.key}: rank {rank} wants {spec.region}"
    if held is None:
        raise CoverageError(f"{who}, but no local shard of the checkpoint has it", key=spec.key)
    found = []
    for source in [spec.region] if spec.region in held.holders else held.near(spec.region):
        shared = source.intersect(spec.region)
        if shared is None:
            continue
        sender = _least_loaded(held.holders[source], load, rank)
        one = ShardSlice(ShardId(spec.key, source), spec.id, shared, held.dtype, sender, rank)
        if sender != rank:
            load[sender] += one.nbytes
        found.append(one)
    covered = sum(one.region.numel for one in found)
    if covered != spec.region.numel:
        raise CoverageError(
            f"{who}, of {spec.region.numel} elements; the checkpoint's local shards hold {covered} "
            "of them",
            key=spec.key,
        )
    return found
