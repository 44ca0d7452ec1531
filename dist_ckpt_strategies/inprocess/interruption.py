"""Takes the main thread out of the block, wherever it is."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

from dist_ckpt_strategies.errors import StrategyError
from dist_ckpt_strategies.inprocess.rendezvous import Fault

T = TypeVar("T")

SIGNAL = signal.SIGRTMIN + 5
"""Sent to the main thread; reserved for it."""

_RETRY_S = 0.01
_AGAIN_S = 0.25
_LONGEST_S = 2.0
_DEFER_S = 2.0
_IMPORTING = frozenset({"importlib._bootstrap", "importlib._bootstrap_external"})
_FRAGILE_MODULES = frozenset({"logging"})
_FRAGILE_FUNCTIONS = frozenset({"__del__", "_extract_tensors"})
"""The latter is torch's, called from C++ in a backward pass: what it raises ends the process."""


class RankShouldRestart(BaseException):
    """Raised in the block when a fault has ended the attempt; let it pass.

    Attributes:
        fault: what has happened.
    """

    def __init__(self, fault: Fault | None = None) -> None:
        super().__init__(str(fault) if fault else "a rank has failed")
        self.fault = fault


class Interrupter:
    """Raises RankShouldRestart in the block, again and again, until the block has been left.

    By a signal, which also ends ``time.sleep``, waits for locks and system calls. Python delivers
    signals to the main thread alone, so the block has to run there. While the block holds ``lock``,
    a ParameterUpdateLock, parameters change, and it is not interrupted.
    """

    def __init__(self, lock: Any = None) -> None:
        self._lock = lock
        self._guard: FrameType | None = None
        self._thread_id = 0
        self._is_installed = False
        self._fault: Fault | None = None
        self._requested_at = 0.0
        self._num_raised = 0
        self._wants_raise = False
        self._left = threading.Event()
        self._left.set()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """While this is open, the signal is ours. Within another one it does nothing."""
        if self._is_installed:
            yield
            return
        if threading.current_thread() is not threading.main_thread():
            raise StrategyError(
                "HPWrapper: the block has to run in the main thread, the only one that a fault can "
                f"interrupt; found {threading.current_thread().name}"
            )
        self._thread_id = threading.get_ident()
        self._is_installed = True
        before = signal.signal(SIGNAL, self._on_signal)
        try:
            yield
        finally:
            signal.signal(SIGNAL, before)
            self._is_installed = False

    def guarded(self, fn: Callable[[], T]) -> T:
        """Call ``fn``; RankShouldRestart may be raised in it, and never after it.

        The signal's handler raises only where a frame above this one is running, so there is no
        moment at which the exception could come too late.
        """
        self._left.clear()
        self._guard = sys._getframe()  # noqa: SLF001 - the handler compares
        try:
            return fn()
        finally:
            self._guard = None
            self._left.set()

    def interrupt(self, fault: Fault, timeout_s: float) -> bool:
        """Have the block left; whether it was within the time. For another thread."""
        self._fault = fault
        self._num_raised = 0
        self._requested_at = time.monotonic()
        deadline = self._requested_at + timeout_s
        pause_s = _AGAIN_S
        while not self._left.is_set():
            if time.monotonic() >= deadline:
                return False
            raised = self._num_raised
            self._wants_raise = True
            while self._num_raised == raised and time.monotonic() < deadline:
                signal.pthread_kill(self._thread_id, SIGNAL)
                if self._left.wait(_RETRY_S):
                    return True
            self._left.wait(min(pause_s, max(0.0, deadline - time.monotonic())))
            pause_s = min(2 * pause_s, _LONGEST_S)
        return True

    def prepare(self) -> None:
        """The block is about to be entered: from now on ``interrupt`` waits for it to be left."""
        self._wants_raise = False
        self._left.clear()

    def leave(self) -> None:
        """The block has been left, or is not going to be entered."""
        self._left.set()

    @property
    def has_left(self) -> bool:
        """Whether the block is not running, and not about to."""
        return self._left.is_set()

    def _on_signal(self, _number: int, frame: FrameType | None) -> None:
        if not self._wants_raise or not self._may_raise_at(frame):
            return
        if self._lock is not None and self._lock.held_by(self._thread_id):
            return
        self._wants_raise = False
        self._num_raised += 1
        raise RankShouldRestart(self._fault)

    def _may_raise_at(self, frame: FrameType | None) -> bool:
        """Whether the block is running, and at a place that can bear an exception."""
        if self._guard is None or frame is self._guard:
            return False
        defers = time.monotonic() - self._requested_at < _DEFER_S
        while frame is not None and frame is not self._guard:
            module, function = frame.f_globals.get("__name__"), frame.f_code.co_name
            # A module whose import was broken off stays broken as long as the process lives.
            if module in _IMPORTING:
                return False
            if defers and (module in _FRAGILE_MODULES or function in _FRAGILE_FUNCTIONS):
                return False
            frame = frame.f_back
        return frame is not None
