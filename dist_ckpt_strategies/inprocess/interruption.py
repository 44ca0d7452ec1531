"""Takes the thread that runs the block out of it, wherever it is."""

from __future__ import annotations

import ctypes
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Protocol, TypeVar

from dist_ckpt_strategies.inprocess.coordinator import Fault

T = TypeVar("T")

SIGNAL = signal.SIGRTMIN + 5
"""Sent to the main thread; nobody else may use it."""

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


class UpdateLock(Protocol):
    """Held while parameters change: the block is not interrupted then."""

    def held_by(self, thread_id: int) -> bool:
        """Whether that thread holds it."""
        ...


class Interrupter:
    """Raises RankShouldRestart in the block, again and again, until the block has been left.

    In the main thread by a signal, which also ends ``time.sleep``, waits for locks and system
    calls; in another one by an asynchronous exception, which does not.

    Args:
        lock: the update lock, where there is one.
    """

    def __init__(self, lock: UpdateLock | None = None) -> None:
        self._lock = lock
        self._guard: FrameType | None = None
        self._thread_id = 0
        self._is_main = False
        self._is_installed = False
        self._fault: Fault | None = None
        self._requested_at = 0.0
        self._num_raised = 0
        self._wants_raise = False
        self._async = threading.Lock()
        self._left = threading.Event()
        self._left.set()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """While this is open, the signal is ours. For the thread that calls ``guarded``.

        Within another one it does nothing.
        """
        if self._is_installed:
            yield
            return
        self._is_installed = True
        try:
            with self._heard():
                yield
        finally:
            self._is_installed = False

    @contextmanager
    def _heard(self) -> Iterator[None]:
        self._thread_id = threading.get_ident()
        self._is_main = threading.current_thread() is threading.main_thread()
        if not self._is_main:
            yield
            return
        before = signal.signal(SIGNAL, self._on_signal)
        try:
            yield
        finally:
            signal.signal(SIGNAL, before)

    def guarded(self, fn: Callable[[], T]) -> T:
        """Call ``fn``; RankShouldRestart may be raised in it, and never after it.

        The signal's handler raises only where a frame above this one is running, so there is no
        moment at which the exception could come too late.
        """
        if not self._is_main:
            return self._guarded_elsewhere(fn)
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
                self._knock()
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

    def _knock(self) -> None:
        if self._is_main:
            signal.pthread_kill(self._thread_id, SIGNAL)
            return
        with self._async:
            if self._left.is_set() or self._is_locked():
                return
            _raise_in(self._thread_id, RankShouldRestart)
            self._num_raised += 1

    def _on_signal(self, _number: int, frame: FrameType | None) -> None:
        if not self._wants_raise or not self._may_raise_at(frame) or self._is_locked():
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
            # A module whose import was broken off stays broken as long as the process lives.
            if _is_importing(frame) or (defers and _is_fragile(frame)):
                return False
            frame = frame.f_back
        return frame is not None

    def _is_locked(self) -> bool:
        return self._lock is not None and self._lock.held_by(self._thread_id)

    def _guarded_elsewhere(self, fn: Callable[[], T]) -> T:
        self._left.clear()
        try:
            return fn()
        finally:
            self._leave_elsewhere()

    def _leave_elsewhere(self) -> None:
        """From here on no exception is set, and one that is pending is gone."""
        while not self._left.is_set():
            try:
                with self._async:
                    _raise_in(self._thread_id, None)
                    self._left.set()
            except RankShouldRestart:
                continue


def _is_importing(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__") in _IMPORTING


def _is_fragile(frame: FrameType) -> bool:
    if frame.f_code.co_name in _FRAGILE_FUNCTIONS:
        return True
    return frame.f_globals.get("__name__") in _FRAGILE_MODULES


def _raise_in(thread_id: int, error: Any) -> None:
    """Raise in a thread at its next step in Python; None takes back what is pending."""
    what = ctypes.py_object(error) if error is not None else None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread_id), what)
