"""A disk that stops to answer: every system call below a directory blocks from then on."""

import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.system_calls import before_calls

_PACKAGE = "/dist_ckpt_strategies/"


class SilentDisk:
    """Counts the system calls below a directory; from one of them on, they block."""

    def __init__(self, directory: Path, first: int, slow_s: float = 0.0) -> None:
        self.has_blocked = False
        self.on_main_thread: set[str] = set()
        """Where the package has made one on the main thread, which has no limit."""
        self.is_back = threading.Event()
        self._directory, self._first, self._slow_s = str(directory), first, slow_s
        self._num_calls = 0
        self._counting = threading.Lock()

    def wait(self, _: str, path: str) -> None:
        """Have a call of this thread wait, if it is to the directory."""
        if self._directory not in path:
            return
        if threading.current_thread() is threading.main_thread():
            stack = [str(one) for one in traceback.extract_stack() if _PACKAGE in one.filename]
            self.on_main_thread.update(stack[-1:])
        with self._counting:
            self._num_calls += 1
            is_first, is_silent = self._num_calls == 1, self._num_calls > self._first
            self.has_blocked |= is_silent
        if is_first:
            time.sleep(self._slow_s)
        if is_silent:
            self.is_back.wait(200.0)  # longer than a process may take to end


@contextmanager
def silent_disk(directory: Path, first: int, slow_s: float = 0.0) -> Iterator[SilentDisk]:
    """System calls below the directory block, but for the first ones; the very first takes long."""
    disk = SilentDisk(directory, first, slow_s)
    with before_calls(disk.wait):
        try:
            yield disk
        finally:
            disk.is_back.set()
