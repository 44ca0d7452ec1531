"""A bound on the memory of what several threads have under way."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class ByteBudget:
    """At most so many bytes at the same time; a single larger demand is let through alone.

    Args:
        nbytes: the bound.
    """

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._held = 0
        self._changed = threading.Condition()

    @contextmanager
    def held(self, nbytes: int) -> Iterator[None]:
        """Within the block these bytes count; entering waits for others to leave."""
        with self._changed:
            self._changed.wait_for(lambda: not self._held or self._held + nbytes <= self._nbytes)
            self._held += nbytes
        try:
            yield
        finally:
            with self._changed:
                self._held -= nbytes
                self._changed.notify_all()
