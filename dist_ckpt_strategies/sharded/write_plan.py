"""Carry out a save plan: whole shards first, then chunks assembled from slices of several ranks.

Either at once, or in two steps: stage, which every rank does, and write, which each does alone
(writer_process.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import torch

from dist_ckpt_strategies.comm.agree import agree, agree_and_gather
from dist_ckpt_strategies.comm.base import Bytes, Communicator, Message, Receive, Send
from dist_ckpt_strategies.config import Options
from dist_ckpt_strategies.core.array import ShardId
from dist_ckpt_strategies.core.region import Region
from dist_ckpt_strategies.core.report import SaveReport
from dist_ckpt_strategies.device import Slot, copy_into, to_host, torch_dtype
from dist_ckpt_strategies.sharded.plan_save import SavePlan, ShardSlice, WriteItem
from dist_ckpt_strategies.sharded.transfer import TensorRegion, run_writes
from dist_ckpt_strategies.sharded.writer_process import StagedWrite
from dist_ckpt_strategies.storage.base import ArrayWriter
from dist_ckpt_strategies.storage.io_pool import InFlight

Tensors = Mapping[ShardId, torch.Tensor]
"""This rank's main replicas, each shaped like its region. Left untouched."""


def write_plan(  # noqa: PLR0913, PLR0917
    plan: SavePlan,
    tensors: Tensors,
    open_writer: Callable[[], ArrayWriter],
    comm: Communicator,
    options: Options,
    also: Callable[[], None] = lambda: None,
    finish: Callable[[], Message] = lambda: None,
) -> list[Message]:
    """Write the arrays of a plan, durably.

    Collective: either every rank returns or every rank raises. One collective where no chunk is
    assembled.

    Args:
        plan: this rank's share, or the whole.
        tensors: this rank's main replicas.
        open_writer: returns what writes the arrays; called first, may raise.
        comm: the group that the plan was made for.
        options: timeout and memory budget.
        also: further rank-local writes that belong to this rank's share.
        finish: called once all of this rank's share is durable.

    Returns:
        What ``finish`` has returned on each rank.

    Raises:
        StorageError: a write failed here; PeerError of the same class on the other ranks.
    """
    me = comm.global_rank(comm.rank)
    created, mine = plan.creations_of(me), plan.writes_of(me)
    writers: list[ArrayWriter] = []

    def write_own() -> None:
        writers.append(open_writer())
        with InFlight(options.timeout_s) as in_flight:
            in_flight.follow_with(writers[0].begin_creates(created))
            whole = [
                (w.array, w.region, _elements(w.slices[0], tensors))
                for w in mine
                if w.is_whole_shard
            ]
            run_writes(writers[0], whole, options)
            also()

    def write_and_finish() -> Message:
        if not plan.rounds:
            write_own()
        arrays = {array.key: array for array in (*created, *(write.array for write in mine))}
        writers[0].begin_syncs(list(arrays.values())).wait(options.timeout_s)
        return finish()

    if plan.rounds:
        agree(comm, write_own)
        _assemble(plan, tensors, comm, lambda chunks: run_writes(writers[0], chunks, options))
    return agree_and_gather(comm, write_and_finish, is_sparse=True)


def report_of(plan: SavePlan, rank: int, seconds: float) -> SaveReport:
    """What ``rank`` has written by a plan, in so many seconds."""
    writes = plan.writes_of(rank)
    return SaveReport(
        num_arrays=len(plan.creations_of(rank)),
        num_chunks=len(writes),
        nbytes=sum(write.nbytes for write in writes),
        moved_nbytes=plan.sent_nbytes(rank),
        seconds=seconds,
    )


