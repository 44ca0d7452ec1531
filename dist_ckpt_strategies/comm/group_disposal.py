"""The end of process groups whose destructor may block."""

from __future__ import annotations

import atexit
import ctypes
import threading
from collections.abc import Sequence
from typing import Any

_PAUSE_S = 0.05
_EXIT_WAIT_S = 1.0


class GroupDisposal:
    """Lets go of gloo groups once nothing is under way in them any more.

    The destructor of a group waits for the group's timeout where gloo has forgotten the buffer of
    a message: so such a group is kept until then. One thread looks after all of them, and ends with
    the last. What is left when the interpreter exits is never destroyed: a thread that came back
    from a destructor at that time would end the process with an abort.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: list[_KeptGroup] = []
        self._thread: threading.Thread | None = None
        self._exits = threading.Event()

    def take(self, group: Any, pending: Sequence[Any]) -> None:
        """Destroy ``group`` as soon as all ``pending`` works in it have completed.

        Args:
            group: the last reference to it, once the caller has dropped its own.
            pending: works of the group that may be under way.
        """
        with self._lock:
            self._kept.append(_KeptGroup(group, list(pending)))
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._serve, name="dist_ckpt-group-disposal", daemon=True
                )
                self._thread.start()
                atexit.register(self._leave)

    @property
    def num_waiting(self) -> int:
        """Groups that are not destroyed yet."""
        with self._lock:
            return len(self._kept)

    def _serve(self) -> None:
        while not self._exits.is_set():
            ready = self._ready()
            if ready is None:
                return
            ready.clear()  # the destructors run here
            self._exits.wait(_PAUSE_S)

    def _ready(self) -> list[Any] | None:
        """Groups that can be destroyed; None where none is left, and the thread ends."""
        with self._lock:
            if not self._kept:
                self._thread = None
                atexit.unregister(self._leave)
                return None
            quiet = [kept for kept in self._kept if kept.is_quiet()]
            self._kept = [kept for kept in self._kept if kept not in quiet]
            return [kept.group for kept in quiet]

    def _leave(self) -> None:
        self._exits.set()
        thread = self._thread
        if thread is not None:
            thread.join(_EXIT_WAIT_S)
        with self._lock:
            for kept in self._kept:
                _keep_for_ever(kept)


class _KeptGroup:
    def __init__(self, group: Any, pending: list[Any]) -> None:
        self.group = group
        self._pending = pending

    def is_quiet(self) -> bool:
        while self._pending and self._pending[-1].is_completed():
            self._pending.pop()
        return not self._pending


def _keep_for_ever(what: Any) -> None:
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(what))


DEFAULT_GROUP_DISPOSAL = GroupDisposal()
