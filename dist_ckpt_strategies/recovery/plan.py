"""How far a rank is within a step of training."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum

from dist_ckpt_strategies.errors import (
    CorruptCheckpointError,
    NoReplicasAvailableError,
    PlanError,
)


class Phase(IntEnum):
    """How far a rank is within its step; the numbers grow as it goes on."""

    RUNNING = 0
    """Forward or backward: the state is that of the step's beginning."""

    GRADS_FINAL = 1
    """No gradient changes any more; the state is still that of the step's beginning."""

    COMMITTED = 2
    """The vote is over: the gradients of all ranks are final, so the step counts."""

    UPDATING = 3
    """Some tensors of the parts are new, others old."""

    UPDATED = 4
    """The shard is that of the next step; weights that others' shards make up may be old."""


_MAX_SHOWN = 8
_SHORT_WHY = 40

ALIGNMENT_NBYTES = 4096
"""Where a part is split over its holders: multiples of it, so that few tensors are cut oddly."""


class Role(StrEnum):
    """What becomes of a rank's state."""

    KEEP = "keep"
    """It is that of the target."""

    ROLL_FORWARD = "roll forward"
    """The rank finishes its step from its own gradients."""

    RECEIVE = "receive"
    """The rank has none, or none that can be used."""


@dataclass(frozen=True, slots=True)
class PartFacts:
    """A part of a rank's state.

    Attributes:
        part_id: ranks that name a part alike hold equal copies of it.
        nbytes: bytes of its tensors, one behind the other.
        layout: digest of the names, dtypes and shapes of its tensors.
        digest: of its bytes; None where it was not requested.
    """

    part_id: str
    nbytes: int
    layout: str
    digest: str | None = None


@dataclass(frozen=True, slots=True)
class HeldState:
    """State that a rank has kept through the fault.

    Attributes:
        step: that it was in.
        phase: how far it was within it.
        parts: sorted by id.
    """

    step: int
    phase: Phase
    parts: tuple[PartFacts, ...]


@dataclass(frozen=True, slots=True)
class RankFacts:
    """What one rank has, and what it needs.

    Attributes:
        wanted: the parts of its new state, sorted by id.
        gathered: ids of those that the ranks make anew from the others, once they have these.
        held: what it has kept; None if nothing.
        why: why nothing, or no parts, in words.
        random_states: whose random states it has, and of the beginning of which step.
    """

    wanted: tuple[PartFacts, ...]
    gathered: tuple[str, ...]
    held: HeldState | None
    why: str = "has no state"
    random_states: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class ByteCopy:
    """Bytes of a part, from a rank that has them to one that wants them."""

    receiver: int
    part_id: str
    start: int
    nbytes: int
    source: int


@dataclass(frozen=True, slots=True)
class RecoveryPlan:
    """How all ranks get to the same step.

    Attributes:
        target: the step that is run next.
        roles: of every rank.
        holders: for each part the ranks that hold it at the target, after rolling forward. Not
            there: parts that are gathered.
        copies: sorted by receiver, part and first byte.
        object_sources: for every rank whose objects it takes; its own where it has them. Tensors
            and objects of one rank need not come from the same other one.
        random_sources: for every rank who has its random states; itself where it has them.
        needs_gather: whether all ranks make the gathered parts anew, at the end.
    """

    target: int
    roles: tuple[Role, ...]
    holders: tuple[tuple[str, tuple[int, ...]], ...]
    copies: tuple[ByteCopy, ...]
    object_sources: tuple[int, ...]
    random_sources: tuple[int, ...]
    needs_gather: bool

    def local_parts(self, rank: int) -> tuple[str, ...]:
        """Parts of which a rank has its own copy at the target."""
        return tuple(part_id for part_id, ranks in self.holders if rank in ranks)

    def message_pairs(self) -> tuple[tuple[int, int], ...]:
        """Source and receiver, wherever objects or random states travel."""
        pairs = {
            (source, receiver)
            for sources in (self.object_sources, self.random_sources)
            for receiver, source in enumerate(sources)
            if source != receiver
        }
        return tuple(sorted(pairs))


