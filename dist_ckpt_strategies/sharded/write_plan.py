"""Carry out a save plan: whole shards first, then chunks assembled from slices of several ranks.

Either at once, or in two steps: stage, which every rank does, and write, which each does alone
(staged.py).
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
from dist_ckpt_strategies.sharded.plan_save import Move, SavePlan, ShardSlice, WriteItem
from dist_ckpt_strategies.sharded.staged import StagedSave, StagedWrite
from dist_ckpt_strategies.sharded.transfer import TensorWrite, run_writes
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
        open_writer: gives what writes the arrays; called first, may raise.
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
            whole = [_shard_write(write, tensors) for write in mine if write.is_whole_shard]
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
    for round_ in plan.rounds:
        assemble = _assembled_chunks(round_, tensors, comm)
        agree(comm, partial(_write_chunks, writers[0], assemble, options))
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


Reserve = Callable[[Sequence[WriteItem], bool], Sequence[Slot]]
"""Gives a place for each chunk; whether they are filled from CUDA."""


def stage_plan(
    plan: SavePlan, tensors: Tensors, comm: Communicator, reserve: Reserve
) -> StagedSave:
    """Copy what this rank will write, and bring slices to the writers of their chunks.

    Collective. When it returns the tensors may be overwritten.

    Args:
        plan: what is written by whom.
        tensors: this rank's main replicas.
        comm: the group that the plan was made for.
        reserve: gives memory on the host.

    Raises:
        PeerError: another rank failed.
    """
    me = comm.global_rank(comm.rank)
    mine = plan.writes_of(me)
    slots: dict[tuple[str, Region], Slot] = {}

    def copy_whole() -> None:
        is_cuda = any(tensor.device.type == "cuda" for tensor in tensors.values())
        slots.update(zip(map(_place_of, mine), reserve(mine, is_cuda), strict=True))
        whole = [write for write in mine if write.is_whole_shard]
        copy_into(
            [slots[_place_of(write)].tensor for write in whole],
            [_slice_tensor(write.slices[0], tensors) for write in whole],
        )

    agree(comm, copy_whole)
    for round_ in plan.rounds:
        assemble = _assembled_chunks(round_, tensors, comm)
        agree(comm, partial(_fill, assemble, slots))
    return StagedSave(
        plan.creations_of(me),
        tuple(StagedWrite(w.array, w.region, slots[_place_of(w)].byte_offset) for w in mine),
        plan.sent_nbytes(me),
    )


def _place_of(write: WriteItem | TensorWrite) -> tuple[str, Region]:
    return write.array.key, write.region


def _fill(
    assemble: Callable[[], list[TensorWrite]], slots: Mapping[tuple[str, Region], Slot]
) -> None:
    for chunk in assemble():
        slots[_place_of(chunk)].tensor.copy_(chunk.tensor)


def _write_chunks(
    store: ArrayWriter, chunks: Callable[[], list[TensorWrite]], options: Options
) -> None:
    run_writes(store, chunks(), options)


def _shard_write(write: WriteItem, tensors: Tensors) -> TensorWrite:
    return TensorWrite(write.array, write.region, _slice_tensor(write.slices[0], tensors))


def _slice_tensor(shard_slice: ShardSlice, tensors: Tensors) -> torch.Tensor:
    """The elements of a slice, as a view of the tensor that holds them."""
    if shard_slice.region is shard_slice.shard.region:
        return tensors[shard_slice.shard]
    return tensors[shard_slice.shard][shard_slice.region.within(shard_slice.shard.region).slices()]


def _assembled_chunks(
    round_: Sequence[WriteItem], tensors: Tensors, comm: Communicator
) -> Callable[[], list[TensorWrite]]:
    """Move the slices of one round to their writers; gives what puts this rank's chunks together.

    Collective; what it gives is rank-local.
    """
    me = comm.global_rank(comm.rank)
    in_group = {comm.global_rank(rank): rank for rank in range(comm.size)}
    moves = [move for write in round_ for move in write.moves]
    incoming = [move for move in moves if move.writer == me]

    def prepare() -> tuple[list[Send], list[Bytes]]:
        outgoing = [move for move in moves if move.shard_slice.holder == me]
        hosts = to_host([_slice_tensor(move.shard_slice, tensors) for move in outgoing])
        sends = [
            Send(in_group[move.writer], host.reshape(-1).view(np.uint8))
            for move, host in zip(outgoing, hosts, strict=True)
        ]
        return sends, [np.empty(move.nbytes, np.uint8) for move in incoming]

    sends, buffers = agree(comm, prepare)
    receives = [
        Receive(in_group[move.shard_slice.holder], buffer)
        for move, buffer in zip(incoming, buffers, strict=True)
    ]
    comm.exchange(sends, receives)

    def put_together() -> list[TensorWrite]:
        pairs = zip(incoming, buffers, strict=True)
        arrived = {move.shard_slice: _as_tensor(move, buffer) for move, buffer in pairs}
        own = [write for write in round_ if write.writer == me]
        return [TensorWrite(w.array, w.region, _assembled(w, tensors, arrived)) for w in own]

    return put_together


def _as_tensor(move: Move, data: Bytes) -> torch.Tensor:
    flat = torch.from_numpy(data).view(torch_dtype(move.dtype))
    return flat.reshape(move.shard_slice.region.shape)


def _assembled(
    write: WriteItem, tensors: Tensors, arrived: Mapping[ShardSlice, torch.Tensor]
) -> torch.Tensor:
    """The chunk, put together from own and received slices, which cover it exactly."""
    chunk = torch.empty(write.region.shape, dtype=torch_dtype(write.array.dtype), device="cpu")
    for shard_slice in write.slices:
        part = (
            arrived[shard_slice] if shard_slice in arrived else _slice_tensor(shard_slice, tensors)
        )
        _place(chunk, shard_slice.region, write.region, part)
    return chunk


def _place(chunk: torch.Tensor, part: Region, frame: Region, tensor: torch.Tensor) -> None:
    chunk[part.within(frame).slices()].copy_(tensor.detach())
