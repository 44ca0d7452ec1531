"""What a checkpoint of a simulated job amounts to, and how long it takes, on paper.

Counts come from the planner itself, fed with one group of ranks of each kind; times are bytes by
bandwidths that are assumed, and stated.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from benchmarks.scale.job import Job, bytes_by_rank
from dist_ckpt_strategies.core.array import ArraySpec, RankShards
from dist_ckpt_strategies.core.chunk_grids import ChunkLayout
from dist_ckpt_strategies.core.inner_grid import num_inner_chunks
from dist_ckpt_strategies.core.region import Shape
from dist_ckpt_strategies.formats.manifest import (
    DIGEST_NBYTES,
    ArrayRecord,
    ChunkRecord,
    array_fields,
    segment_content,
)
from dist_ckpt_strategies.sharded.plan_save import SavePlan, build_save_plan

GB = 10**9
BANDWIDTHS = tuple(gb * GB for gb in (50, 100, 200, 500, 1000, 2000))
"""Of the shared storage, all ranks together, in bytes per second."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """What is assumed of the machines, in bytes per second.

    Attributes:
        rank_to_storage: that one rank moves to or from shared storage.
        rank_to_rank: that one rank receives from the others of its group.
        node_disk: of a node's own disks.
        ranks_per_node: GPUs of a node.
    """

    rank_to_storage: int = 2 * GB
    rank_to_rank: int = 20 * GB
    node_disk: int = 10 * GB
    ranks_per_node: int = 8


ASSUMED = Hardware()


@dataclass(frozen=True, slots=True)
class Sheet:
    """A checkpoint in numbers. Objects and the common state are not counted.

    Attributes:
        num_parameters: of the model.
        num_arrays: of weights and of the optimizer's state; one metadata file each.
        num_shards: that all ranks describe to each other at a save, replicas included.
        num_files_1: chunks of format 1.
        num_files_2: chunks of format 2; beside them are the files of the manifest.
        nbytes: of all that is written, once.
        manifest_nbytes: of format 2's manifest, which holds the digest of every inner chunk.
        most_written_nbytes: by one rank.
        mean_written_nbytes: by one rank.
        weights_nbytes: that each rank holds of the model; as many ranks as replicas hold the same.
        optimizer_nbytes: that each rank holds of the optimizer, alone.
    """

    num_parameters: int
    num_arrays: int
    num_shards: int
    num_files_1: int
    num_files_2: int
    nbytes: int
    manifest_nbytes: int
    most_written_nbytes: int
    mean_written_nbytes: int
    weights_nbytes: int
    optimizer_nbytes: int


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds that bytes take at a bandwidth of the shared storage.

    Attributes:
        bandwidth: of the storage, in bytes per second.
        save: every byte once.
        load_alone: every rank reads what it wants, replicas of weights too.
        load_two_stage: every byte once, and on to the other replicas, behind one another.
    """

    bandwidth: int
    save: float
    load_alone: float
    load_two_stage: float


@dataclass(frozen=True, slots=True)
class NodeTimes:
    """Seconds that do not depend on shared storage.

    Attributes:
        local_save: a rank's part and a copy of another's, to the node's own disks.
        local_load: every rank's own part back from there.
        recover: a new node gets weights and optimizer state from other ranks' memory.
        recover_nbytes: that it gets.
    """

    local_save: float
    local_load: float
    recover: float
    recover_nbytes: int


@dataclass(frozen=True, slots=True)
class _Counts:
    arrays: int
    chunks: int
    nbytes: int
    manifest_nbytes: int


