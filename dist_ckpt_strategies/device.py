"""Host and device memory: views, pinned memory, copies and waits on a device.

Nothing here touches CUDA unless a tensor at hand is a CUDA tensor. The default device, which a
training script may have set, is never used.
"""

import logging
import math
import mmap
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from itertools import accumulate
from operator import itemgetter
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.parameter import is_lazy

from dist_ckpt_strategies.core.array import DType, groups
from dist_ckpt_strategies.errors import PeerLostError, PeerTimeoutError, PlanError

logger = logging.getLogger(__name__)

HostArray = npt.NDArray[Any]

_ALIGNMENT = 64
_PAUSE_S = 0.0002
_LONGEST_COPY_S = 1800.0

RELEASED = "this process stopped waiting for its peers: a rank has failed"

ABORTED = threading.Event()
"""Set while the communication of this process is ended: at first, before any group is aborted."""


def raise_if_aborted() -> None:
    """Raise if the communication of this process has been ended, or is about to be.

    NCCL ends pending works without an error then, and what they have received is garbage. So this
    is called after a wait for the device, and before anything relies on what it has done.
    """
    if ABORTED.is_set():
        raise PeerLostError(None, RELEASED)


_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def has_gpu() -> bool:
    """Whether this process could use CUDA; asking makes no context."""
    return bool(torch.cuda.is_available())


def uses_cuda() -> bool:
    """Whether this process has used CUDA; asking does not make it."""
    return has_gpu() and bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def current_gpu() -> torch.device:
    """The current device of this thread."""
    return torch.device("cuda", torch.cuda.current_device())


def gpu_of_local_rank(local_rank: int | None) -> int:
    """The number of a rank's GPU: the current one where none is named, or one alone is shown."""
    if local_rank is None or local_rank >= torch.cuda.device_count():
        return int(torch.cuda.current_device())
    return local_rank


def synchronize_gpu(device: int) -> None:
    """Return when a GPU has done all of its work; call it on a thread that may be given up.

    Raises a RuntimeError if the GPU answers with an error.
    """
    torch.cuda.synchronize(device)


def gpu_memory_nbytes() -> int:
    """Bytes that torch has allocated on the current device; 0 if CUDA was not used."""
    return int(torch.cuda.memory_allocated()) if uses_cuda() else 0


def release_gpu_memory() -> None:
    """Have torch's allocator return freed memory, if this process has used CUDA."""
    if uses_cuda():
        torch.cuda.empty_cache()


def gpu_random_state() -> HostArray | None:
    """The state of the current device's generator; None if this process has not used CUDA."""
    return torch.cuda.get_rng_state().numpy() if uses_cuda() else None


def set_gpu_random_state(state: HostArray) -> None:
    """Put the current device's generator where ``gpu_random_state`` found it."""
    torch.cuda.set_rng_state(torch.from_numpy(state))


def await_gpu(timeout_s: float, what: str) -> None:
    """Return when the GPU has done what was queued on this thread's stream; at once without one.

    All waits for a stream are this one. Raises a PeerTimeoutError after the limit, and what
    ``raise_if_aborted`` does.
    """
    if uses_cuda():
        done: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()
        deadline = time.monotonic() + timeout_s
        while not done.query():
            raise_if_aborted()
            if time.monotonic() >= deadline:
                raise PeerTimeoutError(
                    None,
                    f"{what}: the GPU was not done within {timeout_s:g} s; a rank does not take "
                    "part in a collective, or a GPU hangs",
                )
            time.sleep(_PAUSE_S)
    raise_if_aborted()


def on_own_gpu() -> AbstractContextManager[None]:
    """While this is open, the thread's current device is one on which this process has a context.

    A thread begins with GPU 0, where calls of CUDA's runtime would make a context: memory that the
    process of that GPU lacks.
    """
    if not uses_cuda():
        return nullcontext()
    current, torch_c = torch.cuda.current_device(), cast("Any", torch._C)  # noqa: SLF001
    has_context = torch_c._cuda_hasPrimaryContext  # noqa: SLF001 - there is no public way
    devices = [current, *range(torch.cuda.device_count())]
    return torch.cuda.device(next(filter(has_context, devices), current))


def torch_dtype(dtype: DType) -> torch.dtype:
    """Torch's name for an element type."""
    torch_type: torch.dtype = getattr(torch, dtype.value)
    return torch_type


def as_tensor(elements: npt.NDArray[Any], dtype: DType) -> torch.Tensor:
    """The tensor in the same memory, which is in C order."""
    if not elements.size:
        return torch.empty(elements.shape, dtype=torch_dtype(dtype))
    content = torch.from_numpy(elements.reshape(-1).view(np.uint8))
    return content.view(torch_dtype(dtype)).reshape(elements.shape)


