"""How far ranks are within a step of training, and how all get to the same one."""

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
    """How far a rank is within its step; the numbers grow with it."""

    RUNNING = 0
    """Forward or backward: the state is that of the step's beginning, but weights may be old."""

    GRADS_FINAL = 1
    """The GPU is done with the gradients; the state is still that of the step's beginning."""

    COMMITTED = 2
    """All ranks have committed the step: the gradients of all are final, so it counts."""

    UPDATING = 3
    """Some tensors of the shards are new, others old."""

    UPDATED = 4
    """The shard is that of the next step; weights that others' shards make up may be old."""


_MAX_SHOWN = 8


class Role(StrEnum):
    """Role of a rank's state in a recovery."""

    KEEP = "keep"
    """It is that of the target."""

    FINISH_STEP = "finish step"
    """The rank finishes its step from its own gradients."""

    RECEIVE = "receive"
    """The rank has none, or none that can be used."""


@dataclass(frozen=True, slots=True)
class ShardInfo:
    """A replicated shard of a rank's state.

    Ranks that name a shard alike hold equal copies of it. Its tensors lie one right after the
    other; ``layout`` is a digest of their names, dtypes and shapes.
    """

    shard_id: str
    nbytes: int
    layout: str


@dataclass(frozen=True, slots=True)
class HeldState:
    """State that a rank has kept through the fault; shards are sorted by id."""

    step: int
    phase: Phase
    shards: tuple[ShardInfo, ...]


@dataclass(frozen=True, slots=True)
class RankInput:
    """The state that one rank has and needs. Its size does not depend on the number of ranks.

    Attributes:
        wanted: the shards of its new state, sorted by id.
        gathered: ids of those that the ranks gather from the others, once they have these.
        held: what it has kept; None if nothing.
        why: why nothing, or no shards, in words.
        random_states: of which ranks it has the random states at the beginning of which step; see
            ``evenly_spaced``. None where none are needed.
    """

    wanted: tuple[ShardInfo, ...]
    gathered: tuple[str, ...]
    held: HeldState | None
    why: str = "has no state"
    random_states: tuple[tuple[int, range], ...] | None = ()


@dataclass(frozen=True, slots=True)
class ShardCopy:
    """A replicated shard, from a rank that has it to one that wants it."""

    receiver: int
    shard_id: str
    nbytes: int
    source: int


@dataclass(frozen=True, slots=True)
class RecoveryPlan:
    """How all ranks get to the same step.

    Attributes:
        target: the step that is run next.
        roles: of every rank.
        holders: for each shard the ranks that hold it at the target, once steps are finished. Not
            there: shards that are gathered.
        copies: sorted by receiver and shard.
        object_sources: for every rank whose objects it takes; its own where it has them. Tensors
            and objects of one rank need not come from the same other one.
        random_sources: for every rank who has its random states; itself where it has them.
        needs_gather: whether there are such shards: all ranks gather them at the end.
    """

    target: int
    roles: tuple[Role, ...]
    holders: tuple[tuple[str, tuple[int, ...]], ...]
    copies: tuple[ShardCopy, ...]
    object_sources: tuple[int, ...]
    random_sources: tuple[int, ...]
    needs_gather: bool

    def local_shards(self, rank: int) -> tuple[str, ...]:
        """Shards of which a rank has its own copy at the target."""
        return tuple(shard_id for shard_id, ranks in self.holders if rank in ranks)


def evenly_spaced(ranks: Iterable[int]) -> tuple[range, ...]:
    """The ranks as ranges: one, if they are evenly spaced, as those of most groups are."""
    found: list[range] = []
    for rank in sorted(ranks):
        last = found[-1] if found else range(0)
        if len(last) == 1:
            found[-1] = range(last[0], rank + 1, rank - last[0])
        elif last and rank == last[-1] + last.step:
            found[-1] = range(last[0], rank + 1, last.step)
        else:
            found.append(range(rank, rank + 1))
    return tuple(found)


