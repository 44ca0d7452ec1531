"""Blocking calls on threads, whose waits another thread can abort."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any

from dist_ckpt_strategies.comm.process_group import RELEASED
from dist_ckpt_strategies.errors import WaitReleasedError


class AbortableWaits:
    """Calls that ``abort`` ends; each blocking one has a thread, which is abandoned then."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: set[Future[Any]] = set()
        self.is_aborted = False

    def require_waiting(self) -> None:
        """Raise if all calls have been ended."""
        if self.is_aborted:
            raise WaitReleasedError(None, RELEASED)

    def begin(self) -> Future[Any]:
        """A call for ``settle``; it fails when ``abort`` comes first, at once if it has."""
        call: Future[Any] = Future()
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        if self.is_aborted:
            self.abort()
        return call

    def run(
        self,
        wait: Callable[[], Any],
        meanwhile: Callable[[], object] | None = None,
        every_s: float | None = None,
    ) -> Any:
        """What ``wait`` returns or raises, on another thread; WaitReleasedError if it is aborted.

        ``meanwhile`` is called after each ``every_s`` seconds without a result. What it raises is
        raised here. The thread may go on waiting in either case.
        """
        self.require_waiting()
        call = self.begin()
        try:
            threading.Thread(target=settle, args=(call, wait), name=self._name, daemon=True).start()
            while meanwhile is not None and not futures.wait([call], every_s).done:
                meanwhile()
            return call.result()
        finally:
            self._calls.discard(call)
            del call  # or an error that it holds would hold this frame, in a cycle

    def abort(self) -> None:
        """End all calls, now and later."""
        self.is_aborted = True
        for call in list(self._calls):
            with suppress(InvalidStateError):  # its result has just come
                call.set_exception(WaitReleasedError(None, RELEASED))


def run_abandonable(call: Callable[[], Any], timeout_s: float, what: str) -> Any:
    """What ``call`` returns or raises on a thread, or a TimeoutError: ``what`` did not answer."""

    def give_up() -> None:
        raise TimeoutError(f"{what} did not answer within {timeout_s:g} s")

    return AbortableWaits("dist_ckpt-call").run(call, give_up, timeout_s)


def settle(call: Future[Any], wait: Callable[[], Any]) -> None:
    """Give a call what ``wait`` returns or raises, unless it has been aborted."""
    try:
        value = wait()
        with suppress(InvalidStateError):
            call.set_result(value)
    except BaseException as error:  # noqa: BLE001 - raised again where the caller waits
        with suppress(InvalidStateError):
            call.set_exception(error)
    finally:
        del call, wait
