"""Waits that another thread can abort: whether they are aborted, and blocking calls on threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

from dist_ckpt_strategies.errors import WaitReleasedError

RELEASED = "this process was told to stop waiting for its peers"

ABORTED = threading.Event()
"""Set while the communication of this process is ended: at first, before any group is aborted."""

_Inbox = SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]


def raise_if_aborted() -> None:
    """Raise if the communication of this process has been ended, or is about to be.

    NCCL ends pending works without an error then, and what they have received is garbage. So this
    is called between the wait for a collective and the use of its result.
    """
    if ABORTED.is_set():
        raise WaitReleasedError(None, RELEASED)


class AbortableWaits:
    """About as many threads as callers wait at the same time; they are kept for later calls.

    Args:
        name: of the threads.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._idle: list[_Inbox] = []
        self._calls: set[Future[Any]] = set()
        self._is_aborted = False

    def run(
        self,
        wait: Callable[[], Any],
        meanwhile: Callable[[], object] | None = None,
        every_s: float | None = None,
    ) -> Any:
        """What ``wait`` returns or raises, on another thread.

        Args:
            wait: what blocks.
            meanwhile: called after each ``every_s`` seconds without a result. What it raises is
                raised here; the thread may go on waiting.
            every_s: see ``meanwhile``.

        Raises:
            WaitReleasedError: ``abort`` came first; the thread may go on waiting.
        """
        call: Future[Any] = Future()
        with self._lock:
            if self._is_aborted:
                raise WaitReleasedError(None, RELEASED)
            self._calls.add(call)
            inbox = self._idle.pop() if self._idle else self._started()
            inbox.put((wait, call))
        try:
            while meanwhile is not None and not futures.wait([call], every_s).done:
                meanwhile()
            return call.result()
        finally:
            self._calls.discard(call)
            del call  # or an error that it holds would hold this frame, in a cycle

    def abort(self) -> None:
        """End all calls, now and later. Threads end as soon as what they wait for has ended."""
        with self._lock:
            self._is_aborted = True
            calls, idle = list(self._calls), self._idle
            self._idle = []
        for inbox in idle:
            inbox.put(None)
        for call in calls:
            with suppress(InvalidStateError):  # its result has just come
                call.set_exception(WaitReleasedError(None, RELEASED))

    def _started(self) -> _Inbox:
        inbox: _Inbox = SimpleQueue()
        threading.Thread(target=self._serve, args=(inbox,), name=self._name, daemon=True).start()
        return inbox

    def _serve(self, inbox: _Inbox) -> None:
        while (asked := inbox.get()) is not None:
            wait, call = asked
            value: Any = None
            error: BaseException | None = None
            try:
                value = wait()
            except BaseException as raised:  # noqa: BLE001 - raised again where the caller waits
                error = raised
            with self._lock:
                is_last = self._is_aborted
                if not is_last:
                    self._idle.append(inbox)
            with suppress(InvalidStateError):  # ``abort`` came first
                if error is None:
                    call.set_result(value)
                else:
                    call.set_exception(error)
            del asked, wait, call, value, error
            if is_last:
                return