def build_recovery_plan(inputs: Sequence[RankInput]) -> RecoveryPlan:
    """Decide from what every rank has how all get to the same step; layouts of a shard are equal.

    Raises a NoReplicasAvailableError if no rank has state, or none holds a shard, the objects, or
    some rank's random states, at the target; names it, and the ranks that might have.
    """
    target = _target(inputs)
    roles = tuple(_role(one.held, target) for one in inputs)
    # Always: no phase says whether a GPU has gathered them, or has been aborted in it.
    gathered = {shard_id for one in inputs for shard_id in one.gathered}
    ready = {
        rank: one.held.shards
        for rank, (one, role) in enumerate(zip(inputs, roles, strict=True))
        if one.held is not None and role is not Role.RECEIVE
    }
    sharing: defaultdict[str, list[int]] = defaultdict(list)
    for rank, shards in ready.items():
        for shard in shards:
            sharing[shard.shard_id].append(rank)
    holders = {shard_id: tuple(r) for shard_id, r in sharing.items() if shard_id not in gathered}
    copies = tuple(_copies(inputs, roles, holders, target, gathered))
    if not ready:
        why = _reasons({rank: _why_not(one, roles[rank]) for rank, one in enumerate(inputs)})
        raise NoReplicasAvailableError(None, f"no rank has the state of step {target}: {why}")
    return RecoveryPlan(
        target,
        roles,
        tuple(sorted(holders.items())),
        copies,
        tuple(_object_sources(inputs, list(ready), sharing)),
        tuple(_random_sources(inputs, target)),
        bool(gathered),
    )


def require_equal_layouts(inputs: Sequence[RankInput]) -> None:
    """Raise a PlanError unless the tensors of each shard are the same everywhere."""
    first: dict[str, tuple[str, ShardInfo]] = {}
    for rank, one in enumerate(inputs):
        wanted = [(f"rank {rank} asks for", shard) for shard in one.wanted]
        kept = [(f"rank {rank} has kept", shard) for shard in (one.held.shards if one.held else ())]
        for what, shard in wanted + kept:
            other, known = first.setdefault(shard.shard_id, (what, shard))
            if known != shard:
                raise PlanError(
                    f"{shard.shard_id}: tensors differ: {other} {known.nbytes} bytes, {what} "
                    f"{shard.nbytes} bytes; expected the same names, dtypes and shapes wherever a "
                    "shard has one id: build the state as it was in that step",
                    key=shard.shard_id,
                )


