"""One time limit for all storage work of a call, and the flag that stops what was given up.

Both are kept in context variables: the strategies of Megatron-Core have no argument for them.
Threads of ``storage.transfers`` run in a copy of the context of the thread that starts them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from dist_ckpt_strategies.errors import StorageError

MAX_SLICE_NBYTES = 16 << 20
"""One system call moves at most this much, so that a transfer that was given up soon ends."""


class CancelFlag:
    """Set once a transfer is given up; flags of transfers that its jobs start follow it."""

    def __init__(self) -> None:
        self._parent = _flag.get()
        self._is_set = False

    def set(self) -> None:
        """Give the transfer up."""
        self._is_set = True

    def is_set(self) -> bool:
        """Whether this transfer, or the one whose job started it, was given up."""
        return self._is_set or (self._parent is not None and self._parent.is_set())

    @contextmanager
    def applied(self) -> Iterator[None]:
        """``raise_if_cancelled`` looks at this flag within the block."""
        token = _flag.set(self)
        try:
            yield
        finally:
            _flag.reset(token)


OPENING, WORK, ENDING, ALL = 1 / 4, 1 / 2, 1 / 4, 3 / 4
"""Shares of ``timeout_s`` for storage: of a call before its first collective, and after it; of the
end of a save in the background; of a call without such parts. Peers wait for all of ``timeout_s``:
they learn of a failure before they give up on this rank."""


@dataclass(slots=True)
class _Limit:
    """A limit in seconds, when it is over, the next one in seconds, and the limit around it."""

    seconds: float
    deadline: float
    next_s: float
    outer: _Limit | None


_flag: ContextVar[CancelFlag | None] = ContextVar("dist_ckpt_cancel_flag", default=None)
_limit: ContextVar[_Limit | None] = ContextVar("dist_ckpt_time_limit", default=None)


def raise_if_cancelled() -> None:
    """Raise if the transfer that this thread works for was given up; else return.

    Call it after every system call that may block, before anything else is changed. The error goes
    nowhere: the call that started the transfer has raised already.
    """
    if is_cancelled():
        raise StorageError("the transfer was given up")


def is_cancelled() -> bool:
    """Whether the transfer that this thread works for was given up."""
    flag = _flag.get()
    return flag is not None and flag.is_set()


@contextmanager
def time_limit(timeout_s: float, share: float = ALL, *, then: float = 0.0) -> Iterator[None]:
    """All storage work that is waited for within the block shares one limit.

    An outer block with less time left prevails.

    Args:
        timeout_s: what peers wait for, in seconds.
        share: of it, for the storage.
        then: the share from ``restart_limit`` on.
    """
    with _applied(share * timeout_s, then * timeout_s, _limit.get()):
        yield


@contextmanager
def clean_up_limit() -> Iterator[None]:
    """What is left to do after a failure has a quarter of the limit, even where that is over."""
    limit = _limit.get()
    if limit is None:
        yield
        return
    with _applied(limit.seconds / 4, 0.0, None):
        yield


@contextmanager
def _applied(seconds: float, next_s: float, outer: _Limit | None) -> Iterator[None]:
    token = _limit.set(_Limit(seconds, time.monotonic() + seconds, next_s, outer))
    try:
        yield
    finally:
        _limit.reset(token)


def restart_limit() -> None:
    """Begin the second part of the innermost block's limit: the first collective is over.

    What a rank waited for others to begin is not the storage's fault.
    """
    limit = _limit.get()
    if limit is not None and limit.next_s:
        limit.seconds = limit.next_s
        limit.deadline = time.monotonic() + limit.seconds


@contextmanager
def uncounted() -> Iterator[None]:
    """What is waited for within the block, such as an earlier save, has a limit of its own."""
    began = time.monotonic()
    try:
        yield
    finally:
        waited, limit = time.monotonic() - began, _limit.get()
        while limit is not None:
            limit.deadline += waited
            limit = limit.outer


def needs_thread() -> bool:
    """Whether storage work has a limit that only another thread can keep: not yet on such a one."""
    return _limit.get() is not None and _flag.get() is None


def deadline_of(timeout_s: float = math.inf) -> tuple[float, float]:
    """When a wait for storage that begins now ends, and the limit in seconds for messages.

    Args:
        timeout_s: the limit outside of any ``time_limit`` block.
    """
    found = time.monotonic() + timeout_s, timeout_s
    limit = _limit.get()
    while limit is not None:
        found = min(found, (limit.deadline, limit.seconds))
        limit = limit.outer
    return found
