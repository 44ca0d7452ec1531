"""The transfer engine: tensors to storage and back, all at once, under a memory budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
from dist_ckpt_strategies.sharded.plan_load import build_batches
from dist_ckpt_strategies.storage.base import (
    ArrayRead,
    ArrayReader,
    ArrayWrite,
    ArrayWriter,
)
from dist_ckpt_strategies.storage.io_pool import InFlight


@dataclass(frozen=True, slots=True)
class TensorWrite:
    """A tensor that is exactly ``region`` of the array, and covers whole chunks of it."""

    array: ArraySpec
    region: Region
    tensor: torch.Tensor


@dataclass(frozen=True, slots=True)
class TensorRead:
    """A tensor, of any dtype, strides and device, to be filled with ``region`` of the array."""

    array: ArraySpec
    region: Region
    tensor: torch.Tensor


def run_writes(store: ArrayWriter, writes: Sequence[TensorWrite], options: Options) -> None:
    """Store every tensor, durably.

    Tensors whose elements lie in C order on the host are written from their own memory, all at
    once. Others are copied first, batch by batch: while one batch is written the next is copied,
    so that copies take at most ``max_inflight_bytes`` (or twice the largest tensor).
    """
    batches = build_batches(
        [staged_nbytes(write.tensor) for write in writes], options.max_inflight_bytes // 2
    )
    with InFlight(options.timeout_s) as in_flight:
        for batch in batches:
            hosts = to_host([writes[number].tensor for number in batch])
            requests = [
                ArrayWrite(writes[number].array, writes[number].region, host)
                for number, host in zip(batch, hosts, strict=True)
            ]
            in_flight.follow_with(store.begin_writes(requests))


def run_reads(store: ArrayReader, reads: Sequence[TensorRead], options: Options) -> None:
    """Fill every tensor from storage.

    CPU tensors of the stored dtype are read into directly, all at once. Others are read through
    memory of the stored dtype, pinned for CUDA, batch by batch, and converted as ``copy_`` does;
    that takes at most ``max_inflight_bytes`` (or the largest tensor).
    """
    batches = build_batches([_read_staging(read) for read in reads], options.max_inflight_bytes)
    for batch in batches:
        _run_batch(store, [reads[number] for number in batch], options)


def _run_batch(store: ArrayReader, reads: Sequence[TensorRead], options: Options) -> None:
    """A function, so that the memory of a batch is free before the next one takes its own."""
    hosts = [_host_side(read) for read in reads]
    requests = [
        ArrayRead(read.array, read.region, host_view(host))
        for read, host in zip(reads, hosts, strict=True)
    ]
    store.begin_reads(requests).wait(options.timeout_s)
    staged = [
        (read.tensor, host)
        for read, host in zip(reads, hosts, strict=True)
        if host is not read.tensor
    ]
    copy_into([target for target, _ in staged], [host for _, host in staged])


def _needs_staging(read: TensorRead) -> bool:
    tensor = read.tensor
    is_direct = tensor.device.type == "cpu" and tensor.dtype == torch_dtype(read.array.dtype)
    return not is_direct or tensor.is_conj() or tensor.is_neg()


def _read_staging(read: TensorRead) -> int:
    return read.region.numel * read.array.dtype.itemsize if _needs_staging(read) else 0


def _host_side(read: TensorRead) -> torch.Tensor:
    if not _needs_staging(read):
        return read.tensor
    return host_buffer(read.region.shape, read.array.dtype, like=read.tensor)
