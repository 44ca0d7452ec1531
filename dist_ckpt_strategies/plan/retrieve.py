"""Where each rank gets the parts that it wants from."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from dist_ckpt_strategies.errors import NoReplicasAvailableError, PlanError
from dist_ckpt_strategies.spec.part import PartId, SaveId


@dataclass(frozen=True, slots=True)
class Transfer:
    """One part, from a rank that can read it to one that wants it; both may be the same."""

    id_: str
    sender: int
    receiver: int


@dataclass(frozen=True, slots=True)
class ExchangePlan:
    """Who reads which part for whom, and when.

    Attributes:
        transfers: all of them, sorted by receiver, then by id.
        steps: those between two ranks, in an order without circles of waiting: in each step a rank
            sends one part at most, and receives one at most.
        own_rank: who holds this plan, where that is known; the plan is equal on all ranks.
    """

    transfers: tuple[Transfer, ...]
    steps: tuple[tuple[Transfer, ...], ...]
    own_rank: int | None = field(default=None, compare=False)

    @property
    def entries(self) -> tuple[Transfer, ...]:
        """All transfers, under the name that users of NVRx know."""
        return self.transfers

    def required_ids(self, rank: int | None = None) -> set[str]:
        """Ids of the parts that a rank has to have, for itself or for others.

        Args:
            rank: by default the one that holds this plan.

        Raises:
            PlanError: nobody has said who holds it.
        """
        sender = self.own_rank if rank is None else rank
        if sender is None:
            raise PlanError("required_ids: expected a rank; this plan does not say whose it is")
        return {t.id_ for t in self.transfers if t.sender == sender}

    def held_by(self, rank: int) -> ExchangePlan:
        """The same plan, in the hands of a rank."""
        return replace(self, own_rank=rank)

    def received_by(self, rank: int) -> tuple[Transfer, ...]:
        """What this rank gets, from itself too."""
        return tuple(t for t in self.transfers if t.receiver == rank)

    def renumbered(self, numbers: Mapping[int, int]) -> ExchangePlan:
        """The plan with other numbers for its ranks.

        Raises:
            PlanError: a rank of the plan has no other number.
        """
        for t in self.transfers:
            for rank in (t.sender, t.receiver):
                if rank not in numbers:
                    raise PlanError(f"{t.id_}: rank {rank} is not one of {sorted(numbers)}")
        return _plan_of(
            Transfer(t.id_, numbers[t.sender], numbers[t.receiver]) for t in self.transfers
        )

    def without(self, excluded: Collection[Transfer]) -> ExchangePlan:
        """The plan without some of its transfers."""
        left_out = frozenset(excluded)
        return _plan_of(t for t in self.transfers if t not in left_out)


def build_exchange_plan(
    available: Mapping[int, Collection[str]], wanted: Mapping[int, Sequence[str]]
) -> ExchangePlan:
    """Let every rank read what it can, and spread the rest over those who can.

    Args:
        available: for each rank the ids of the parts that it can read.
        wanted: for each rank the ids that it wants.

    Raises:
        NoReplicasAvailableError: nobody can read one of them; names it and who wants it.
    """
    holders: defaultdict[str, list[int]] = defaultdict(list)
    for rank in sorted(available):
        for part_id in set(available[rank]):
            holders[part_id].append(rank)
    transfers: list[Transfer] = []
    load: Counter[int] = Counter()
    for receiver in sorted(wanted):
        for part_id in sorted(set(wanted[receiver])):
            sender = _sender(receiver, part_id, holders.get(part_id, ()), load)
            load[sender] += 1
            transfers.append(Transfer(part_id, sender, receiver))
    return _plan_of(transfers)


def _plan_of(transfers: Iterable[Transfer]) -> ExchangePlan:
    """Every transfer in the first step in which neither of its ranks does the same already."""
    found = tuple(transfers)
    steps: list[list[Transfer]] = []
    taken: defaultdict[tuple[str, int], int] = defaultdict(int)  # steps as bits
    for transfer in found:
        if transfer.sender == transfer.receiver:
            continue
        ends = ("sends", transfer.sender), ("receives", transfer.receiver)
        busy = taken[ends[0]] | taken[ends[1]]
        number = (~busy & (busy + 1)).bit_length() - 1  # the lowest bit that is not set
        for end in ends:
            taken[end] |= 1 << number
        if number == len(steps):
            steps.append([])
        steps[number].append(transfer)
    return ExchangePlan(found, tuple(map(tuple, steps)))


def _sender(receiver: int, part_id: str, holders: Sequence[int], load: Mapping[int, int]) -> int:
    if not holders:
        raise NoReplicasAvailableError(
            None, f"no rank has a copy of {part_id}, which rank {receiver} wants", key=part_id
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
        missing: ranks whose parts nobody can read.
    """

    save: SaveId
    world_size: int
    missing: tuple[int, ...]


