"""Threads that wait in place of the caller, who can be told to stop waiting."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from dist_ckpt_strategies.errors import WaitReleasedError

RELEASED = "this process was told to stop waiting for its peers"


class Waiters:
    """As many threads as callers wait at the same time; they are kept for the next ones.

    Args:
        name: of the threads.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._idle: list[_Waiter] = []
        self._calls: set[_Call] = set()
        self._is_released = False

    def run(
        self,
        wait: Callable[[], Any],
        meanwhile: Callable[[], object] | None = None,
        every_s: float = -1,
    ) -> Any:
        """What ``wait`` returns or raises, on another thread.

        Args:
            wait: what blocks.
            meanwhile: called after each ``every_s`` seconds without a result. What it raises is
                raised here; the thread may go on waiting.
            every_s: see ``meanwhile``.

        Raises:
            WaitReleasedError: ``release`` came first; the thread may go on waiting.
        """
        call = _Call(wait)
        waiter = self._taken(call)
        try:
            waiter.begin(call)
            while not call.ended.acquire(timeout=every_s) and meanwhile is not None:
                meanwhile()
        finally:
            self._leave(call, waiter)
        if not call.is_done:
            raise WaitReleasedError(None, RELEASED)
        return call.outcome()

    def _taken(self, call: _Call) -> _Waiter:
        with self._lock:
            if self._is_released:
                raise WaitReleasedError(None, RELEASED)
            self._calls.add(call)
            return self._idle.pop() if self._idle else _Waiter(self._name)

    def _leave(self, call: _Call, waiter: _Waiter) -> None:
        """The caller waits no longer: for the result has come, or for an exception has."""
        call.end()
        with self._lock:
            self._calls.discard(call)
            if call.is_done and not self._is_released:
                self._idle.append(waiter)
                return
        if call.is_done:
            waiter.begin(None)

    def release(self) -> None:
        """End all calls, now and later."""
        with self._lock:
            self._is_released = True
            calls = list(self._calls)
        for call in calls:
            call.end()

    def close(self) -> None:
        """Let the threads end; those that wait do so when the wait has ended."""
        with self._lock:
            self._is_released = True
            idle, self._idle = self._idle, []
        for waiter in idle:
            waiter.begin(None)


class _Call:
    """One wait: ended by its result, or from outside."""

    def __init__(self, wait: Callable[[], Any]) -> None:
        self._wait = wait
        self._once = threading.Lock()
        self.ended = threading.Lock()
        self.ended.acquire()
        self.is_done = False
        self.is_abandoned = False
        self._value: Any = None
        self._error: BaseException | None = None

    def carry_out(self) -> None:
        try:
            self._value = self._wait()
        except BaseException as error:  # noqa: BLE001 - raised again where the caller waits
            self._error = error
        with self._once:
            if self.is_abandoned:
                return
            self.is_done = True
        self.ended.release()

    def end(self) -> None:
        with self._once:
            if self.is_done or self.is_abandoned:
                return
            self.is_abandoned = True
        self.ended.release()

    def outcome(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._value


class _Waiter:
    def __init__(self, name: str) -> None:
        self._mail = threading.Lock()
        self._mail.acquire()
        self._call: _Call | None = None
        threading.Thread(target=self._serve, name=name, daemon=True).start()

    def begin(self, call: _Call | None) -> None:
        self._call = call
        self._mail.release()

    def _serve(self) -> None:
        while True:
            self._mail.acquire()
            call, self._call = self._call, None
            if call is None:
                return
            call.carry_out()
            if call.is_abandoned:
                return
            del call
