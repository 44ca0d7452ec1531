"""A backend of torch.distributed, on gloo, whose waits end when they are told to."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from dist_ckpt_strategies.comm.interruptible_work import (
    InterruptibleWork,
    MessageWork,
    OnceFuture,
)
from dist_ckpt_strategies.comm.waiters import RELEASED, Waiters
from dist_ckpt_strategies.errors import WaitReleasedError

BACKEND_NAME = "interruptible_gloo"

_CPU = torch.device("cpu")

_COLLECTIVES = (
    "_allgather_base",
    "_reduce_scatter_base",
    "all_gather_single",
    "all_gather_single_coalesced",
    "all_to_all_single",
    "allgather",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "allreduce_coalesced",
    "alltoall",
    "alltoall_base",
    "barrier",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "scatter",
    "_end_coalescing",
)
_MESSAGES = ("send", "recv", "recv_anysource")
_PLAIN = (
    "_get_backend",
    "_get_sequence_number_for_group",
    "_set_sequence_number_for_group",
    "_start_coalescing",
    "set_timeout",
)


class WaitControl:
    """Ends the waits of all groups of this process at once, and lets new groups wait again."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._groups: WeakSet[InterruptibleGloo] = WeakSet()
        self._is_released = False

    def admit(self, group: InterruptibleGloo) -> None:
        """Take in a group that has just been made; one made too late ends at once."""
        with self._lock:
            self._groups.add(group)
            is_late = self._is_released
        if is_late:
            group.release()

    def release(self) -> None:
        """End every wait, now and until ``renew``. The groups of today never wait again."""
        with self._lock:
            self._is_released = True
            groups = list(self._groups)
        for group in groups:
            group.release()

    def renew(self) -> None:
        """Let groups wait that are made from now on."""
        with self._lock:
            self._is_released = False

    def groups(self) -> list[InterruptibleGloo]:
        """The groups of this process that have not been taken down."""
        with self._lock:
            return [group for group in self._groups if not group.is_taken_down]


DEFAULT_WAIT_CONTROL = WaitControl()
"""That of the groups which ``init_process_group("interruptible_gloo")`` makes."""


class InterruptibleGloo(dist.ProcessGroup):
    """A process group that hands all it is asked to a gloo group, and can be told to stop."""

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        timeout: timedelta,
        control: WaitControl,
    ) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._group_name = ""
        self._group_desc = ""
        self._is_released = False
        self._lock = threading.Lock()
        self._pending: deque[Any] = deque()
        self._futures: set[OnceFuture] = set()
        self._waiters = Waiters(f"dist_ckpt-gloo-{rank}")
        self._inner: Any = None
        self._is_taken_down = False
        control.admit(self)
        # Not here: who waits for a rank that never connects has no connection that could be cut.
        self._inner = self._waiters.run(lambda: _gloo_group(store, rank, size, timeout))

    @property
    def is_taken_down(self) -> bool:
        """Whether ``take_down`` has been called."""
        return self._is_taken_down

    @property
    def inner(self) -> Any:
        """The gloo group.

        Raises:
            WaitReleasedError: this group has been told to stop.
        """
        self.require_waiting()
        inner = self._inner
        if inner is None:
            raise WaitReleasedError(None, "the process group has been taken down")
        return inner

    def require_waiting(self) -> None:
        """Raise if this group has been told to stop."""
        if self._is_released:
            raise WaitReleasedError(None, RELEASED)

    def release(self) -> None:
        """End all waits on this group, for good."""
        self._is_released = True
        self._waiters.release()
        with self._lock:
            futures = list(self._futures)
            self._futures.clear()
        for future in futures:
            future.fail(WaitReleasedError(None, RELEASED))

    def take_down(self) -> tuple[Any, list[Any]]:
        """Give away the gloo group, and what is under way in it; this one is of no use any more.

        The gloo group's last reference must go where the destructor may block, unless all that
        was under way has completed.
        """
        self.release()
        self._waiters.close()
        with self._lock:
            inner, self._inner = self._inner, None
            self._is_taken_down = True
            pending = list(self._pending)
            self._pending.clear()
        return inner, pending

    def begun(self, inner: Any) -> InterruptibleWork:
        """The work for what has been started in gloo."""
        with self._lock:
            self._pending.append(inner)
        return InterruptibleWork(self, inner)

    def forget_completed(self) -> None:
        """Let go of what has been completed, and of its tensors."""
        with self._lock:
            while self._pending and self._pending[0].is_completed():
                self._pending.popleft()

    def future_of(self, inner: Any) -> torch.futures.Future[Any]:
        """A future that ends as ``inner`` does, or when the waits are released."""
        future = OnceFuture()
        with self._lock:
            self._futures.add(future)
        if self._is_released:
            future.fail(WaitReleasedError(None, RELEASED))
        inner.get_future().add_done_callback(lambda done: self._settle(future, done))
        return future.future

    def _settle(self, future: OnceFuture, done: Any) -> None:
        with self._lock:
            self._futures.discard(future)
        future.follow(done)

    def run(self, wait: Callable[[], Any]) -> Any:
        """Call what blocks in gloo on another thread; wait for it, or for the release."""
        self.require_waiting()
        return self._waiters.run(wait)

    def allreduce(self, *args: Any, **kwargs: Any) -> Any:
        """As gloo's. An average of whole numbers, which gloo lacks, is there when this returns."""
        tensors, options = args[0], args[1] if len(args) > 1 else dist.AllreduceOptions()
        is_average = _is_average_of_integers(tensors, options)
        if is_average:
            options.reduceOp = dist.ReduceOp.SUM
        work = self.begun(self.inner.allreduce(*args, **kwargs))
        if is_average:
            work.wait()
            for tensor in tensors:
                tensor.div_(self.size(), rounding_mode="floor")
        return work

    def monitored_barrier(self, *args: Any, **kwargs: Any) -> Any:
        """As gloo's. ``dist.monitored_barrier`` takes only groups whose backend is named gloo."""
        inner = self.inner
        return self.run(lambda: inner.monitored_barrier(*args, **kwargs))

    def getBackendName(self) -> str:  # noqa: N802 - torch calls it
        """The name that the group was asked for by."""
        return BACKEND_NAME

    def getGroupName(self) -> str:  # noqa: N802 - torch calls it
        """The name that torch has given it."""
        return self._group_name

    def setGroupName(self, name: str) -> None:  # noqa: N802 - torch calls it
        """Take the name that torch gives it."""
        self._group_name = name

    def getGroupDesc(self) -> str:  # noqa: N802 - torch calls it
        """What torch says that it is for."""
        return self._group_desc

    def setGroupDesc(self, desc: str) -> None:  # noqa: N802 - torch calls it
        """Take what torch says that it is for."""
        self._group_desc = desc

    def name(self) -> str:
        """The name that the group was asked for by."""
        return BACKEND_NAME

    @property
    def _device_types(self) -> list[torch.device]:
        return [_CPU]

    def shutdown(self) -> None:
        """End all waits on this group, for good."""
        self.release()

    def abort(self) -> None:
        """End all waits on this group, for good."""
        self.release()


