"""A backend of torch.distributed, on gloo, whose waits can be aborted."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, ClassVar
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from dist_ckpt_strategies.comm.abort import AbortableWaits, settle

BACKEND_NAME = "interruptible_gloo"

_CPU = torch.device("cpu")
_SLICE_S = 0.02
_NO_LIMIT = timedelta(0)

_COLLECTIVES = (
    *("_allgather", "_end_coalescing", "_reduce_scatter"),
    *("all", "barrier", "broadcast", "gather", "reduce", "scatter"),
)
"""How the names of torch's methods begin that start a collective."""

_MESSAGES = ("send", "recv", "recv_anysource")
_PLAIN = (
    "_get_backend",
    "_get_sequence_number_for_group",
    "_set_sequence_number_for_group",
    "_start_coalescing",
    "set_timeout",
)


class InterruptibleGloo(dist.ProcessGroup):
    """A process group that forwards all calls to a gloo group, and whose waits can be aborted.

    ``abort_all`` aborts those of all groups of the process, also of groups made later, until
    ``allow_new`` is called. An aborted group stays so.
    """

    _lock_of_all = threading.Lock()
    _all: ClassVar[WeakSet[InterruptibleGloo]] = WeakSet()
    _is_all_aborted = False

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._group_name = ""
        self._group_desc = ""
        self._lock = threading.Lock()
        self._pending: deque[Any] = deque()
        self.waits = AbortableWaits(f"dist_ckpt-gloo-{rank}")
        self._inner: Any = None
        with self._lock_of_all:
            self._all.add(self)
            is_late = InterruptibleGloo._is_all_aborted
        if is_late:
            self.waits.abort()
        # On another thread: waiting for a rank that never connects, there is no connection to cut.
        self._inner = self.waits.run(lambda: gloo_group(store, rank, size, timeout))

    @classmethod
    def abort_all(cls) -> list[InterruptibleGloo]:
        """Abort the waits of all groups, now and until ``allow_new``; the groups."""
        with cls._lock_of_all:
            InterruptibleGloo._is_all_aborted = True
            groups = list(cls._all)
        for group in groups:
            group.waits.abort()
        return groups

    @classmethod
    def allow_new(cls) -> None:
        """Let groups wait that are made from now on."""
        with cls._lock_of_all:
            InterruptibleGloo._is_all_aborted = False

    @property
    def inner(self) -> Any:
        """The gloo group; a PeerLostError once this one has been aborted."""
        self.waits.require_waiting()
        return self._inner

    def abort(self) -> None:
        """End all waits on this group, for good."""
        self.waits.abort()

    shutdown = abort

    def take_down(self) -> tuple[Any, list[Any]]:
        """Abort, and give away the gloo group and its pending works; (None, []) the second time.

        The gloo group's last reference must go where the destructor may block, unless all works
        have completed.
        """
        self.waits.abort()
        with self._lock:
            inner, self._inner = self._inner, None
            pending = list(self._pending)
            self._pending.clear()
        return inner, pending

    def forget_completed(self) -> None:
        """Drop the references to completed works, and so to their tensors."""
        with self._lock:
            while self._pending and self._pending[0].is_completed():
                self._pending.popleft()

    def future_of(self, inner: Any) -> torch.futures.Future[Any]:
        """A future that ends as ``inner`` does, or when this group is aborted.

        ``set_exception`` of torch makes an exception the *value*, and has Python raise it. C++ does
        not know that: DistributedDataParallel takes the first tensor of what has none, and the
        process dies. What a callback raises is an error for C++ too, so the result is a callback's.
        """
        promise: torch.futures.Future[Any] = torch.futures.Future()
        found = promise.then(lambda done: done.value())

        def pass_on(call: Future[Any]) -> None:
            error: Any = call.exception()
            if error is None:
                promise.set_result(call.result())
            else:
                promise.set_exception(error)

        call = self.waits.begin()
        call.add_done_callback(pass_on)
        inner.get_future().add_done_callback(lambda done: settle(call, done.value))
        return found

    def started(self, inner: Any) -> _Collective:
        """The work for one of gloo's, which is kept until it has completed."""
        with self._lock:
            self._pending.append(inner)
        return _Collective(self, inner)

    def name(self) -> str:
        """The name of the backend."""
        return BACKEND_NAME

    getBackendName = name  # noqa: N815 - torch calls it

    def getGroupName(self) -> str:  # noqa: D102, N802 - torch's
        return self._group_name

    def setGroupName(self, name: str) -> None:  # noqa: D102, N802 - torch's
        self._group_name = name

    def getGroupDesc(self) -> str:  # noqa: D102, N802 - torch's
        return self._group_desc

    def setGroupDesc(self, desc: str) -> None:  # noqa: D102, N802 - torch's
        self._group_desc = desc

    @property
    def _device_types(self) -> list[torch.device]:
        return [_CPU]