def require_plain(tensor: object, *, key: str, is_filled: bool = False) -> None:
    """Raise a PlanError if the tensor is not dense, or has no memory of its own.

    Refuses sparse, nested, quantized and meta tensors, subclasses that wrap others, as DTensor
    does, and tensors whose storage was released or cut by ``untyped_storage().resize_``. A tensor
    that is to be filled must not have two elements in one place, as after ``expand``; that is exact
    for slices, permutations and expansions of a dense tensor.
    """
    lack = kind = ""
    if isinstance(tensor, torch.Tensor):
        kind = "quantized" if tensor.is_quantized else "nested" if tensor.is_nested else ""
        with suppress(RuntimeError, TypeError, ValueError):  # one without storage, or strides
            lack = lacking_storage(tensor)
            is_dense = tensor.layout == torch.strided and not kind
            if not lack and is_dense and (tensor.numel() == 0 or tensor.data_ptr()):
                if not is_filled or tensor.is_contiguous() or not _may_overlap(tensor):
                    return
                lack = "its elements share memory, so it cannot be filled; give a clone of it"
    if not lack:
        lack = f"expected a dense tensor in memory of its own, found {type(tensor).__name__}"
        if isinstance(tensor, torch.Tensor):
            lack += (
                f" of {kind or tensor.layout} elements on {tensor.device}; convert it first, a "
                "DTensor by to_local() or full_tensor()"
            )
    raise PlanError(f"{key}: {lack}", key=key)


def lacking_storage(tensor: torch.Tensor) -> str:
    """Describes what is missing of a tensor on the meta device, or one that exceeds its storage.

    Empty of any other, and of one that has another layout than a dense one.
    """
    if tensor.layout != torch.strided or tensor.is_nested or is_lazy(tensor):
        return ""
    if tensor.device.type == "meta":
        return f"a tensor {tuple(tensor.shape)} on the meta device has no values; load them first"
    if tensor.is_contiguous():
        reach = tensor.numel() - 1
    else:
        reach = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    needed = (tensor.storage_offset() + reach + 1) * tensor.element_size()
    present = tensor.untyped_storage().nbytes()
    if tensor.numel() == 0 or present >= needed:
        return ""
    return (
        f"a tensor {tuple(tensor.shape)} of {tensor.dtype} on {tensor.device} needs {needed} bytes "
        f"of storage, {present} are present: its memory was released; bring the model back from "
        "its offload first"
    )


def _may_overlap(tensor: torch.Tensor) -> bool:
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False


def host_view(tensor: torch.Tensor) -> HostArray:
    """The memory of a CPU tensor as a numpy array: same strides, same bytes, no copy."""
    plain = tensor.detach()
    dtype = DType(str(plain.dtype).removeprefix("torch.")).numpy
    if plain.dtype in (torch.bool, torch.complex64, torch.complex128):
        return plain.numpy()
    return plain.view(_SAME_SIZE[dtype.itemsize]).numpy().view(dtype)


def is_in_order(tensor: torch.Tensor) -> bool:
    """Whether the tensor's memory is its elements in C order, and nothing else."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def to_host(
    tensors: Sequence[torch.Tensor], memory: "HostSnapshot | None" = None
) -> list[HostArray]:
    """The tensors' elements in C order on the host, copied only where they are not there already.

    Returns when the copies are done. They are in ``memory``, in the place of earlier ones; by
    default in new memory.
    """
    plain = [tensor.detach().resolve_conj().resolve_neg() for tensor in tensors]
    is_there = [t.device.type == "cpu" and t.is_contiguous() for t in plain]
    staged = [t for t, is_staged in zip(plain, is_there, strict=True) if not is_staged]
    copies = iter((memory or HostSnapshot()).take(staged) if staged else ())
    places = zip(plain, is_there, strict=True)
    return [host_view(tensor if is_staged else next(copies)) for tensor, is_staged in places]


def host_batches(tensors: Sequence[torch.Tensor], budget: int) -> Iterator[list[HostArray]]:
    """What ``to_host`` returns, batch by batch; each is valid until the next is taken.

    Copies take at most ``budget`` bytes at a time, or the largest tensor.
    """
    memory = HostSnapshot()
    staged = [
        (t, 0 if t.device.type == "cpu" and is_in_order(t) else t.numel() * t.element_size())
        for t in tensors
    ]
    for batch in groups(staged, budget, itemgetter(1)):
        with on_own_gpu():
            hosts = to_host([tensor for tensor, _ in batch], memory)
        yield hosts


def settle(tensors: Sequence[torch.Tensor]) -> None:
    """Return when the work that this thread's current streams have queued for them is done.

    Raises a PeerTimeoutError after half an hour, and what ``raise_if_aborted`` does.
    """
    for device in {tensor.device for tensor in tensors if tensor.device.type == "cuda"}:
        with torch.cuda.device(device):
            await_gpu(_LONGEST_COPY_S, "a wait for tensors")


def copy_into(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Fill each target from its source; returns when the copies are done.

    Copies to or from CUDA run on a side stream of that device, after the work already queued on the
    current stream. Raises what ``settle`` does.
    """
    streams: dict[torch.device, torch.cuda.Stream] = {}
    for target, source in zip(targets, sources, strict=True):
        plain, data = target.detach(), source.detach()
        on_device = next((t for t in (plain, data) if t.device.type == "cuda"), None)
        if on_device is None:
            plain.copy_(data)
            continue
        device = on_device.device
        # Leaving a stream sets the device that was current before: in a new thread GPU 0.
        with torch.cuda.device(device):
            if device not in streams:
                streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
                streams[device].wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(streams[device]):
                plain.copy_(data, non_blocking=True)
                on_device.record_stream(streams[device])
    for device, stream in streams.items():
        with torch.cuda.device(device), torch.cuda.stream(stream):
            await_gpu(_LONGEST_COPY_S, "a copy")