def build_recovery_plan(facts: Sequence[RankFacts]) -> RecoveryPlan:
    """Decide from what every rank has how all get to the same step.

    Args:
        facts: of every rank, by rank.

    Raises:
        NoReplicasAvailableError: no rank has state, or nobody holds a part, the objects, or some
            rank's random states, at the target; names it, and those who might have.
        PlanError: ranks that share a part have different tensors in it.
        CorruptCheckpointError: copies that should be equal differ; names the ranks.
    """
    target = _target(facts)
    roles = tuple(_role(one.held, target) for one in facts)
    gathered = {part_id for one in facts for part_id in one.gathered}
    is_behind = any(map(_is_behind, (one.held for one in facts), roles))
    needs_gather = is_behind and bool(gathered)
    holders = _holders(facts, roles, gathered if needs_gather else set())
    conflict = find_layout_conflict(facts)
    if conflict is not None:
        part_id, first, second = conflict
        raise PlanError(
            f"{part_id}: other tensors on rank {second} than on rank {first}", key=part_id
        )
    _require_equal_digests(facts, holders)
    skipped = gathered if needs_gather else set()
    return RecoveryPlan(
        target,
        roles,
        tuple(sorted(holders.items())),
        tuple(_copies(facts, roles, holders, target, skipped)),
        tuple(_object_sources(facts, roles, target)),
        tuple(_random_sources(facts, target)),
        needs_gather,
    )


def find_layout_conflict(facts: Sequence[RankFacts]) -> tuple[str, int, int] | None:
    """The first part whose tensors are not the same everywhere, and two ranks that differ."""
    first: dict[str, tuple[int, str, int]] = {}
    for rank, one in enumerate(facts):
        for part in (*one.wanted, *(one.held.parts if one.held else ())):
            known = first.setdefault(part.part_id, (rank, part.layout, part.nbytes))
            if known[1:] != (part.layout, part.nbytes):
                return part.part_id, known[0], rank
    return None


def require_equal_copies(digests: Mapping[str, Mapping[int, str]]) -> None:
    """Raise unless all copies of each part are equal.

    Args:
        digests: by part id and rank.

    Raises:
        CorruptCheckpointError: some differ; names the ranks by what they have.
    """
    for part_id, by_rank in sorted(digests.items()):
        groups: defaultdict[str, list[int]] = defaultdict(list)
        for rank, digest in sorted(by_rank.items()):
            groups[digest].append(rank)
        if len(groups) > 1:
            shown = "; ".join(f"{digest} on {_ranks(ranks)}" for digest, ranks in groups.items())
            raise CorruptCheckpointError(f"{part_id}: copies differ: {shown}", key=part_id)


def _target(facts: Sequence[RankFacts]) -> int:
    held = [one.held for one in facts if one.held is not None]
    if not held:
        why = "; ".join(_each_why(facts[:_MAX_SHOWN]))
        raise NoReplicasAvailableError(None, f"no rank has kept its state: {why}")
    return max(state.step + (state.phase >= Phase.COMMITTED) for state in held)


def _each_why(facts: Sequence[RankFacts]) -> Iterator[str]:
    """Why each rank has nothing; what is the same on several, and long, is said once."""
    first: dict[str, int] = {}
    for rank, one in enumerate(facts):
        known = first.setdefault(one.why, rank)
        is_short = len(one.why) <= _SHORT_WHY
        yield f"rank {rank} {one.why if known == rank or is_short else f'as rank {known}'}"


def _role(held: HeldState | None, target: int) -> Role:
    if held is None:
        return Role.RECEIVE
    if held.step == target:
        return Role.KEEP
    if held.step == target - 1:
        if held.phase is Phase.UPDATED:
            return Role.KEEP
        if held.phase in {Phase.GRADS_FINAL, Phase.COMMITTED}:
            return Role.ROLL_FORWARD
    return Role.RECEIVE


def _is_behind(held: HeldState | None, role: Role) -> bool:
    """Whether the rank's shard is at the target, but weights that others' shards make are not."""
    if held is None or role is Role.RECEIVE:
        return False
    return role is Role.ROLL_FORWARD or held.phase is Phase.UPDATED


def _holders(
    facts: Sequence[RankFacts], roles: Sequence[Role], skipped: set[str]
) -> dict[str, tuple[int, ...]]:
    found: defaultdict[str, list[int]] = defaultdict(list)
    for rank, (one, role) in enumerate(zip(facts, roles, strict=True)):
        if one.held is None or role is Role.RECEIVE:
            continue
        for part in one.held.parts:
            if part.part_id not in skipped:
                found[part.part_id].append(rank)
    return {part_id: tuple(ranks) for part_id, ranks in found.items()}