def choose_world_sizes(found: Iterable[tuple[PartId, int]]) -> dict[SaveId, int]:
    """The world size of each save. Parts that state another one are not of it.

    Parts of one save that were written together state the same. Where some do not, the largest
    world of which every part is there counts; where there is none, the one with most parts.

    Args:
        found: every part that some rank can read, with the world size that it states.
    """
    ranks: defaultdict[tuple[SaveId, int], set[int]] = defaultdict(set)
    for part_id, world_size in found:
        ranks[part_id.save, world_size].add(part_id.global_rank)
    best: dict[SaveId, tuple[bool, int, int]] = {}
    for (save, world_size), of_world in ranks.items():
        present = sum(rank < world_size for rank in of_world)
        merit = (present == world_size, present, world_size)
        best[save] = max(merit, best.get(save, merit))
    return {save: world_size for save, (_, _, world_size) in best.items()}


def build_survey(found: Iterable[tuple[PartId, int]]) -> tuple[Completeness, ...]:
    """What there is of each save, the newest first.

    Args:
        found: every part that some rank can read, with the world size that it states.

    Raises:
        PlanError: the parts of one save state different world sizes.
    """
    ranks: defaultdict[SaveId, set[int]] = defaultdict(set)
    sizes: dict[SaveId, int] = {}
    for part_id, world_size in sorted(set(found)):
        if sizes.setdefault(part_id.save, world_size) != world_size:
            raise PlanError(
                f"{part_id} was saved by {world_size} ranks, and another part of the same save by "
                f"{sizes[part_id.save]}"
            )
        ranks[part_id.save].add(part_id.global_rank)
    return tuple(
        Completeness(
            save, sizes[save], tuple(r for r in range(sizes[save]) if r not in ranks[save])
        )
        for save in sorted(sizes, reverse=True)
    )


def spread_parts(
    save: SaveId, old_size: int, available: Mapping[int, Collection[str]]
) -> dict[int, tuple[str, ...]]:
    """Which ranks take over the parts of a world of another size: few each, readable if possible.

    Every rank gets one at least; where there are more ranks than parts, some parts go to several.

    Args:
        save: whose parts.
        old_size: ranks that took part in the save.
        available: for each rank of today the ids of the parts that it can read.
    """
    taken: dict[int, list[str]] = {rank: [] for rank in sorted(available)}
    readers: defaultdict[str, list[int]] = defaultdict(list)
    for rank in taken:
        for part_id in set(available[rank]):
            readers[part_id].append(rank)
    for old_rank in range(old_size):
        part_id = str(PartId(save, old_rank))
        chosen = min(readers.get(part_id, taken), key=lambda rank: (len(taken[rank]), rank))
        taken[chosen].append(part_id)
    for place, rank in enumerate(taken):
        if not taken[rank]:
            taken[rank].append(str(PartId(save, place % old_size)))
    return {rank: tuple(ids) for rank, ids in taken.items()}
