"""CUDA on the host: tensors that say ``cuda:0``, streams, and copies that land at synchronisation.

For torch's CPU build, in a process of its own: ``play_cuda`` replaces functions of torch for good.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Self, cast

import torch
from torch.utils._pytree import tree_flatten, tree_map_only

aten = torch.ops.aten

GARBAGE = 0xAB  # what memory holds that nothing has arrived in
_CUDA = torch.device("cuda", 0)
_NUM_DEVICES = 2

CONTEXTS = {_CUDA.index}
"""Devices on which this process has a context, which takes memory of that device."""


class Runtime:
    """CUDA's runtime: it locks pages, unless told not to. An error stays until a kernel's check."""

    refuses = False
    last_error = 0
    pinned: ClassVar[dict[int, int]] = {}
    """Sizes of what is locked, by address."""

    @classmethod
    def cudaHostRegister(cls, start: int, nbytes: int, _flags: int) -> int:  # noqa: N802
        CONTEXTS.add(_current_device())
        cls.last_error = 2 if cls.refuses else 0
        if not cls.refuses:
            cls.pinned[start] = nbytes
        return cls.last_error

    @classmethod
    def check(cls, kernel: str) -> None:
        error, cls.last_error = cls.last_error, 0
        if error:
            raise RuntimeError(f"CUDA error: out of memory, seen by {kernel}")

    @classmethod
    def cudaHostUnregister(cls, start: int) -> int:  # noqa: N802
        CONTEXTS.add(_current_device())
        del cls.pinned[start]
        return 0


_UNTOUCHED = {"empty_like", "new_empty", "detach", "new_zeros", "zeros_like"}
_FACTORIES = ("empty", "zeros", "ones", "full", "tensor", "arange", "rand", "randn", "as_tensor")


class RuleBrokenError(RuntimeError):
    """A program that NCCL or CUDA would not run as meant; the text begins with the rule."""


class Stream:
    """Works that a stream waits for, and copies that land when the host waits for the stream."""

    device = _CUDA

    def __init__(self, *_arguments: Any, **_options: Any) -> None:
        self.works: list[Any] = []
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def copy_later(self, target: torch.Tensor, source: torch.Tensor) -> None:
        fill_with_garbage(target)
        self._copies.append((target, source))

    def wait_stream(self, other: Stream) -> None:
        self.works += other.works

    def synchronize(self) -> None:
        while self.works:
            self.works.pop(0).block()
        while self._copies:
            target, source = self._copies.pop(0)
            target.copy_(source)


class Event:
    """A place in a stream; what comes before it is seen to be done when ``query`` says so."""

    def __init__(self, *_arguments: Any, **_options: Any) -> None:
        self._stream = current_stream()

    def record(self) -> None:
        self._stream = current_stream()

    def query(self) -> bool:
        if all(work.done.is_set() for work in self._stream.works):
            self._stream.synchronize()
            return True
        return False


PENDING: list[Any] = []
"""Communication that the host has not seen to be done; guarded by the interpreter's lock."""

_DEFAULT = Stream()
_current = threading.local()


def _current_device() -> int:
    """That of this thread; all begin with the first."""
    return getattr(_current, "device", 0)


def _set_device(device: Any) -> None:
    """As CUDA 12, which makes a context at once."""
    _current.device = (
        torch.device("cuda", device).index if isinstance(device, int) else device.index
    )
    CONTEXTS.add(_current.device)


@contextmanager
def _device(device: Any) -> Iterator[None]:
    before = _current_device()
    _set_device(device)
    try:
        yield
    finally:
        _current.device = before


def current_stream(_device: Any = None) -> Stream:
    """That of this thread; all begin with the same."""
    return getattr(_current, "stream", _DEFAULT)


@contextmanager
def _stream(stream: Stream) -> Iterator[None]:
    before, device = current_stream(), _current_device()
    _current.stream = stream
    _set_device(_CUDA)
    try:
        yield
    finally:
        _current.stream = before
        _set_device(device)  # torch sets the device of the stream before, and has a context there


_Tensor: Any = torch.Tensor


