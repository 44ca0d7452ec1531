"""Tensors to storage and back, all at once, under a memory budget; chunks that several ranks hold.

A chunk that is one rank's shard goes from its tensor to storage. Others are assembled first, from
slices that several ranks hold.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain, cycle

import numpy as np
import torch

from dist_ckpt_strategies.comm.base import Communicator, Receive, Send, run_collectively
from dist_ckpt_strategies.config import Options
from dist_ckpt_strategies.core.array import ArraySpec, Region, ShardId
from dist_ckpt_strategies.device import (
    HostSnapshot,
    Slot,
    build_batches,
    copy_into,
    host_view,
    is_in_order,
    to_host,
    torch_dtype,
)
from dist_ckpt_strategies.formats.arrays import StoreWriter
from dist_ckpt_strategies.sharded.plan import SavePlan, ShardSlice, WriteItem
from dist_ckpt_strategies.sharded.writer_process import StagedWrite
from dist_ckpt_strategies.storage.io_pool import wait_in_turn
from dist_ckpt_strategies.storage.store import ArrayWrite

Tensors = Mapping[ShardId, torch.Tensor]
"""This rank's main replicas, each shaped like its region. Left untouched."""

TensorRegion = tuple[ArraySpec, Region, torch.Tensor]
"""A region of an array, and the tensor that has its shape: of any strides and device."""


def run_writes(
    store: StoreWriter,
    writes: Sequence[TensorRegion],
    options: Options,
    creations: Sequence[ArraySpec] = (),
) -> None:
    """Store every tensor, durably, and the metadata of new arrays.

    Each region covers whole chunks of its array.

    Tensors whose elements lie in C order on the host are written from their own memory, all at
    once. Others are copied first, batch by batch: while one batch is written the next is copied,
    so that copies take at most ``max_inflight_bytes`` (or twice the largest tensor).
    """
    direct: list[ArrayWrite] = []
    staged: list[tuple[TensorRegion, int]] = []
    for write in writes:
        array, region, tensor = write
        if tensor.device.type == "cpu" and is_in_order(tensor):
            direct.append(ArrayWrite(array, region, host_view(tensor)))
        else:
            staged.append((write, tensor.numel() * tensor.element_size()))
    batches = build_batches(staged, options.max_inflight_bytes // 2) if staged else ()
    # Generators: a batch is copied when the one before it is under way, and those before are done.
    memory = cycle([HostSnapshot(), HostSnapshot()])
    copied = ((batch, to_host([t for _, _, t in batch], next(memory))) for batch in batches)
    requests = (
        [ArrayWrite(array, at, host) for (array, at, _), host in zip(batch, hosts, strict=True)]
        for batch, hosts in copied
    )
    begun = map(store.begin_writes, chain([direct], requests))
    wait_in_turn(chain([store.begin_creates(creations)], begun), options.timeout_s)


def stage_plan(
    plan: SavePlan,
    tensors: Tensors,
    comm: Communicator,
    reserve: Callable[[Sequence[WriteItem], bool], Sequence[Slot]],
) -> tuple[StagedWrite, ...]:
    """Copy what this rank will write, and bring slices to the writers of their chunks.

    Collective. When it returns the tensors may be overwritten. ``reserve`` returns a place on the
    host for each chunk, which is filled from CUDA or not.
    """
    mine = plan.writes
    slots: dict[tuple[str, Region], Slot] = {}

    def copy_whole() -> None:
        is_cuda = any(tensor.device.type == "cuda" for tensor in tensors.values())
        places = [(write.array.key, write.region) for write in mine]
        slots.update(zip(places, reserve(mine, is_cuda), strict=True))
        whole = [write for write in mine if write.is_whole_shard]
        copy_into(
            [slots[write.array.key, write.region].tensor for write in whole],
            [elements(write.slices[0], tensors) for write in whole],
        )

    def fill(chunks: Sequence[TensorRegion]) -> None:
        for array, region, tensor in chunks:
            slots[array.key, region].tensor.copy_(tensor)

    run_collectively(comm, copy_whole)
    assemble(plan, tensors, comm, fill)
    return tuple(
        StagedWrite(w.array, w.region, slots[w.array.key, w.region].byte_offset) for w in mine
    )


def elements(shard_slice: ShardSlice, tensors: Tensors) -> torch.Tensor:
    """The elements of a slice, as a view of the tensor that holds them."""
    if shard_slice.region is shard_slice.shard.region:
        return tensors[shard_slice.shard]
    return tensors[shard_slice.shard][shard_slice.region.within(shard_slice.shard.region).slices()]


def assemble(
    plan: SavePlan,
    tensors: Tensors,
    comm: Communicator,
    use: Callable[[Sequence[TensorRegion]], None],
) -> None:
    """Assemble this rank's chunks that are slices of several shards, round by round. Collective."""

    def use_chunks(writes: Sequence[WriteItem], arrived: Mapping[ShardSlice, torch.Tensor]) -> None:
        chunks = []
        for write in writes:
            dtype = torch_dtype(write.array.dtype)
            chunk = torch.empty(write.region.shape, dtype=dtype, device="cpu")
            for one in write.slices:
                found = arrived[one] if one in arrived else elements(one, tensors)
                copy_into([chunk[one.region.within(write.region).slices()]], [found])
            chunks.append((write.array, write.region, chunk))
        use(chunks)

    me = comm.global_ranks[comm.rank]
    for round_ in plan.rounds:
        arrived = _exchanged(round_, tensors, comm)
        own = [write for write in round_ if write.writer == me]
        run_collectively(comm, partial(use_chunks, own, arrived))


def _exchanged(
    round_: Sequence[WriteItem], tensors: Tensors, comm: Communicator
) -> dict[ShardSlice, torch.Tensor]:
    """Move the slices of one round to their writers; those that have come here. Collective."""
    me = comm.global_ranks[comm.rank]
    in_group = {comm.global_ranks[rank]: rank for rank in range(comm.size)}
    moves = [(write, move) for write in round_ for move in write.moves]
    incoming = [(write, move) for write, move in moves if write.writer == me]

    def prepare() -> tuple[list[Send], list[torch.Tensor]]:  # tensors: no later step can fail
        outgoing = [(write, move) for write, move in moves if move.holder == me]
        hosts = to_host([elements(move, tensors) for _, move in outgoing])
        sends = [
            Send(in_group[write.writer], torch.from_numpy(host.reshape(-1).view(np.uint8)))
            for (write, _), host in zip(outgoing, hosts, strict=True)
        ]
        sizes = [write.nbytes_of(move) for write, move in incoming]
        return sends, [torch.empty(size, dtype=torch.uint8, device="cpu") for size in sizes]

    sends, buffers = run_collectively(comm, prepare)
    pairs = list(zip(incoming, buffers, strict=True))
    comm.exchange(sends, [Receive(in_group[move.holder], buffer) for (_, move), buffer in pairs])
    return {
        move: buffer.view(torch_dtype(write.array.dtype)).reshape(move.region.shape)
        for (write, move), buffer in pairs
    }
