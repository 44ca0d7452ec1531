"""Which ranks keep copies for each other."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from dist_ckpt_strategies.core.array import ShardId
from dist_ckpt_strategies.errors import NoReplicasAvailableError, PlanError
from dist_ckpt_strategies.local.shard_format import LocalShardId, SaveId

Clique = tuple[int, ...]
"""Global ranks that keep copies for each other, ascending."""


def build_cliques(
    world_size: int, replication_jump: int, replication_factor: int, *, allow_uneven: bool = False
) -> tuple[Clique, ...]:
    """The cliques of all ranks, in the order of their first ranks.

    With J ranks between a copy and the next, and F copies, a clique is ``n, n+J, ..., n+(F-1)J``
    for ``n = aJF + b``, ``0 <= b < J``. J is the number of ranks that fail together: those of a
    node, or of a rack.

    Args:
        world_size: W, all ranks.
        replication_jump: J.
        replication_factor: F, copies of each shard, its owner's among them.
        allow_uneven: where W is not divisible by JF, make some cliques larger; none is smaller
            than F. The ranks left over join, in order, the last cliques, so that two of one node
            are never in one clique if there is a full block of JF ranks.

    Raises:
        PlanError: a number is less than 1; W is not divisible by JF and ``allow_uneven`` is not
            set; or there are fewer than F nodes of J ranks.

    Source: the replication groups of NVIDIA's resiliency extension.
    """
    _require_positive(world_size, replication_jump, replication_factor)
    block = replication_jump * replication_factor
    if world_size % block and not allow_uneven:
        raise PlanError(
            f"world size {world_size} is not divisible by replication_jump * replication_factor = "
            f"{replication_jump} * {replication_factor} = {block}; choose others, or "
            "allow_uneven=True for some larger cliques"
        )
    num_nodes = -(-world_size // replication_jump)
    if num_nodes < replication_factor:
        raise PlanError(
            f"{replication_factor} copies of each shard need as many nodes of {replication_jump} "
            f"ranks (replication_jump); world size {world_size} makes {num_nodes}"
        )
    num_blocks = world_size // block
    if num_blocks == 0:  # F nodes, the last one not full
        num_columns = world_size - replication_jump * (replication_factor - 1)
        starts = list(range(num_columns))
    else:
        starts = [a * block + b for a in range(num_blocks) for b in range(replication_jump)]
    cliques = [
        [start + copy * replication_jump for copy in range(replication_factor)] for start in starts
    ]
    taken = {rank for clique in cliques for rank in clique}
    left = [rank for rank in range(world_size) if rank not in taken]
    for place, rank in enumerate(left, start=-len(left) % len(cliques)):
        cliques[place % len(cliques)].append(rank)
    return tuple(tuple(sorted(clique)) for clique in cliques)


def _require_positive(world_size: int, replication_jump: int, replication_factor: int) -> None:
    values = {
        "world_size": world_size,
        "replication_jump": replication_jump,
        "replication_factor": replication_factor,
    }
    for name, value in values.items():
        if value < 1:
            raise PlanError(f"{name}: expected 1 or more, found {value}")


def build_retention(
    complete: Collection[SaveId], newest: SaveId, num_kept: int
) -> frozenset[SaveId]:
    """The saves to keep: the newest, and before it as many as there is to be.

    A save of a later iteration belongs to a run that went back since; it is not kept, lest it be
    taken for the newest.

    Args:
        complete: the saves whose shards are all there.
        newest: the save that has just been made.
        num_kept: how many to keep, 1 or more.
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
    """Who reads which shard for whom.

    Attributes:
        transfers: all of them, sorted by receiver, then by id.
        own_rank: who holds this plan, where that is known; the plan is equal on all ranks.
    """

    transfers: tuple[Transfer, ...]
    own_rank: int | None = field(default=None, compare=False)

    @property
    def entries(self) -> tuple[Transfer, ...]:
        """All transfers, under the name that users of NVRx know."""
        return self.transfers

    def required_ids(self, rank: int | None = None) -> set[str]:
        """Ids of the shards that a rank has to have, for itself or for others.

        Args:
            rank: by default the one that holds this plan.

        Raises:
            PlanError: no rank has said who holds it.
        """
        sender = self.own_rank if rank is None else rank
        if sender is None:
            raise PlanError("required_ids: expected a rank; this plan does not say whose it is")
        return {t.id_ for t in self.transfers if t.sender == sender}

    def held_by(self, rank: int) -> ExchangePlan:
        """The same plan, in the hands of a rank."""
        return replace(self, own_rank=rank)

    def renumbered(self, numbers: Mapping[int, int]) -> ExchangePlan:
        """The plan with other numbers for its ranks.

        Raises:
            PlanError: a rank of the plan has no other number.
        """
        for t in self.transfers:
            for rank in (t.sender, t.receiver):
                if rank not in numbers:
                    raise PlanError(f"{t.id_}: rank {rank} is not one of {sorted(numbers)}")
        return ExchangePlan(
            tuple(Transfer(t.id_, numbers[t.sender], numbers[t.receiver]) for t in self.transfers)
        )