class CudaTensor(_Tensor):  # type: ignore[misc]
    """A tensor whose memory, ``host``, only the device is to touch."""

    host: torch.Tensor
    device = _CUDA
    is_cuda = True
    is_cpu = False
    is_meta = False
    __torch_function__ = torch._C._disabled_torch_function_impl

    def __new__(cls, host: torch.Tensor) -> Self:
        found: Any = _Tensor._make_wrapper_subclass(
            cls,
            host.size(),
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            device="meta",
        )
        found.host = host
        return cast("Self", found)

    def __repr__(self) -> str:
        return f"CudaTensor({tuple(self.shape)}, {self.dtype})"

    def data_ptr(self) -> int:
        return self.host.data_ptr()

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def record_stream(self, stream: Any) -> None:
        pass  # memory is not used again while a tensor is held

    @classmethod
    def __torch_dispatch__(cls, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation on the memory; raises if communication has not been waited for."""
        kwargs = dict(kwargs or {})
        name = func.name().partition("::")[2].partition(".")[0]
        is_in_place = name.endswith("_") and not name.endswith("__")
        if not func.is_view:
            Runtime.check(name)
        if not func.is_view and name not in _UNTOUCHED:
            _require_waited(
                [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, cls)],
                args[0] if is_in_place else None,
            )
        if any(
            isinstance(t, torch.Tensor) and not isinstance(t, cls) and t.dim() and name != "copy_"
            for t in tree_flatten(args)[0]
        ):
            raise RuleBrokenError(f"tensors of one device: {name} of tensors on cpu and cuda:0")
        goes_to_host = "device" in kwargs and torch.device(kwargs["device"]).type == "cpu"
        if "device" in kwargs:
            kwargs["device"] = torch.device("cpu")
        kwargs.pop("pin_memory", None)
        leaves = name == "copy_" and not all(isinstance(each, cls) for each in args[:2])
        if leaves and (kwargs.get("non_blocking") or args[2:] == (True,)):
            current_stream().copy_later(*map(memory_of, args[:2]))
            return args[0]
        on_host, named = tree_map_only(cls, memory_of, (args, kwargs))
        found = func(*on_host, **named)
        if is_in_place:
            return args[0]
        if goes_to_host:
            return found
        return tree_map_only(torch.Tensor, cls, found)


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor of either device."""
    return tensor.host if isinstance(tensor, CudaTensor) else tensor.detach()


def fill_with_garbage(memory: torch.Tensor) -> None:
    if memory.numel():
        memory.copy_(
            torch.full((memory.element_size(),), GARBAGE, dtype=torch.uint8)
            .view(memory.dtype)
            .expand(memory.shape)
        )


def _require_waited(tensors: Sequence[CudaTensor], written: Any) -> None:
    """Raise unless this thread's stream waits for what fills, or still reads, the tensors."""
    for work in tuple(PENDING):
        touched = any(
            overlap(tensor.host, other)
            for tensor in tensors
            for other in (*work.outputs, *(work.inputs if tensor is written else ()))
        )
        if touched and work not in current_stream().works:
            raise RuleBrokenError(
                f"results are there after a wait: memory of {work.name} was used before its work "
                "was waited for on this stream"
            )
        if touched:
            work.block()


def overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors on the host may share bytes."""
    (a, b), (c, d) = map(_reach, (one, other))
    return a < d and c < b


def _reach(memory: torch.Tensor) -> tuple[int, int]:
    if not memory.numel():
        return (0, 0)
    last = sum((n - 1) * s for n, s in zip(memory.shape, memory.stride(), strict=True))
    return memory.data_ptr(), memory.data_ptr() + (last + 1) * memory.element_size()


def _is_cuda(place: Any) -> bool:
    if isinstance(place, str | torch.device):
        return torch.device(place).type == "cuda"
    return isinstance(place, CudaTensor)


def _made_there(plain: Callable[..., Any]) -> Callable[..., Any]:
    def make(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("pin_memory", None)
        is_there = _is_cuda(kwargs.get("device"))
        if is_there:
            kwargs["device"] = "cpu"
        found = plain(*args, **kwargs)
        if is_there and plain.__name__ != "empty":
            Runtime.check(plain.__name__)
        return CudaTensor(found) if is_there else found

    return make


def play_cuda(index: int = 0) -> None:
    """Have this process see two CUDA devices, and use one of them."""
    global _CUDA  # noqa: PLW0603 - before there is any tensor
    CudaTensor.device = Stream.device = _CUDA = torch.device("cuda", index)
    CONTEXTS.clear()
    _set_device(_CUDA)
    plain_to: Any = _Tensor.to

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not any(map(_is_cuda, (*args, kwargs.get("device")))):
            return plain_to(self, *args, **kwargs)
        kwargs.pop("device", None)
        rest = [each for each in args if not _is_cuda(each)]
        found = plain_to(self, *rest, **kwargs) if rest or kwargs else self
        return found if isinstance(found, CudaTensor) else CudaTensor(found.detach().clone())

    _Tensor.to = to
    _Tensor.cuda = lambda self, *_, **__: self.to("cuda")
    for name in _FACTORIES:
        setattr(torch, name, _made_there(getattr(torch, name)))
    generator = torch.Generator().manual_seed(1)
    replaced: dict[str, Any] = {
        "cudart": lambda: Runtime,
        "current_device": _current_device,
        "current_stream": current_stream,
        "default_stream": lambda *_: _DEFAULT,
        "device": _device,
        "device_count": lambda: _NUM_DEVICES,
        "empty_cache": lambda: None,
        "get_device_capability": lambda *_: (9, 0),
        "get_rng_state": lambda *_: generator.get_state(),
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "memory_allocated": lambda *_: 0,
        "set_device": _set_device,
        "set_rng_state": lambda state, *_: generator.set_state(state),
        "stream": _stream,
        "Event": Event,
        "Stream": Stream,
        "synchronize": lambda *_: _DEFAULT.synchronize(),
    }
    for name, function in replaced.items():
        setattr(torch.cuda, name, function)
    setattr(torch._C, "_cuda_hasPrimaryContext", CONTEXTS.__contains__)  # noqa: B010 - not there
    torch.cuda.nccl.version = lambda: (2, 28, 0)
