"""Pure plans: who holds replicas for whom, who sends which shard to whom, which saves stay."""

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Self

from dist_ckpt_strategies.core.array import ShardId, ShardSpec
from dist_ckpt_strategies.errors import NoReplicasAvailableError, PlanError

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
    """The shard of one rank in one save; any rank may hold a copy."""

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
    jump, factor = replication_jump, replication_factor
    if min(world_size, jump, factor) < 1:
        raise PlanError(
            f"expected 1 or more, found world_size {world_size}, replication_jump {jump}, "
            f"replication_factor {factor}"
        )
    num_blocks, num_left = divmod(world_size, jump * factor)
    if num_left and not allow_uneven:
        raise PlanError(
            f"world size {world_size} is not divisible by replication_jump * replication_factor = "
            f"{jump} * {factor} = {jump * factor}; choose others, or allow_uneven=True for some "
            "larger cliques"
        )
    if num_blocks == 0:
        raise PlanError(
            f"{factor} copies of each shard need as many nodes of {jump} ranks "
            f"(replication_jump); world size {world_size} makes {world_size // jump}"
        )
    cliques = [
        [(block * factor + copy) * jump + place for copy in range(factor)]
        for block in range(num_blocks)
        for place in range(jump)
    ]
    for place in range(num_left):
        number = (place - num_left) % len(cliques)
        cliques[number].append(world_size - num_left + place)
    return tuple(map(tuple, cliques))


def build_retention(
    complete: Collection[SaveId], newest: SaveId, num_kept: int
) -> frozenset[SaveId]:
    """The saves to keep: the newest, and before it as many as there is to be.

    A save of a later iteration belongs to a run that went back since; kept, it would be taken for
    the newest. ``complete`` are the saves whose shards are all there; of one iteration the latest
    counts.
    """
    earlier = (save for save in complete if save < newest and save.iteration < newest.iteration)
    by_iteration = {save.iteration: save for save in sorted(earlier)}
    kept = sorted(by_iteration.values(), reverse=True)[: num_kept - 1]
    return frozenset([newest, *kept])


class Transfer(NamedTuple):
    """One shard, from a rank that can read it to one that wants it; both may be the same."""

    id_: str
    sender: int
    receiver: int


@dataclass(frozen=True, slots=True)
class ExchangePlan:
    """Readers and receivers of shards; equal on all ranks, except ``own_rank``, the holder.

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
            if shard_id not in holders:
                raise NoReplicasAvailableError(
                    None,
                    f"no rank has a copy of {shard_id}, which rank {receiver} wants",
                    key=shard_id,
                )
            sender = least_loaded(holders[shard_id], load, receiver)
            load[sender] += 1
            transfers.append(Transfer(shard_id, sender, receiver))
    return ExchangePlan(tuple(transfers), own_rank)


def least_loaded(able: Collection[int], load: Mapping[int, int], receiver: int) -> int:
    """The receiver itself if it is able, else the rank that sends least so far."""
    return receiver if receiver in able else min(able, key=lambda rank: (load[rank], rank))


Save = tuple[SaveId, int]
"""A save and its number of ranks: shards that state different numbers are of different saves."""


def missing_ranks(shards: Iterable[tuple[LocalShardId, int]]) -> dict[Save, list[int]]:
    """The ranks whose shards are not among these, for each save, given id and world size of each.

    The newest save is the first, and within it the one of the largest world.
    """
    there: defaultdict[Save, set[int]] = defaultdict(set)
    for shard_id, world_size in shards:
        if shard_id.global_rank < world_size:
            there[shard_id.save, world_size].add(shard_id.global_rank)
    return {
        save: [rank for rank in range(save[1]) if rank not in ranks]
        for save, ranks in sorted(there.items(), reverse=True)
    }


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