def build_exchange_plan(
    available: Mapping[int, Collection[str]], wanted: Mapping[int, Sequence[str]]
) -> ExchangePlan:
    """Let every rank read what it can, and spread the rest over those who can.

    Args:
        available: for each rank the ids of the shards that it can read.
        wanted: for each rank the ids that it wants.

    Raises:
        NoReplicasAvailableError: no rank can read one of them; names it and who wants it.
    """
    holders: defaultdict[str, list[int]] = defaultdict(list)
    for rank in sorted(available):
        for shard_id in set(available[rank]):
            holders[shard_id].append(rank)
    transfers: list[Transfer] = []
    load: Counter[int] = Counter()
    for receiver in sorted(wanted):
        for shard_id in sorted(set(wanted[receiver])):
            sender = _sender(receiver, shard_id, holders.get(shard_id, ()), load)
            load[sender] += 1
            transfers.append(Transfer(shard_id, sender, receiver))
    return ExchangePlan(tuple(transfers))


def _sender(receiver: int, shard_id: str, holders: Sequence[int], load: Mapping[int, int]) -> int:
    if not holders:
        raise NoReplicasAvailableError(
            None, f"no rank has a copy of {shard_id}, which rank {receiver} wants", key=shard_id
        )
    if receiver in holders:
        return receiver
    return min(holders, key=lambda rank: (load[rank], rank))


@dataclass(frozen=True, slots=True)
class Completeness:
    """What there is of one save.

    Attributes:
        save: the save.
        world_size: ranks that took part in it.
        missing: ranks whose shards no rank can read.
        kinds: how the states are encoded.
    """

    save: SaveId
    world_size: int
    missing: tuple[int, ...]
    kinds: frozenset[str] = frozenset()


def build_survey(found: Iterable[tuple[LocalShardId, int, str]]) -> tuple[Completeness, ...]:
    """What there is of each save, the newest first.

    Shards that state different world sizes are of different saves, the largest world first.

    Args:
        found: every shard that some rank can read, the world size that it states, and its kind.
    """
    kinds: defaultdict[tuple[SaveId, int], dict[int, str]] = defaultdict(dict)
    for shard_id, world_size, kind in found:
        if shard_id.global_rank < world_size:
            kinds[shard_id.save, world_size][shard_id.global_rank] = kind
    return tuple(
        Completeness(
            save,
            world_size,
            tuple(rank for rank in range(world_size) if rank not in of_save),
            frozenset(of_save.values()),
        )
        for (save, world_size), of_save in sorted(kinds.items(), reverse=True)
    )


def spread_shards(
    save: SaveId, old_size: int, available: Mapping[int, Collection[str]]
) -> dict[int, tuple[str, ...]]:
    """Which ranks take over the shards of a world of another size: few each, readable if possible.

    Every rank gets one at least; where there are more ranks than shards, some shards go to several.

    Args:
        save: whose shards.
        old_size: ranks that took part in the save.
        available: for each rank of today the ids of the shards that it can read.
    """
    taken: dict[int, list[str]] = {rank: [] for rank in sorted(available)}
    readers: defaultdict[str, list[int]] = defaultdict(list)
    for rank in taken:
        for shard_id in set(available[rank]):
            readers[shard_id].append(rank)
    for old_rank in range(old_size):
        shard_id = str(LocalShardId(save, old_rank))
        chosen = min(readers.get(shard_id, taken), key=lambda rank: (len(taken[rank]), rank))
        taken[chosen].append(shard_id)
    for place, rank in enumerate(taken):
        if not taken[rank]:
            taken[rank].append(str(LocalShardId(save, place % old_size)))
    return {rank: tuple(ids) for rank, ids in taken.items()}


def build_spread(
    holders: Mapping[ShardId, Sequence[int]], nbytes: Mapping[ShardId, int]
) -> dict[ShardId, int]:
    """The rank that keeps each shard, one of its holders.

    Shards with few holders come first, since they leave the least choice, then the largest; each
    goes to the holder that has the least so far.

    Args:
        holders: for each shard the ranks that hold it.
        nbytes: size of each shard, in bytes.

    Raises:
        PlanError: no rank holds a shard.
    """
    load: Counter[int] = Counter()
    keepers: dict[ShardId, int] = {}
    for shard in sorted(holders, key=lambda s: (len(holders[s]), -nbytes[s], s)):
        if not holders[shard]:
            raise PlanError(f"{shard.key}: no rank holds {shard.region}", key=shard.key)
        keepers[shard] = min(holders[shard], key=lambda rank: (load[rank], rank))
        load[keepers[shard]] += nbytes[shard]
    return keepers
