"""The transfer engine: tensors to storage and back, all at once, under a memory budget."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dist_ckpt_strategies.config import Options
from dist_ckpt_strategies.core.array import ArraySpec
from dist_ckpt_strategies.core.region import Region
from dist_ckpt_strategies.device import (
    copy_into,
    host_buffer,
    host_view,
    staged_nbytes,
    to_host,
    torch_dtype,
)
from dist_ckpt_strategies.storage.base import ArrayRead, ArrayReader, ArrayWrite, ArrayWriter
from dist_ckpt_strategies.storage.io_pool import InFlight

TensorRegion = tuple[ArraySpec, Region, torch.Tensor]
"""A region of an array, and the tensor that has its shape: of any strides and device."""


def run_writes(store: ArrayWriter, writes: Sequence[TensorRegion], options: Options) -> None:
    """Store every tensor, durably. Each region covers whole chunks of its array.

    Tensors whose elements lie in C order on the host are written from their own memory, all at
    once. Others are copied first, batch by batch: while one batch is written the next is copied,
    so that copies take at most ``max_inflight_bytes`` (or twice the largest tensor).
    """
    sizes = [staged_nbytes(tensor) for _, _, tensor in writes]
    with InFlight(options.timeout_s) as in_flight:
        for batch in build_batches(sizes, options.max_inflight_bytes // 2):
            hosts = to_host([writes[number][2] for number in batch])
            requests = [
                ArrayWrite(*writes[number][:2], host)
                for number, host in zip(batch, hosts, strict=True)
            ]
            in_flight.follow_with(store.begin_writes(requests))


def run_reads(store: ArrayReader, reads: Sequence[TensorRegion], options: Options) -> None:
    """Fill every tensor, of any dtype, from storage.

    CPU tensors of the stored dtype are read into directly, all at once. Others are read through
    memory of the stored dtype, pinned for CUDA, batch by batch, and converted as ``copy_`` does;
    that takes at most ``max_inflight_bytes`` (or the largest tensor).
    """
    sizes = [
        region.numel * array.dtype.itemsize if _needs_staging(array, tensor) else 0
        for array, region, tensor in reads
    ]
    for batch in build_batches(sizes, options.max_inflight_bytes):
        _run_batch(store, [reads[number] for number in batch], options)


def _run_batch(store: ArrayReader, reads: Sequence[TensorRegion], options: Options) -> None:
    """A function, so that the memory of a batch is free before the next one takes its own."""
    hosts = [
        host_buffer(region.shape, array.dtype, like=tensor)
        if _needs_staging(array, tensor)
        else tensor
        for array, region, tensor in reads
    ]
    requests = [
        ArrayRead(array, region, host_view(host))
        for (array, region, _), host in zip(reads, hosts, strict=True)
    ]
    store.begin_reads(requests).wait(options.timeout_s)
    pairs = [(t, host) for (_, _, t), host in zip(reads, hosts, strict=True) if host is not t]
    if pairs:
        copy_into(*zip(*pairs, strict=True))


def _needs_staging(array: ArraySpec, tensor: torch.Tensor) -> bool:
    is_direct = tensor.device.type == "cpu" and tensor.dtype == torch_dtype(array.dtype)
    return not is_direct or tensor.is_conj() or tensor.is_neg()


def build_batches(staged_nbytes: Sequence[int], budget_nbytes: int) -> tuple[tuple[int, ...], ...]:
    """Positions of the transfers, batch by batch, in order.

    What needs no staging memory goes into the first batch, so that it is issued at once.

    Args:
        staged_nbytes: staging memory that each transfer needs, in bytes; 0 for none.
        budget_nbytes: bound on the sum within a batch; a larger transfer goes alone.
    """
    batches: list[list[int]] = [[n for n, size in enumerate(staged_nbytes) if size == 0]]
    used = 0
    for number, size in enumerate(staged_nbytes):
        if size == 0:
            continue
        if used and used + size > budget_nbytes:
            batches.append([])
            used = 0
        batches[-1].append(number)
        used += size
    return tuple(tuple(batch) for batch in batches if batch)
