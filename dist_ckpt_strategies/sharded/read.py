"""Regions of stored arrays, read into tensors of any dtype, strides and device. Rank-local."""

from collections.abc import Sequence
from operator import itemgetter

import torch

from dist_ckpt_strategies.config import Options
from dist_ckpt_strategies.core.array import ArraySpec, Region, groups
from dist_ckpt_strategies.device import HostSnapshot, copy_into, host_view, to_host, torch_dtype
from dist_ckpt_strategies.errors import PlanError
from dist_ckpt_strategies.storage.io_pool import Deadline
from dist_ckpt_strategies.storage.store import ArrayRead, BeginReads

TensorRead = tuple[ArraySpec, Region, torch.Tensor]
"""A region of an array, and the tensor that has its shape: of any strides and device."""


def run_reads(
    begin: BeginReads, reads: Sequence[TensorRead], options: Options, deadline: Deadline
) -> None:
    """Fill every tensor, of any dtype, from storage.

    CPU tensors of the stored dtype are read into directly, all at once. Others are read through
    memory of the stored dtype, pinned for CUDA, batch by batch, and converted as ``copy_`` does;
    that takes at most ``max_inflight_bytes`` (or the largest tensor).

    Two tensors may be one memory, as tied weights are; a PlanError if they are stored unlike.
    """
    direct, staged, tied = _divided(reads)
    if direct:
        begin(direct).wait(deadline.left_s)
    memory = HostSnapshot()
    for batch in groups(staged, options.max_inflight_bytes, itemgetter(1)) if staged else ():
        _read_staged(begin, [read for read, _ in batch], memory, deadline)
    for array, region, tensor in tied:
        again = torch.empty_like(tensor)
        run_reads(begin, [(array, region, again)], options, deadline)
        if len({host.tobytes() for host in to_host([tensor, again])}) > 1:
            raise PlanError(
                f"{array.key}: its data is also that of another tensor of this load, for which "
                "the checkpoint holds other values; untie the two, or load one of them",
                key=array.key,
            )


def _divided(
    reads: Sequence[TensorRead],
) -> tuple[list[ArrayRead], list[tuple[TensorRead, int]], list[TensorRead]]:
    """Reads into tensors' own memory; reads through other memory, with its size; tied tensors."""
    direct: list[ArrayRead] = []
    staged: list[tuple[TensorRead, int]] = []
    tied: list[TensorRead] = []
    places = set()
    for read in reads:
        array, region, tensor = read
        shape = tensor.shape, tensor.stride()
        if (place := (tensor.device, tensor.data_ptr(), tensor.dtype, *shape)) in places:
            tied.append(read)
            continue
        places.add(place)
        is_plain = tensor.device.type == "cpu" and not (tensor.is_conj() or tensor.is_neg())
        if is_plain and tensor.dtype == torch_dtype(array.dtype):
            direct.append(ArrayRead(array, region, host_view(tensor)))
        else:
            staged.append((read, region.numel * array.dtype.itemsize))
    return direct, staged, tied


def _read_staged(
    begin: BeginReads, reads: Sequence[TensorRead], memory: HostSnapshot, deadline: Deadline
) -> None:
    """A function, so that nothing looks at the memory any more when it has to grow."""
    layouts = [(region.shape, torch_dtype(array.dtype)) for array, region, _ in reads]
    is_cuda = any(tensor.device.type == "cuda" for _, _, tensor in reads)
    hosts = memory.places(layouts, is_pinned=is_cuda)
    requests = [
        ArrayRead(array, region, host_view(host))
        for (array, region, _), host in zip(reads, hosts, strict=True)
    ]
    begin(requests).wait(deadline.left_s)
    copy_into([tensor for _, _, tensor in reads], hosts)