class _Collective(dist.Work):
    """A collective that is under way in gloo."""

    def __init__(self, group: InterruptibleGloo, inner: Any) -> None:
        super().__init__()
        self._group = group
        self._inner = inner
        self._future: torch.futures.Future[Any] | None = None

    def wait(self, timeout: timedelta = _NO_LIMIT) -> bool:
        """Return once it is done; a PeerLostError if the group was aborted."""
        deadline = time.monotonic() + (timeout.total_seconds() or float("inf"))
        while True:
            left_s = max(0.001, deadline - time.monotonic())
            try:
                self._inner.wait(timedelta(seconds=min(_SLICE_S, left_s)))
                break
            except RuntimeError:
                if self._inner.is_completed():
                    self._group.forget_completed()
                    self._inner.wait()  # raises what it ended with; it may have ended well by now
                    break
                if time.monotonic() >= deadline:
                    raise
                self._group.waits.require_waiting()
        self._group.forget_completed()
        return True

    def synchronize(self) -> None:
        """Same as ``wait``."""
        self.wait()

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of the tensors; it fails when the group is aborted."""
        if self._future is None:
            self._future = self._group.future_of(self._inner)
        return self._future


class _Message(_Collective):
    """A message to or from one rank.

    Gloo closes the connection when a wait for a message has timed out, so it is not waited for in
    slices: another thread waits, once.
    """

    def wait(self, timeout: timedelta = _NO_LIMIT) -> bool:
        """See above."""
        args = () if timeout <= _NO_LIMIT else (timeout,)
        return bool(self._group.waits.run(lambda: self._inner.wait(*args)))

    def get_future(self) -> torch.futures.Future[Any]:
        """Gloo has none for messages."""
        future: torch.futures.Future[Any] = self._inner.get_future()
        return future


def register_interruptible_gloo() -> None:
    """Make the backend ``"interruptible_gloo"`` known to torch.distributed; again does nothing."""
    if BACKEND_NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND_NAME, InterruptibleGloo, devices=["cpu"])


def gloo_group(store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    """A group as torch makes it for the backend gloo."""
    backend = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
    backend._set_sequence_number_for_group()  # noqa: SLF001 - as torch does
    kind = dist.ProcessGroup.BackendType.GLOO
    group = dist.ProcessGroup(store, rank, size)
    group._set_default_backend(kind)  # noqa: SLF001 - as torch does
    group._register_backend(_CPU, kind, backend)  # noqa: SLF001 - as torch does
    return group


def _allreduce(self: InterruptibleGloo, tensors: Any, options: Any = None, *args: Any) -> Any:
    """Gloo's all-reduce, and an average of whole numbers, which Lightning requests."""
    options = dist.AllreduceOptions() if options is None else options
    is_average = getattr(options, "reduceOp", None) == dist.ReduceOp.AVG and not (
        tensors[0].is_floating_point() or tensors[0].is_complex()
    )
    if is_average:
        options.reduceOp = dist.ReduceOp.SUM
    work = self.started(self.inner.allreduce(tensors, options, *args))
    if is_average:
        work.wait()
        for tensor in tensors:
            tensor.div_(self.size(), rounding_mode="floor")
    return work


def _forward(name: str, wrap: Callable[[InterruptibleGloo, Any], Any]) -> None:
    """Give groups a method of torch's, whose result is wrapped."""

    def call(self: InterruptibleGloo, *args: Any, **kwargs: Any) -> Any:
        return wrap(self, getattr(self.inner, name)(*args, **kwargs))

    setattr(InterruptibleGloo, name, call)


def _ask(name: str) -> None:
    """Give works a method of torch's works."""
    setattr(_Collective, name, lambda self: getattr(self._inner, name)())


for _name in dir(dist.ProcessGroup):
    if _name.startswith(_COLLECTIVES):
        _forward(_name, InterruptibleGloo.started)
    elif _name in _MESSAGES:
        _forward(_name, _Message)
    elif _name in _PLAIN:
        _forward(_name, lambda _, result: result)
for _name in ("is_completed", "is_success", "exception", "result", "_source_rank"):
    _ask(_name)
InterruptibleGloo.allreduce = _allreduce  # type: ignore[assignment, method-assign, unused-ignore]
