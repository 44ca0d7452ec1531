"""Which places this process still writes to behind training."""

from __future__ import annotations

import threading
import time
import weakref
from pathlib import Path
from typing import Any

from dist_ckpt_strategies.formats.locations import Location
from dist_ckpt_strategies.sharded.background import BackgroundWork
from dist_ckpt_strategies.storage.io_pool import limited


class RunningSaves:
    """The saves of this process that go on behind training, by the place that they write to.

    Whoever begins another one there waits for them first, whichever strategy wrote them: their
    files may have the names of the new ones. One that has ended is not kept for this: with it goes
    the memory that it was written from.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._works: list[tuple[str, weakref.ref[BackgroundWork[Any]]]] = []

    def add(self, place: Location, work: BackgroundWork[Any]) -> None:
        """Take note of one that has begun; it lives as long as its thread, at least."""
        with self._lock:
            running = [(known, held) for known, held in self._works if held() is not None]
            self._works = [*running, (_name_of(place), weakref.ref(work))]

    def wait(self, place: Location, timeout_s: float) -> None:
        """Return when all that write to a place have ended, well or not. Rank-local.

        Raises:
            SaveTimeoutError: that takes longer.
        """
        name = _name_of(place)
        with self._lock:
            held = [work() for known, work in self._works if known == name]
        deadline = time.monotonic() + timeout_s
        for work in filter(None, held):
            work.wait(max(0.0, deadline - time.monotonic()))


RUNNING_SAVES = RunningSaves()
"""Those of this process."""


@limited
def _name_of(place: Location) -> str:
    return str(place.resolve() if isinstance(place, Path) else place)