def require_equal_copies(digests: Sequence[Mapping[str, str]]) -> None:
    """Raise unless all copies of each shard are equal, given the digests of every rank by shard.

    The CorruptCheckpointError names the ranks by what they have.
    """
    by_shard: defaultdict[str, defaultdict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, found in enumerate(digests):
        for shard_id, digest in found.items():
            by_shard[shard_id][digest].append(rank)
    for shard_id, ranks_with in sorted(by_shard.items()):
        if len(ranks_with) > 1:
            shown = "; ".join(f"{digest} on {_ranks(r)}" for digest, r in ranks_with.items())
            raise CorruptCheckpointError(f"{shard_id}: copies differ: {shown}", key=shard_id)


def _target(inputs: Sequence[RankInput]) -> int:
    held = [one.held for one in inputs if one.held is not None]
    if not held:
        why = _reasons({rank: one.why for rank, one in enumerate(inputs)})
        raise NoReplicasAvailableError(None, f"no rank has kept its state: {why}")
    return max(state.step + (state.phase >= Phase.COMMITTED) for state in held)


def _reasons(why_of: Mapping[int, str]) -> str:
    """Why each rank is no holder; what is the same on several ranks is said once."""
    ranks_with: defaultdict[str, list[int]] = defaultdict(list)
    for rank, why in why_of.items():
        ranks_with[why].append(rank)
    return "; ".join(f"{_ranks(r)}: {why}" for why, r in list(ranks_with.items())[:_MAX_SHOWN])


def _role(held: HeldState | None, target: int) -> Role:
    if held is None:
        return Role.RECEIVE
    if held.step == target:
        return Role.KEEP
    if held.step == target - 1:
        if held.phase is Phase.UPDATED:
            return Role.KEEP
        if held.phase in {Phase.GRADS_FINAL, Phase.COMMITTED}:
            return Role.FINISH_STEP
    return Role.RECEIVE


def _copies(
    inputs: Sequence[RankInput],
    roles: Sequence[Role],
    holders: Mapping[str, tuple[int, ...]],
    target: int,
    gathered: set[str],
) -> Iterator[ShardCopy]:
    ranks_with = {shard_id: frozenset(ranks) for shard_id, ranks in holders.items()}
    for receiver, one in enumerate(inputs):
        for shard in one.wanted:
            sources = holders.get(shard.shard_id, ())
            if shard.shard_id in gathered or receiver in ranks_with.get(shard.shard_id, ()):
                continue
            if not sources:
                lost = {
                    rank: _why_not(other, roles[rank])
                    for rank, other in enumerate(inputs)
                    if any(wanted.shard_id == shard.shard_id for wanted in other.wanted)
                }
                raise NoReplicasAvailableError(
                    None,
                    f"{shard.shard_id}: no rank holds it at step {target}, and rank {receiver} "
                    f"needs it: {_reasons(lost)}",
                    key=shard.shard_id,
                )
            if shard.nbytes:  # several receivers of a shard have different sources
                source = sources[receiver % len(sources)]
                yield ShardCopy(receiver, shard.shard_id, shard.nbytes, source)


def _why_not(one: RankInput, role: Role) -> str:
    if one.held is None:
        return one.why
    if role is not Role.RECEIVE:
        return one.why or f"is at the target, but without it (step {one.held.step})"
    if one.held.phase is Phase.UPDATING:
        return f"was interrupted in its update of step {one.held.step}: its state is inconsistent"
    return f"has the state of step {one.held.step}, {one.held.phase.name}"


def _object_sources(
    inputs: Sequence[RankInput], ready: Sequence[int], sharing: Mapping[str, Sequence[int]]
) -> Iterator[int]:
    """Of those at the target, the one that shares most shards; objects are equal among these."""
    is_ready = frozenset(ready)
    best: dict[frozenset[str], int] = {}
    for rank, one in enumerate(inputs):
        wanted = frozenset(shard.shard_id for shard in one.wanted)
        if rank not in is_ready and wanted not in best:
            shared = Counter(source for shard_id in wanted for source in sharing.get(shard_id, ()))
            best[wanted] = min(shared, key=lambda s: (-shared[s], s), default=ready[0])
        yield rank if rank in is_ready else best[wanted]


def _random_sources(inputs: Sequence[RankInput], target: int) -> Iterator[int]:
    """The rank itself where it has its own random states, else the first that has them."""
    if any(one.random_states is None for one in inputs):
        yield from range(len(inputs))
        return
    known = [[r for step, r in one.random_states or () if step == target] for one in inputs]
    own = {rank for rank, found in enumerate(known) if any(rank in ranks for ranks in found)}
    sources: dict[range, int] = {}
    for source, found in enumerate(known):
        for ranks in found:
            sources.setdefault(ranks, source)
    first: dict[int, int] = {}
    for ranks, source in sources.items():
        first = dict.fromkeys(ranks, source) | first
    for rank in range(len(inputs)):
        if rank not in first:
            raise NoReplicasAvailableError(
                None, f"no rank has the random states of rank {rank} at the beginning of {target}"
            )
        yield rank if rank in own else first[rank]


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:_MAX_SHOWN]))
    more = f" and {len(ranks) - _MAX_SHOWN} more" if len(ranks) > _MAX_SHOWN else ""
    return f"rank{'s' if ranks[1:] else ''} {shown}{more}"