def stage_plan(
    plan: SavePlan,
    tensors: Tensors,
    comm: Communicator,
    reserve: Callable[[Sequence[WriteItem], bool], Sequence[Slot]],
) -> tuple[StagedWrite, ...]:
    """Copy what this rank will write, and bring slices to the writers of their chunks.

    Collective. When it returns the tensors may be overwritten.

    Args:
        plan: what is written by whom.
        tensors: this rank's main replicas.
        comm: the group that the plan was made for.
        reserve: returns a place on the host for each chunk, which is filled from CUDA or not.

    Raises:
        PeerError: another rank failed.
    """
    mine = plan.writes_of(comm.global_rank(comm.rank))
    slots: dict[tuple[str, Region], Slot] = {}

    def copy_whole() -> None:
        is_cuda = any(tensor.device.type == "cuda" for tensor in tensors.values())
        places = [(write.array.key, write.region) for write in mine]
        slots.update(zip(places, reserve(mine, is_cuda), strict=True))
        whole = [write for write in mine if write.is_whole_shard]
        copy_into(
            [slots[write.array.key, write.region].tensor for write in whole],
            [_elements(write.slices[0], tensors) for write in whole],
        )

    def fill(chunks: Sequence[TensorRegion]) -> None:
        for array, region, tensor in chunks:
            slots[array.key, region].tensor.copy_(tensor)

    agree(comm, copy_whole)
    _assemble(plan, tensors, comm, fill)
    return tuple(
        StagedWrite(w.array, w.region, slots[w.array.key, w.region].byte_offset) for w in mine
    )


def _elements(shard_slice: ShardSlice, tensors: Tensors) -> torch.Tensor:
    """The elements of a slice, as a view of the tensor that holds them."""
    if shard_slice.region is shard_slice.shard.region:
        return tensors[shard_slice.shard]
    return tensors[shard_slice.shard][shard_slice.region.within(shard_slice.shard.region).slices()]


def _assemble(
    plan: SavePlan,
    tensors: Tensors,
    comm: Communicator,
    use: Callable[[Sequence[TensorRegion]], None],
) -> None:
    """Assemble this rank's chunks that are slices of several shards, round by round. Collective."""
    me = comm.global_rank(comm.rank)
    for round_ in plan.rounds:
        arrived = _exchanged(round_, tensors, comm)
        own = [write for write in round_ if write.writer == me]
        agree(comm, partial(_use_chunks, own, tensors, arrived, use))


def _use_chunks(
    writes: Sequence[WriteItem],
    tensors: Tensors,
    arrived: Mapping[ShardSlice, torch.Tensor],
    use: Callable[[Sequence[TensorRegion]], None],
) -> None:
    chunks = []
    for write in writes:
        dtype = torch_dtype(write.array.dtype)
        chunk = torch.empty(write.region.shape, dtype=dtype, device="cpu")
        for one in write.slices:
            found = arrived[one] if one in arrived else _elements(one, tensors)
            chunk[one.region.within(write.region).slices()].copy_(found.detach())
        chunks.append((write.array, write.region, chunk))
    use(chunks)


def _exchanged(
    round_: Sequence[WriteItem], tensors: Tensors, comm: Communicator
) -> dict[ShardSlice, torch.Tensor]:
    """Move the slices of one round to their writers; those that have come here. Collective."""
    me = comm.global_rank(comm.rank)
    in_group = {comm.global_rank(rank): rank for rank in range(comm.size)}
    moves = [(write, move) for write in round_ for move in write.moves]
    incoming = [(write, move) for write, move in moves if write.writer == me]

    def prepare() -> tuple[list[Send], list[Bytes]]:
        outgoing = [(write, move) for write, move in moves if move.holder == me]
        hosts = to_host([_elements(move, tensors) for _, move in outgoing])
        sends = [
            Send(in_group[write.writer], host.reshape(-1).view(np.uint8))
            for (write, _), host in zip(outgoing, hosts, strict=True)
        ]
        return sends, [np.empty(write.nbytes_of(move), np.uint8) for write, move in incoming]

    sends, buffers = agree(comm, prepare)
    pairs = list(zip(incoming, buffers, strict=True))
    comm.exchange(sends, [Receive(in_group[move.holder], buffer) for (_, move), buffer in pairs])
    return {
        move: torch.from_numpy(buffer)
        .view(torch_dtype(write.array.dtype))
        .reshape(move.region.shape)
        for (write, move), buffer in pairs
    }
