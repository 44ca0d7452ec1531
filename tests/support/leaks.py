"""What a test has left behind, whatever other tests of the same process leave or end meanwhile."""

import threading
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path


def threads_left(before: Collection[threading.Thread], *, prefix: str = "") -> list[str]:
    """Names, beginning with ``prefix``, of threads that are new and have not ended in a minute."""
    deadline = time.monotonic() + 60.0
    while _new(before, prefix) and time.monotonic() < deadline:
        time.sleep(0.01)
    return _new(before, prefix)


def open_files_below(directory: Path) -> list[str]:
    """What this process holds open there."""
    found = []
    for handle in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # it is closed by now, as that of the listing
            found.append(str(handle.readlink()))
    return [path for path in found if path.startswith(str(directory.resolve()))]


def _new(before: Collection[threading.Thread], prefix: str) -> list[str]:
    found = [thread.name for thread in threading.enumerate() if thread not in before]
    return [name for name in found if name.startswith(prefix)]
