"""Which places this process still writes to behind training."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

from dist_ckpt_strategies.local.background import BackgroundWork
from dist_ckpt_strategies.storage.locations import Location


class RunningSaves:
    """The saves of this process that go on behind training, by the place that they write to.

    Whoever begins another one there waits for them first, whichever strategy wrote them: their
    files may have the names of the new ones.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._works: list[tuple[str, BackgroundWork[Any]]] = []

    def add(self, place: Location, work: BackgroundWork[Any]) -> None:
        """Take note of one that has begun; those that have ended are forgotten."""
        with self._lock:
            running = [known for known in self._works if not known[1].is_done()]
            self._works = [*running, (_name_of(place), work)]

    def wait(self, place: Location, timeout_s: float) -> None:
        """Return when all that write to a place have ended, well or not. Rank-local.

        Raises:
            SaveTimeoutError: that takes longer.
        """
        name = _name_of(place)
        with self._lock:
            works = [work for known, work in self._works if known == name]
        deadline = time.monotonic() + timeout_s
        for work in works:
            work.wait(max(0.0, deadline - time.monotonic()))


RUNNING_SAVES = RunningSaves()
"""Those of this process."""


def _name_of(place: Location) -> str:
    return str(place.resolve() if isinstance(place, Path) else place)