def to_host_beside(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Small tensors on the host, whose content is there already, whatever else a GPU has to do."""
    device = tensors[0].device
    if device.type != "cuda":
        return list(tensors)
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
        return [tensor.cpu() for tensor in tensors]


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, in one dim, without a copy."""
    plain = tensor.detach().as_strided((tensor.numel(),), (1,))  # dims of size 1 have any stride
    real = torch.view_as_real(plain).reshape(-1) if plain.is_complex() else plain
    return real.view(torch.uint8)


def host_memory(nbytes: int, *, is_pinned: bool) -> torch.Tensor:
    """Uninitialised bytes on the host, in large pages where the system has them.

    Torch's own pinned memory is rounded up to a power of two, and never given back.
    """
    # Pages of a private mapping are copied after a fork, and CUDA would go on with the old ones.
    sharing = mmap.MAP_SHARED if is_pinned else mmap.MAP_PRIVATE
    memory = mmap.mmap(-1, max(1, nbytes), flags=sharing | mmap.MAP_ANONYMOUS)
    with suppress(OSError, AttributeError):  # a kernel, or a system, without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return bytes_of_mapping(memory, is_pinned=is_pinned)[:nbytes]


def bytes_of_mapping(memory: mmap.mmap, *, is_pinned: bool) -> torch.Tensor:
    """The bytes of a mapping, which lives as long as any tensor looks at them.

    With ``is_pinned``, CUDA locks the pages for as long, so that copies need no detour. Where CUDA
    refuses, copies take longer, and that is logged.

    Source: cudaHostRegister, as torch's own checkpoints use it for memory that processes share.
    """
    buffer = np.frombuffer(memory, np.uint8)
    if is_pinned:
        start, runtime = buffer.ctypes.data, cast("Any", torch.cuda.cudart)()
        if _is_done(lambda: runtime.cudaHostRegister(start, buffer.size, 0), f"pin {buffer.size}"):
            # ``memory`` is an argument so that it is still mapped then.
            unpin = partial(runtime.cudaHostUnregister, start)
            weakref.finalize(buffer, lambda _: _is_done(unpin, "unpin"), memory)
    return torch.from_numpy(buffer)


class HostSnapshot:
    """Memory for one copy of the tensors, which grows to their size and is kept with the object.

    Memory that was touched before is written several times as fast as new memory.
    """

    def __init__(self) -> None:
        self._memory: torch.Tensor | None = None

    def take(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copies of the tensors, contiguous and on the host; done on return.

        The copies of the call before are overwritten.
        """
        is_pinned = any(tensor.device.type == "cuda" for tensor in tensors)
        copies = self.places([(t.shape, t.dtype) for t in tensors], is_pinned=is_pinned)
        copy_into(copies, tensors)
        return copies

    def places(
        self, layouts: Sequence[tuple[Sequence[int], torch.dtype]], *, is_pinned: bool
    ) -> list[torch.Tensor]:
        """A place for each tensor of these shapes and dtypes; those of the call before are gone.

        Memory that is filled from CUDA is pinned.
        """
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in layouts]
        aligned = (-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)
        *starts, nbytes = accumulate(aligned, initial=0)
        if self._memory is None or self._memory.numel() < nbytes:
            self._memory = None  # before the new one is made
            self._memory = host_memory(nbytes, is_pinned=is_pinned)
        memory = self._memory
        return [
            memory[start : start + size].view(dtype).reshape(tuple(shape))
            for start, size, (shape, dtype) in zip(starts, sizes, layouts, strict=True)
        ]


def _is_done(call: Callable[[], Any], what: str) -> bool:
    """Whether a call of CUDA's runtime succeeds; its error is logged, and then forgotten."""
    with on_own_gpu():
        code = int(call())
        if code != 0:
            logger.warning("CUDA does not %s bytes of host memory (error %d)", what, code)
            with suppress(RuntimeError):  # CUDA keeps the error for the check of the next kernel
                torch.ones(1, device="cuda")
    return code == 0