def _require_equal_digests(
    facts: Sequence[RankFacts], holders: Mapping[str, tuple[int, ...]]
) -> None:
    """Of what is at the target as it is; digests from before a roll-forward say nothing."""
    digests: defaultdict[str, dict[int, str]] = defaultdict(dict)
    ranks_with = _as_sets(holders)
    for rank, one in enumerate(facts):
        for part in one.held.parts if one.held else ():
            if part.digest is not None and rank in ranks_with.get(part.part_id, ()):
                digests[part.part_id][rank] = part.digest
    require_equal_copies(digests)


def _as_sets(holders: Mapping[str, tuple[int, ...]]) -> dict[str, frozenset[int]]:
    """The same, to be asked who is one of them: a part may be on every rank."""
    return {part_id: frozenset(ranks) for part_id, ranks in holders.items()}


def _copies(
    facts: Sequence[RankFacts],
    roles: Sequence[Role],
    holders: Mapping[str, tuple[int, ...]],
    target: int,
    skipped: set[str],
) -> Iterator[ByteCopy]:
    ranks_with = _as_sets(holders)
    for receiver, one in enumerate(facts):
        for part in one.wanted:
            sources = holders.get(part.part_id, ())
            if part.part_id in skipped or receiver in ranks_with.get(part.part_id, ()):
                continue
            if not sources:
                raise _nobody_has(part.part_id, receiver, facts, roles, target)
            yield from _split(part, receiver, sources)


def _split(part: PartFacts, receiver: int, sources: Sequence[int]) -> Iterator[ByteCopy]:
    """The bytes of a part, evenly over those who have it."""
    start = 0
    for number, source in enumerate(sources, start=1):
        end = part.nbytes * number // len(sources)
        if number < len(sources):
            end -= end % ALIGNMENT_NBYTES
        if end > start:
            yield ByteCopy(receiver, part.part_id, start, end - start, source)
            start = end


def _nobody_has(
    part_id: str, receiver: int, facts: Sequence[RankFacts], roles: Sequence[Role], target: int
) -> NoReplicasAvailableError:
    lost = [
        f"rank {rank} {_why_not(one, role)}"
        for rank, (one, role) in enumerate(zip(facts, roles, strict=True))
        if any(part.part_id == part_id for part in one.wanted)
    ]
    return NoReplicasAvailableError(
        None,
        f"{part_id}: no rank holds it at step {target}, and rank {receiver} needs it: "
        + "; ".join(lost),
        key=part_id,
    )


def _why_not(one: RankFacts, role: Role) -> str:
    if one.held is None:
        return one.why
    if role is not Role.RECEIVE:
        return one.why or f"is at the target, but without it (step {one.held.step})"
    if one.held.phase is Phase.UPDATING:
        return f"was interrupted in its update of step {one.held.step}: its state is torn"
    return f"has the state of step {one.held.step}, {one.held.phase.name}"


def _object_sources(
    facts: Sequence[RankFacts], roles: Sequence[Role], target: int
) -> Iterator[int]:
    """Of those at the target, the one that shares most parts; objects are equal among these."""
    sharing: defaultdict[str, list[int]] = defaultdict(list)
    ready: list[int] = []
    for rank, (one, role) in enumerate(zip(facts, roles, strict=True)):
        if one.held is not None and role is not Role.RECEIVE:
            ready.append(rank)
            for part_id in {part.part_id for part in one.held.parts}:
                sharing[part_id].append(rank)
    if not ready:
        why = "; ".join(
            f"rank {rank} {_why_not(one, role)}"
            for rank, (one, role) in enumerate(zip(facts[:_MAX_SHOWN], roles, strict=False))
        )
        raise NoReplicasAvailableError(None, f"no rank has the state of step {target}: {why}")
    is_ready = frozenset(ready)
    for rank, one in enumerate(facts):
        if rank in is_ready:
            yield rank
            continue
        wanted = {part.part_id for part in one.wanted}
        shared = Counter(source for part_id in wanted for source in sharing.get(part_id, ()))
        yield min(shared, key=lambda source: (-shared[source], source), default=ready[0])


def _random_sources(facts: Sequence[RankFacts], target: int) -> Iterator[int]:
    """The rank itself where it has its own random states, else the first that has them."""
    first: dict[int, int] = {}
    for source, one in enumerate(facts):
        for rank, step in one.random_states:
            if step == target and (rank == source or rank not in first):
                first[rank] = source
    for rank in range(len(facts)):
        if rank not in first:
            raise NoReplicasAvailableError(
                None, f"nobody has the random states of rank {rank} at the beginning of {target}"
            )
        yield first[rank]


def _ranks(ranks: Iterable[int]) -> str:
    found = list(ranks)
    return f"rank{'s' if len(found) > 1 else ''} {', '.join(map(str, found))}"
