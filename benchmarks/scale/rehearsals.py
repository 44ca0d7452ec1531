"""Each planner of the package, fed with what the ranks of a simulated job would tell each other."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import torch

from benchmarks.measuring.quiet import quiet_imports
from benchmarks.scale.job import Job
from dist_ckpt_strategies.comm.base import Exchange, Message, Receive, Send
from dist_ckpt_strategies.config import Options
from dist_ckpt_strategies.core.array import ArraySpec, ShardSpec, array_from_wire, array_to_wire
from dist_ckpt_strategies.core.chunk_grids import ChunkLayout
from dist_ckpt_strategies.core.inner_grid import num_inner_chunks
from dist_ckpt_strategies.core.region import Shape
from dist_ckpt_strategies.formats.manifest import (
    DIGEST_NBYTES,
    ArrayRecord,
    ChunkRecord,
    array_fields,
    merged_segment,
    segment_content,
)
from dist_ckpt_strategies.local.part_format import PartId, SaveId
from dist_ckpt_strategies.local.plan import (
    build_cliques,
    build_exchange_plan,
    build_survey,
    choose_world_sizes,
    spread_parts,
)
from dist_ckpt_strategies.recovery.plan import HeldState, PartFacts, Phase, RankFacts
from dist_ckpt_strategies.sharded.plan_load import build_load_plan
from dist_ckpt_strategies.sharded.plan_save import build_save_plan
from dist_ckpt_strategies.two_stage.plan import build_group_plan, encode_regions

with quiet_imports():
    from dist_ckpt_strategies.recovery.recover import gather_facts, plan_recovery
    from dist_ckpt_strategies.sharded.save import planned_save

COPIES = 2
"""Of each part of a local checkpoint, and of each optimizer shard in memory."""

_GROUPS_PER_PART = 10
"""So many data-parallel groups have their optimizer state listed in a part of about 4 MiB."""

_STEP = 1000
_NUM_SAVES = 2
_INFLIGHT_NBYTES = 512 << 20


class Planner(StrEnum):
    """What is planned."""

    SAVE_1 = "save, format 1"
    SAVE_2 = "save, format 2"
    MANIFEST = "one part of the manifest"
    LOAD = "load, each rank alone"
    TWO_STAGE = "two-stage load"
    LOCAL = "local load, a node lost"
    RESHARD = "local load, half the ranks"
    RECOVERY = "recovery, a node lost"


@dataclass(frozen=True, slots=True)
class Tally:
    """What a plan was made of.

    Attributes:
        num_items: described to it.
        num_steps: rounds or messages that it has.
    """

    num_items: int
    num_steps: int


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """One planner.

    Attributes:
        describe: what each rank of a job tells the others.
        plan: reads that and plans, as rank 0 does.
    """

    describe: Callable[[Job], list[bytes]]
    plan: Callable[[Job, list[bytes]], Tally]


@dataclass(slots=True)
class Audience:
    """A communicator without peers: the first meeting hears what they were going to say.

    In later meetings all say the same as this rank. What it says itself is kept.
    """

    size: int
    told: list[bytes] = field(default_factory=list)
    said: list[Message] = field(default_factory=list)
    rank: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def global_rank(self, rank: int) -> int:
        """See Communicator."""
        return rank

    def all_gather(self, item: Message) -> list[Message]:
        """See Communicator."""
        self.said.append(item)
        if self.told:
            told, self.told = self.told, []
            return [json.loads(text) for text in told]
        return [item] * self.size

    def exchange(self, sends: Sequence[Send], receives: Sequence[Receive]) -> None:
        """Nobody is there to exchange anything with."""
        raise NotImplementedError

    def begin_exchange(self, sends: Sequence[Send], receives: Sequence[Receive]) -> Exchange:
        """Nobody is there to exchange anything with."""
        raise NotImplementedError


def _as_sent(item: Message) -> bytes:
    """As TorchCommunicator sends it."""
    return json.dumps(item, separators=(",", ":")).encode()


def _save(chunk_layout: ChunkLayout) -> Rehearsal:
    budget = Options().max_inflight_bytes

    def describe(job: Job) -> list[bytes]:
        return [
            _as_sent(
                [list(map(_message, job.shards_of(rank).shards)), budget, chunk_layout.value, 0]
            )
            for rank in range(job.num_ranks)
        ]

    def plan(job: Job, told: list[bytes]) -> Tally:
        planned = planned_save(Audience(job.num_ranks, told), list(map(json.loads, told)))
        num_shards = sum(text.count(b"float") for text in told)  # the dtype of each
        return Tally(num_shards, len(planned.plan.rounds))

    return Rehearsal(describe, plan)


def _message(spec: ShardSpec) -> Message:
    """As ``megatron.shards.message_of`` describes it."""
    replica = [0, 0, 0 if spec.is_main else 1]
    region, shape, dtype = spec.region, spec.array_shape, spec.dtype.value
    fragments = [n // max(1, k) for n, k in zip(shape, region.shape, strict=True)]
    return [spec.key, shape, region.offset, replica, dtype, region.shape, fragments, 0, False]


def _describe_manifest(job: Job) -> list[bytes]:
    """What ranks know of the arrays that one of them lists: those of neighbouring keys."""
    groups = sorted(range(job.num_groups), key=str)[:_GROUPS_PER_PART]
    requests = [
        request
        for group in groups
        for request in job.optimizer_of(group % job.tensor, group // job.tensor)
    ]
    plan = build_save_plan(requests, chunk_layout=ChunkLayout.INNER)
    known: dict[int, dict[ArraySpec, dict[Shape, ChunkRecord]]] = {}
    for write in plan.writes:
        index = next(write.array.chunks_of(write.region))
        digests = bytes(DIGEST_NBYTES * (num_inner_chunks(write.array, index) + 1))
        of_rank = known.setdefault(write.writer, {})
        of_rank.setdefault(write.array, {})[index] = ChunkRecord(write.writer, digests)
    return [
        segment_content((array_fields(ArrayRecord(a, chunks)) for a, chunks in of_rank.items()), ())
        for of_rank in known.values()
    ]


def _plan_manifest(job: Job, told: list[bytes]) -> Tally:
    del job
    arrays, _ = merged_segment(told)
    return Tally(sum(len(fields["chunks"]) for fields in arrays), 1)


def _group_of(job: Job) -> list[int]:
    """The ranks that hold what rank 0 holds."""
    return [job.rank(0, data, 0) for data in range(job.data)]


def _arrays_of(job: Job) -> list[ArraySpec]:
    """The arrays that the group of rank 0 wants, as format 1 stores them."""
    shards = {
        (s.key, s.array_shape, s.dtype, s.region.shape)
        for rank in _group_of(job)
        for s in job.shards_of(rank).shards
    }
    found: dict[str, ArraySpec] = {}
    for key, shape, dtype, chunk in sorted(shards, key=lambda one: (one[0], one[3])):
        found[key] = ArraySpec(key, shape, dtype, chunk)
    return list(found.values())


def _describe_load(job: Job) -> list[bytes]:
    """What the checkpoint says of the arrays that a rank wants."""
    return [_as_sent(array_to_wire(array)) for array in _arrays_of(job)]


def _plan_load(job: Job, told: list[bytes]) -> Tally:
    arrays = [array_from_wire(json.loads(text)) for text in told]
    wants = job.shards_of(0).shards
    plan = build_load_plan(wants, {array.key: array for array in arrays})
    return Tally(len(plan.reads), 1)


def _describe_two_stage(job: Job) -> list[bytes]:
    numbers = {array.key: number for number, array in enumerate(_arrays_of(job))}
    return [
        encode_regions((numbers[s.key], s.region) for s in job.shards_of(rank).shards).encode()
        for rank in _group_of(job)
    ]


def _plan_two_stage(job: Job, told: list[bytes]) -> Tally:
    arrays = _arrays_of(job)
    requests = [text.decode() for text in told]
    caches = [None] * len(told)
    plan = build_group_plan(requests, arrays, caches, max_inflight_bytes=_INFLIGHT_NBYTES)
    plan.rounds_of(0)
    return Tally(sum(len(request.splitlines()) for request in requests), len(plan.rounds))


def _describe_local(job: Job) -> list[bytes]:
    """The parts that lie on each node, for each of its ranks; those of the first node are lost."""
    cliques = build_cliques(job.num_ranks, _per_node(job), COPIES)
    lying: dict[int, list[str]] = {node: [] for node in range(job.num_ranks // _per_node(job))}
    for clique in cliques:
        for iteration in range(_NUM_SAVES):
            for owner in clique:
                for keeper in clique:
                    part_id = str(PartId(_save_id(iteration), owner))
                    lying[keeper // _per_node(job)].append(part_id)
    lying[0] = []
    texts = {node: json.dumps(ids).encode() for node, ids in lying.items()}
    return [texts[rank // _per_node(job)] for rank in range(job.num_ranks)]


def _per_node(job: Job) -> int:
    """A node has the ranks that share a layer."""
    return job.tensor


def _save_id(iteration: int) -> SaveId:
    return SaveId(iteration, "0" * 32)


def _available(told: list[bytes]) -> tuple[dict[int, Mapping[str, None]], SaveId, int]:
    """What each rank can read, the newest save, and the files that there are."""
    nodes = {text: dict.fromkeys(json.loads(text)) for text in set(told)}
    stated = {(PartId.require(name), len(told)) for ids in nodes.values() for name in ids}
    sizes = choose_world_sizes(stated)
    survey = build_survey((part, sizes[part.save]) for part, _ in stated)
    newest = next(one for one in survey if not one.missing)
    num_files = sum(map(len, nodes.values()))
    return {rank: nodes[text] for rank, text in enumerate(told)}, newest.save, num_files


def _plan_local(job: Job, told: list[bytes]) -> Tally:
    available, save, num_files = _available(told)
    wanted = {rank: [str(PartId(save, rank))] for rank in range(job.num_ranks)}
    plan = build_exchange_plan({r: list(ids) for r, ids in available.items()}, wanted)
    return Tally(num_files, len(plan.steps))


def _plan_reshard(job: Job, told: list[bytes]) -> Tally:
    """As many parts, on half the ranks: those of the nodes with odd numbers."""
    available, save, num_files = _available(told)
    node = _per_node(job)
    kept = [rank for rank in range(job.num_ranks) if rank // node % 2]
    here = {number: list(available[rank]) for number, rank in enumerate(kept)}
    plan = build_exchange_plan(here, spread_parts(save, job.num_ranks, here))
    return Tally(num_files, len(plan.steps))


def _describe_recovery(job: Job) -> list[bytes]:
    return [_said(rank_facts) for rank_facts in _facts_of(job)]


def _said(facts: RankFacts) -> bytes:
    """What a rank says in the meeting that gathers the facts."""
    alone = Audience(1)
    gather_facts(alone, lambda: facts)
    return _as_sent(alone.said[0])


def _facts_of(job: Job) -> Iterator[RankFacts]:
    """Every optimizer shard is on COPIES ranks of a group; the ranks of the first node are new."""
    for rank in range(job.num_ranks):
        tensor, rest = rank % job.tensor, rank // job.tensor
        data, stage = rest % job.data, rest // job.data
        num_shards = max(1, job.data // COPIES)
        twins = [
            job.rank(tensor, other, stage)
            for other in range(data % num_shards, job.data, num_shards)
        ]
        place = f"tp{tensor:02}/pp{stage:03}"
        parts = (
            PartFacts(f"{place}/shard{data % num_shards:03}", 10**9, "0" * 16),
            PartFacts(f"{place}/weights", 4 * 10**9, "1" * 16),
        )
        known = tuple((twin, step) for twin in twins for step in (_STEP, _STEP + 1))
        if rank < _per_node(job):
            yield RankFacts(parts, (parts[1].part_id,), None, "is new")
        else:
            held = HeldState(_STEP, Phase.RUNNING, parts)
            yield RankFacts(parts, (parts[1].part_id,), held, "", known)


def _plan_recovery(job: Job, told: list[bytes]) -> Tally:
    comm = Audience(job.num_ranks, told)
    facts = gather_facts(comm, lambda: RankFacts((), (), None))
    plan = plan_recovery(comm, facts, [])
    plan.local_parts(0)
    return Tally(sum(len(one.wanted) for one in facts), len(plan.copies))


REHEARSALS: Mapping[Planner, Rehearsal] = {
    Planner.SAVE_1: _save(ChunkLayout.WHOLE),
    Planner.SAVE_2: _save(ChunkLayout.INNER),
    Planner.MANIFEST: Rehearsal(_describe_manifest, _plan_manifest),
    Planner.LOAD: Rehearsal(_describe_load, _plan_load),
    Planner.TWO_STAGE: Rehearsal(_describe_two_stage, _plan_two_stage),
    Planner.LOCAL: Rehearsal(_describe_local, _plan_local),
    Planner.RESHARD: Rehearsal(_describe_local, _plan_reshard),
    Planner.RECOVERY: Rehearsal(_describe_recovery, _plan_recovery),
}
