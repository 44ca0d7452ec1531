"""Memory that two processes have in common."""

from __future__ import annotations

import logging
import mmap
import os
import pickle
import signal
import socket
import struct
import sys
import threading
import time
import weakref
from contextlib import suppress
from typing import Any

from dist_ckpt_strategies.errors import CheckpointError, StorageError

_NAME = "dist_ckpt-snapshot"


def is_supported() -> bool:
    """Whether this system has memory of that kind."""
    return hasattr(os, "memfd_create")


class SharedBytes:
    """Memory without a name: who is sent its file descriptor can map it too.

    All of it is allocated on return, so that no copy fails halfway.

    Args:
        nbytes: how much.

    Attributes:
        handle: the file descriptor, closed when this object is gone.
        memory: the mapping; its views keep it.

    Raises:
        StorageError: there is not so much.
    """

    def __init__(self, nbytes: int) -> None:
        self.handle = os.memfd_create(_NAME, os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self.handle)
        try:
            os.posix_fallocate(self.handle, 0, max(1, nbytes))
        except OSError as error:
            raise StorageError(
                f"no memory to copy {nbytes} bytes to for an asynchronous save: {error.strerror}"
            ) from error
        self.memory = mmap.mmap(self.handle, max(1, nbytes), flags=_populated(mmap.MAP_SHARED))


def mapped(handle: int) -> memoryview:
    """All the memory behind a file descriptor, to read; the descriptor may be closed then."""
    return memoryview(mmap.mmap(handle, 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ))


def _populated(flags: int) -> int:
    """With the pages in place: one by one, at their first use, they take several times as long."""
    with suppress(AttributeError):
        return flags | mmap.MAP_POPULATE
    return flags


_HEADER = struct.Struct("<Q")
_NO_HANDLE = -1


def send(connection: socket.socket, content: bytes, handle: int | None = None) -> None:
    """Send bytes, and a file descriptor beside them if there is one."""
    header = _HEADER.pack(len(content))
    if handle is None:
        connection.sendall(header)
    else:
        socket.send_fds(connection, [header], [handle])
    connection.sendall(content)


def receive(connection: socket.socket) -> tuple[bytes, int]:
    """The next message, and the file descriptor that came with it; -1 where none has.

    Raises:
        EOFError: the other end has closed the connection.
    """
    header, handles, _, _ = socket.recv_fds(connection, _HEADER.size, 1)
    header += _exactly(connection, _HEADER.size - len(header)) if header else b""
    if not header:
        raise EOFError
    (nbytes,) = _HEADER.unpack(header)
    return _exactly(connection, nbytes), handles[0] if handles else _NO_HANDLE


def _exactly(connection: socket.socket, nbytes: int) -> bytes:
    content = bytearray(nbytes)
    view = memoryview(content)
    held = 0
    while held < nbytes:
        found = connection.recv_into(view[held:])
        if not found:
            raise EOFError
        held += found
    return bytes(content)


logger = logging.getLogger(__name__)

_LOW_PRIORITY = 10
_POLL_S = 0.02


def main() -> None:
    """Take jobs, one after the other, until the connection is closed."""
    connection, parent = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent to deal with
    os.setpriority(os.PRIO_PROCESS, 0, _LOW_PRIORITY)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    memories: dict[int, memoryview] = {}
    while True:
        try:
            content, handle = receive(connection)
            send(connection, pickle.dumps(_outcome(content, _memory(memories, handle))))
        except (EOFError, ConnectionError):  # a parent that is killed may reset it
            os._exit(0)  # nothing here is to be cleaned up, and a thread may still wait for a disk


def _end_with(parent: int) -> None:
    """End with the parent process: another may write to the same place."""
    while os.getppid() == parent:
        time.sleep(_POLL_S)
    os._exit(1)


def _memory(memories: dict[int, memoryview], handle: int) -> memoryview:
    """What lies behind the descriptor; mapped once, as long as it is the same."""
    inode = os.fstat(handle).st_ino
    if inode not in memories:
        memories.clear()
        memories[inode] = mapped(handle)
    os.close(handle)
    return memories[inode]


def _outcome(content: bytes, memory: memoryview) -> Any:
    try:
        return pickle.loads(content).run(memory)  # noqa: S301 - from the parent
    except CheckpointError as error:
        return error
    except Exception as error:
        logger.exception("an asynchronous save failed")
        return StorageError(f"the writing process failed: {type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
