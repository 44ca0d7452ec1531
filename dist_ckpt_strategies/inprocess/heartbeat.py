"""Signs of life: a thread that tells the supervisor that this process still runs."""

from __future__ import annotations

import atexit
import os
import stat
import threading
from contextlib import suppress

from dist_ckpt_strategies.config import Launch

_NAME = "dist-ckpt-heartbeat"

SIGN = b"."
FAREWELL = b"!"
"""The last sign: the interpreter ends, and threads with it, some time before the process."""


def start_heartbeat(launch: Launch) -> None:
    """From now on this process gives signs of life, where somebody listens. Again: no change.

    The thread runs while the main thread computes or waits, in Python or in C code that lets go
    of the interpreter's lock. It stops with the process, whether that is stopped or dead.
    """
    if launch.heartbeat_pipe is None or any(t.name == _NAME for t in threading.enumerate()):
        return
    fd, inode = launch.heartbeat_pipe
    if not _is_pipe(fd, inode):
        return
    os.set_blocking(fd, False)
    _tell(fd, SIGN)  # from here on silence counts, even if the thread never comes to run
    args = (fd, launch.heartbeat_s)
    atexit.register(_say_farewell, fd, inode)
    threading.Thread(target=_beat, args=args, name=_NAME, daemon=True).start()


def _is_pipe(fd: int, inode: int) -> bool:
    """False in a process that a worker has started: it inherits variables, but no pipe.

    The number may stand for a file of its own there.
    """
    try:
        found = os.fstat(fd)
    except OSError:
        return False
    return stat.S_ISFIFO(found.st_mode) and found.st_ino == inode


def _beat(fd: int, interval_s: float) -> None:
    pause = threading.Event()
    with suppress(BrokenPipeError):  # nobody listens any more
        while True:
            _tell(fd, SIGN)
            pause.wait(interval_s)


def _tell(fd: int, sign: bytes) -> None:
    with suppress(BlockingIOError):  # the supervisor is slow, and finds enough once it looks
        os.write(fd, sign)


def _say_farewell(fd: int, inode: int) -> None:
    if _is_pipe(fd, inode):
        with suppress(BrokenPipeError):
            _tell(fd, FAREWELL)