def sheet_of(job: Job) -> Sheet:
    """The numbers of a job."""
    kinds = stage_kinds(job)
    weights = [_counts(job.written_weights(), c) for c in (ChunkLayout.WHOLE, ChunkLayout.INNER)]
    groups = {
        stage: [
            _counts(job.optimizer_of(0, stage), c) for c in (ChunkLayout.WHOLE, ChunkLayout.INNER)
        ]
        for stage in kinds
    }
    times = {stage: count * job.tensor for stage, count in kinds.items()}
    written = {stage: bytes_by_rank(job, stage) for stage in kinds}
    middle = job.shards_of(job.rank(0, 0, max(kinds, key=lambda stage: kinds[stage])))
    held = [sum(s.nbytes for s in middle.shards if s.key[0] == first) for first in "do"]
    shards = {
        stage: sum(len(job.shards_of(job.rank(0, data, stage)).shards) for data in range(job.data))
        for stage in kinds
    }
    return Sheet(
        num_parameters=job.num_parameters,
        num_arrays=weights[0].arrays + sum(groups[s][0].arrays * n for s, n in times.items()),
        num_shards=sum(shards[stage] * n for stage, n in times.items()),
        num_files_1=weights[0].chunks + sum(groups[s][0].chunks * n for s, n in times.items()),
        num_files_2=weights[1].chunks + sum(groups[s][1].chunks * n for s, n in times.items()),
        nbytes=weights[0].nbytes + sum(groups[s][0].nbytes * n for s, n in times.items()),
        manifest_nbytes=weights[1].manifest_nbytes
        + sum(groups[s][1].manifest_nbytes * n for s, n in times.items()),
        most_written_nbytes=max(max(found.values()) for found in written.values()),
        mean_written_nbytes=sum(sum(written[stage].values()) * n for stage, n in kinds.items())
        // job.num_ranks,
        weights_nbytes=held[0],
        optimizer_nbytes=held[1],
    )


def stage_kinds(job: Job) -> dict[int, int]:
    """A pipeline stage of each kind, and how many there are of it."""
    if job.pipeline == 1:
        return {0: 1}
    kinds = {0: 1, job.pipeline - 1: 1}
    return kinds if job.pipeline == len(kinds) else {**kinds, 1: job.pipeline - len(kinds)}


def _counts(requests: Iterable[RankShards], chunk_layout: ChunkLayout) -> _Counts:
    plan = build_save_plan(requests, chunk_layout=chunk_layout)
    nbytes = sum(write.nbytes for write in plan.writes)
    manifest = _manifest_nbytes(plan) if chunk_layout is ChunkLayout.INNER else 0
    return _Counts(len(plan.creations), len(plan.writes), nbytes, manifest)


def _manifest_nbytes(plan: SavePlan) -> int:
    """What the manifest says of a plan's arrays."""
    chunks: dict[ArraySpec, dict[Shape, ChunkRecord]] = {c.array: {} for c in plan.creations}
    for write in plan.writes:
        index = next(write.array.chunks_of(write.region))
        digests = bytes(DIGEST_NBYTES * (num_inner_chunks(write.array, index) + 1))
        chunks[write.array][index] = ChunkRecord(write.writer, digests)
    return sum(
        len(segment_content([array_fields(ArrayRecord(array, of_array))], ()))
        for array, of_array in chunks.items()
    )


def times_of(job: Job, sheet: Sheet, bandwidth: int, hardware: Hardware = ASSUMED) -> Times:
    """How long the bytes of a job take to shared storage and back."""
    held = sheet.weights_nbytes + sheet.optimizer_nbytes
    slowest = hardware.rank_to_storage
    once = max(sheet.nbytes / bandwidth, sheet.mean_written_nbytes / slowest)
    return Times(
        bandwidth,
        max(sheet.nbytes / bandwidth, sheet.most_written_nbytes / slowest),
        max(held * job.num_ranks / bandwidth, held / slowest),
        once + sheet.weights_nbytes / hardware.rank_to_rank,
    )


def node_times_of(sheet: Sheet, copies: int, hardware: Hardware = ASSUMED) -> NodeTimes:
    """How long it takes where every node has what it needs, or its peers have.

    Args:
        sheet: of the job.
        copies: of each part on the nodes' disks, and of each optimizer shard in memory: so many
            times as large is a shard, as the ranks of a group that hold it are fewer.
        hardware: assumed.
    """
    part = sheet.mean_written_nbytes * hardware.ranks_per_node
    wanted = sheet.weights_nbytes + sheet.optimizer_nbytes * copies
    return NodeTimes(
        part * copies / hardware.node_disk,
        part / hardware.node_disk,
        wanted / hardware.rank_to_rank,
        wanted * hardware.ranks_per_node,
    )
