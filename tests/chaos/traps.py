"""What a rank does to itself: at its n-th storage call, or after so many seconds.

Calls are seen from below: Python tells of files that are opened, renamed and removed, and the calls
that write, read and flush are wrapped. Neither knows of the package.
"""

from __future__ import annotations

import errno
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

INJECTED = "injected by the chaos suite"
"""What the error of a failing call says."""

_WATCHED = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.listdir", "os.scandir")
_WRAPPED = ("write", "pwrite", "preadv", "fsync")


class Act(StrEnum):
    """What happens to the rank."""

    KILL = "SIGKILL"
    STOP = "SIGSTOP"
    FAIL = "an error"
    LIMIT = "a limit on the size of files"


@dataclass(frozen=True, slots=True)
class Trap:
    """What is to happen to a rank, and when.

    Attributes:
        act: what.
        call: storage calls before it.
        delay_s: in place of ``call``: seconds from the begin of what the rank is told to do.
        is_certain: whether it happens at the end, if it has not until then.
        limit_nbytes: of LIMIT; it holds from the begin.
    """

    act: Act
    call: int
    delay_s: float | None = None
    is_certain: bool = False
    limit_nbytes: int = 0


class Traps:
    """The traps of this process; there is one object of it.

    Args:
        root: storage calls are those to files below this directory.
    """

    def __init__(self, root: str) -> None:
        self._root = root
        self._lock = threading.Lock()
        self._trap: Trap | None = None
        self._num_left = 0
        self.has_sprung = False
        sys.addaudithook(self._watch)
        for name in _WRAPPED:
            vars(os)[name] = self._wrapped(vars(os)[name])

    @contextmanager
    def armed(self, trap: Trap | None) -> Iterator[None]:
        """Within the block the trap is set."""
        self.has_sprung = False
        if trap is None:
            yield
            return
        timer = threading.Timer(trap.delay_s or 0.0, self._spring, [trap])
        timer.daemon = True
        if trap.delay_s is not None:
            timer.start()
        with _limited(trap):
            self._num_left, self._trap = trap.call, (trap if trap.delay_s is None else None)
            try:
                yield
            finally:
                self._trap = None
                timer.cancel()
        if trap.is_certain and not self.has_sprung:
            self._spring(trap)

    def _watch(self, event: str, args: tuple[Any, ...]) -> None:
        if self._trap is not None and event in _WATCHED and self._is_ours(args[0]):
            self._count(str(args[0]))

    def _wrapped(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(handle: int, *args: Any, **kwargs: Any) -> Any:
            if self._trap is not None and self._is_ours(path := _path_of(handle)):
                self._count(path)
            return call(handle, *args, **kwargs)

        return counted

    def _is_ours(self, path: object) -> bool:
        return isinstance(path, (str, bytes, os.PathLike)) and os.fsdecode(path).startswith(
            self._root
        )

    def _count(self, path: str) -> None:
        with self._lock:
            trap = self._trap
            self._num_left -= 1
            if trap is None or trap.act is Act.LIMIT or self._num_left >= 0:
                return
            self._trap = None
        self._spring(trap, path)

    def _spring(self, trap: Trap, path: str | None = None) -> None:
        self.has_sprung = True
        match trap.act:
            case Act.KILL:
                os.kill(os.getpid(), signal.SIGKILL)
            case Act.STOP:
                os.kill(os.getpid(), signal.SIGSTOP)
            case Act.FAIL if path is not None:
                raise OSError(errno.EIO, INJECTED, path)


@contextmanager
def _limited(trap: Trap) -> Iterator[None]:
    if trap.act is not Act.LIMIT:
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (trap.limit_nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def _path_of(handle: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{handle}")  # noqa: PTH115 - a Path would cost more
    except OSError:
        return ""
