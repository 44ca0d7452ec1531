"""What is under way in an interruptible group: collectives, messages, and futures of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

_SLICE = timedelta(milliseconds=20)
_NO_LIMIT = timedelta(0)


class InterruptibleGroup(Protocol):
    """What work asks of its group."""

    def size(self) -> int:
        """How many ranks it has."""
        ...

    def require_waiting(self) -> None:
        """Raise if the group has been told to stop."""
        ...

    def forget_completed(self) -> None:
        """Let go of what has been completed, and of its tensors."""
        ...

    def future_of(self, inner: Any) -> torch.futures.Future[Any]:
        """A future that ends as ``inner`` does, or when the waits are released."""
        ...

    def run(self, wait: Callable[[], Any]) -> Any:
        """Call what blocks in gloo on another thread; wait for it, or for the release."""
        ...


class InterruptibleWork(dist.Work):
    """A collective that is under way in gloo."""

    def __init__(self, group: InterruptibleGroup, inner: Any) -> None:
        super().__init__()
        self._group = group
        self._inner = inner
        self._future: torch.futures.Future[Any] | None = None

    def wait(self, timeout: timedelta = _NO_LIMIT) -> bool:
        """Return once it is done.

        Raises:
            WaitReleasedError: this process was told to stop waiting.
            RuntimeError: as gloo says.
        """
        deadline = time.monotonic() + timeout.total_seconds() if timeout > _NO_LIMIT else None
        while not self._ended_within(_slice_before(deadline), deadline):
            self._group.require_waiting()
        self._group.forget_completed()
        return True

    def _ended_within(self, limit: timedelta, deadline: float | None) -> bool:
        try:
            self._inner.wait(limit)
        except RuntimeError:
            if self._inner.is_completed():
                self._group.forget_completed()
                self._inner.wait()  # raises what it ended with; it may have ended well by now
                return True
            if deadline is not None and time.monotonic() >= deadline:
                raise
            return False
        return True

    def synchronize(self) -> None:
        """As ``wait``."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether it has ended, well or not."""
        return bool(self._inner.is_completed())

    def is_success(self) -> bool:
        """Whether it has ended well."""
        return bool(self._inner.is_success())

    def exception(self) -> Any:
        """What it ended with."""
        return self._inner.exception()

    def result(self) -> Any:
        """The tensors."""
        return self._inner.result()

    def _source_rank(self) -> int:
        return int(self._inner._source_rank())  # noqa: SLF001 - torch names it so

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of the tensors; it fails when this process is told to stop waiting."""
        if self._future is None:
            self._future = self._group.future_of(self._inner)
        return self._future


class MessageWork(InterruptibleWork):
    """A message to or from one rank.

    Gloo closes the connection when a wait for a message has timed out, so it is not waited for in
    slices: another thread waits, once.
    """

    def wait(self, timeout: timedelta = _NO_LIMIT) -> bool:
        """See above."""
        inner = self._inner
        wait = inner.wait if timeout <= _NO_LIMIT else lambda: inner.wait(timeout)
        return bool(self._group.run(wait))

    def get_future(self) -> torch.futures.Future[Any]:
        """Gloo has none for messages."""
        future: torch.futures.Future[Any] = self._inner.get_future()
        return future


class OnceFuture:
    """A future that is set once, by whoever comes first.

    ``set_exception`` of torch makes an exception the *value*, and has Python raise it. C++ does not
    know of that: DistributedDataParallel takes the first tensor of what has none, and the process
    dies. What a callback raises is an error for C++ too, so what is given out is one step further.
    """

    def __init__(self) -> None:
        self._promise: torch.futures.Future[Any] = torch.futures.Future()
        self.future: torch.futures.Future[Any] = self._promise.then(_value_of)
        self._lock = threading.Lock()
        self._is_set = False

    def fail(self, error: Exception) -> None:
        """End it with an error, unless it has ended."""
        if self._is_mine():
            self._promise.set_exception(error)

    def follow(self, done: Any) -> None:
        """End it as another future has, unless it has ended."""
        if not self._is_mine():
            return
        try:
            value = done.value()
        except RuntimeError as error:
            self._promise.set_exception(error)
        else:
            self._promise.set_result(value)

    def _is_mine(self) -> bool:
        with self._lock:
            is_mine, self._is_set = not self._is_set, True
        return is_mine


def _value_of(done: torch.futures.Future[Any]) -> Any:
    return done.value()


def _slice_before(deadline: float | None) -> timedelta:
    if deadline is None:
        return _SLICE
    left = timedelta(seconds=max(0.001, deadline - time.monotonic()))
    return min(_SLICE, left)
