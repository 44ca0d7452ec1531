"""Ends what ranks do together: groups of NCCL and gloo, and waits on threads."""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent import futures
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dist_ckpt_strategies.comm.process_group import ProcessGroup, uses_nccl
from dist_ckpt_strategies.device import RELEASED
from dist_ckpt_strategies.errors import PeerLostError

logger = logging.getLogger(__name__)

_TAG_OF_NOTHING = 1 << 30
"""Of a message that no rank sends; others have the tag 0."""


def abort_nccl(groups: Iterable[ProcessGroup], limit_s: float | None = None) -> None:
    """Abort the NCCL communicators of groups, all at once: one by one they wait for each other.

    An abort ends its own group's works at once, and then waits for all that the device has, works
    of other groups too. So each has a thread; after ``limit_s`` the rest goes on in theirs. (An
    abort within NCCL's group calls, torch's own way, is on a thread outside of them.) An abort
    that fails is logged: what else there is to end must not wait for it.
    """

    def abort(group: Any) -> None:
        try:
            group._get_backend(torch.device("cuda")).abort()  # noqa: SLF001 - no public way
        except RuntimeError as error:
            logger.warning("a process group of NCCL could not be aborted: %s", error)

    threads = [
        threading.Thread(target=abort, args=[group], name="dist_ckpt-abort", daemon=True)
        for group in groups
        if uses_nccl(group)
    ]
    for thread in threads:
        thread.start()
    deadline = None if limit_s is None else time.monotonic() + limit_s
    for thread in threads:
        thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))


def disconnect_gloo(groups: Sequence[ProcessGroup], peer: int) -> None:
    """Close all connections of gloo groups, by a receive from ``peer`` that times out.

    Gloo closes those of the group that has timed out, and of no other.
    """
    for group in groups:
        nothing = torch.empty(1, dtype=torch.uint8, device="cpu")
        with suppress(RuntimeError, ValueError):  # it is closed, aborted or destroyed already
            work: Any = dist.irecv(nothing, peer, group=group, tag=_TAG_OF_NOTHING)
            work.wait(timedelta(milliseconds=1))


# Blocking calls on threads, whose waits another thread can abort


class AbortableWaits:
    """Calls that ``abort`` ends; each blocking one has a thread, which is abandoned then."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: set[Future[Any]] = set()
        self.is_aborted = False

    def require_waiting(self) -> None:
        """Raise if all calls have been ended."""
        if self.is_aborted:
            raise PeerLostError(None, RELEASED)

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
        """Run ``wait`` on another thread, and return its result; PeerLostError at an abort.

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
                call.set_exception(PeerLostError(None, RELEASED))


def run_abandonable(call: Callable[[], Any], timeout_s: float, what: str) -> Any:
    """Run ``call`` on a thread; TimeoutError that names ``what`` if it does not end in time."""

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
