"""What a test has left behind, whatever other tests of the same process leave or end meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection
from pathlib import Path


def threads_left(
    before: Collection[threading.Thread], *, prefix: str = "", within_s: float = 60.0
) -> list[str]:
    """Names, beginning with ``prefix``, of threads that are new and have not ended in time."""
    deadline = time.monotonic() + within_s
    while _new(before, prefix) and time.monotonic() < deadline:
        time.sleep(0.01)
    return _new(before, prefix)


def open_files_below(directory: Path) -> list[str]:
    """What this process holds open there."""
    return [path for path in map(_target, _handles()) if path.startswith(str(directory.resolve()))]


def _new(before: Collection[threading.Thread], prefix: str) -> list[str]:
    found = [thread.name for thread in threading.enumerate() if thread not in before]
    return [name for name in found if name.startswith(prefix)]


def _handles() -> list[Path]:
    return list(Path("/proc/self/fd").iterdir())


def _target(handle: Path) -> str:
    """Where an open file is; nowhere once it is closed, as that of the listing is by now."""
    try:
        return str(handle.readlink())
    except FileNotFoundError:
        return ""
