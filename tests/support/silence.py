"""A disk that stops to answer: every system call below a directory blocks from then on."""

from __future__ import annotations

import builtins
import io
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

_CALLS = (
    *("open", "preadv", "pread", "pwrite", "write", "fsync", "stat", "lstat", "mkdir"),
    *("scandir", "listdir", "replace", "rename", "unlink"),
)

_PACKAGE = "/dist_ckpt_strategies/"


class SilentDisk:
    """Counts the system calls below a directory; from one of them on, they block.

    Attributes:
        num_calls: how many there were.
        has_blocked: whether one of them has blocked.
        on_main_thread: where the package has made one on the main thread, which has no limit.
    """

    def __init__(self, directory: Path, first: int, slow_s: float = 0.0) -> None:
        self.num_calls = 0
        self.has_blocked = False
        self.on_main_thread: set[str] = set()
        self._directory = str(directory)
        self._first = first
        self._slow_s = slow_s
        self._is_back = threading.Event()
        self._counting = threading.Lock()

    def answer(self) -> None:
        """Let all calls go on."""
        self._is_back.set()

    def patched(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same system call, on this disk."""

        def run(*args: Any, **kwargs: Any) -> Any:
            if args and self._is_here(args[0]):
                self._wait()
            return call(*args, **kwargs)

        return run

    def _is_here(self, place: Any) -> bool:
        if isinstance(place, int):
            try:
                place = Path(f"/proc/self/fd/{place}").readlink()
            except OSError:
                return False
        return isinstance(place, (str, os.PathLike)) and self._directory in str(place)

    def _wait(self) -> None:
        if threading.current_thread() is threading.main_thread():
            stack = [str(one) for one in traceback.extract_stack() if _PACKAGE in one.filename]
            self.on_main_thread.update(stack[-1:])
        with self._counting:
            self.num_calls += 1
            is_silent = self.num_calls > self._first
            self.has_blocked |= is_silent
            is_slow = self.num_calls == 1
        if is_slow:
            time.sleep(self._slow_s)
        if is_silent:
            self._is_back.wait(20.0)


@contextmanager
def silent_disk(directory: Path, first: int, slow_s: float = 0.0) -> Iterator[SilentDisk]:
    """System calls below the directory block, but for the first ones; the very first takes long."""
    disk = SilentDisk(directory, first, slow_s)
    with pytest.MonkeyPatch.context() as changes:
        for name in _CALLS:
            changes.setattr(os, name, disk.patched(getattr(os, name)))
        opened = disk.patched(io.open)
        changes.setattr(io, "open", opened)
        changes.setattr(builtins, "open", opened)
        try:
            yield disk
        finally:
            disk.answer()