def register_interruptible_gloo() -> None:
    """Make the backend ``"interruptible_gloo"`` known to torch.distributed; again does nothing."""
    if BACKEND_NAME in dist.Backend.backend_list:
        return
    dist.Backend.register_backend(BACKEND_NAME, _new_group, devices=["cpu"])


def _new_group(store: Store, rank: int, size: int, timeout: timedelta) -> InterruptibleGloo:
    return InterruptibleGloo(store, rank, size, timeout, DEFAULT_WAIT_CONTROL)


def _gloo_group(store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    """A group as torch makes it for the backend gloo."""
    backend = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
    backend._set_sequence_number_for_group()  # noqa: SLF001 - as torch does
    kind = dist.ProcessGroup.BackendType.GLOO
    group = dist.ProcessGroup(store, rank, size)
    group._set_default_backend(kind)  # noqa: SLF001 - as torch does
    group._register_backend(_CPU, kind, backend)  # noqa: SLF001 - as torch does
    return group


def _is_average_of_integers(tensors: Any, options: Any) -> bool:
    if not (isinstance(tensors, list) and isinstance(options, dist.AllreduceOptions)):
        return False
    op: Any = options.reduceOp
    return op == dist.ReduceOp.AVG and not (
        tensors[0].is_floating_point() or tensors[0].is_complex()
    )


def _collective(name: str) -> Callable[..., Any]:
    def start(self: InterruptibleGloo, *args: Any, **kwargs: Any) -> Any:
        return self.begun(getattr(self.inner, name)(*args, **kwargs))

    return start


def _message(name: str) -> Callable[..., Any]:
    def start(self: InterruptibleGloo, *args: Any, **kwargs: Any) -> Any:
        return MessageWork(self, getattr(self.inner, name)(*args, **kwargs))

    return start


def _plain(name: str) -> Callable[..., Any]:
    def call(self: InterruptibleGloo, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.inner, name)(*args, **kwargs)

    return call


for _names, _made in ((_COLLECTIVES, _collective), (_MESSAGES, _message), (_PLAIN, _plain)):
    for _name in _names:
        if hasattr(dist.ProcessGroup, _name):
            setattr(InterruptibleGloo, _name, _made(_name))
