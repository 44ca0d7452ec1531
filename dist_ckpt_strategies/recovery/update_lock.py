"""The lock around updates of parameters."""

from __future__ import annotations

import threading
import time
from typing import Self

from dist_ckpt_strategies.errors import RestartError

_PAUSE_S = 0.001


class ParameterUpdateLock:
    """Held by the one thread that changes parameters.

    Waiting for it is done in slices, so that an exception that another thread or a signal raises
    arrives. Taking it is one operation of the interpreter: a signal handler that looks at
    ``held_by`` sees it either held or not, never in between.
    """

    def __init__(self) -> None:
        self._slot: dict[str, int] = {}

    def acquire(self) -> None:
        """Take the lock, however long that takes; a RestartError if this thread has it already."""
        own = threading.get_ident()
        if self.held_by(own):
            raise RestartError("the parameter update lock is held by this thread already")
        while self._slot.setdefault("owner", own) != own:
            time.sleep(_PAUSE_S)

    def release(self) -> None:
        """Give the lock back; a RestartError unless this thread holds it."""
        owner = self._slot.get("owner")
        if owner != threading.get_ident():
            who = "by no thread" if owner is None else f"by thread {owner}"
            raise RestartError(
                f"thread {threading.get_ident()} gives the parameter update lock back: it is held "
                f"{who}"
            )
        self._slot.pop("owner")

    def held_by(self, thread_id: int) -> bool:
        """Whether the thread of that ``threading.get_ident()`` holds the lock."""
        return self._slot.get("owner") == thread_id

    def locked(self) -> bool:
        """Whether any thread holds the lock."""
        return bool(self._slot)

    def __enter__(self) -> Self:
        """Take the lock."""
        self.acquire()
        return self

    def __exit__(self, *_error: object) -> None:
        """Give it back."""
        self.release()
