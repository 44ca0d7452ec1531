"""The connections of this process: which there are, and how they are cut."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_INODE = re.compile(r"socket:\[(\d+)\]")
_FILES = Path("/proc/self/fd")

SocketFilter = Callable[[socket.socket], bool]
"""Whether a connection must be left alone."""


def leave_none_alone(_connection: socket.socket) -> bool:
    """No connection is protected."""
    return False


@dataclass(frozen=True, slots=True)
class SocketCensus:
    """The sockets that this process had at a time.

    Told apart by inode: the numbers of file descriptors are used again.
    """

    inodes: frozenset[int]

    @classmethod
    def take(cls) -> SocketCensus:
        """Of now."""
        return cls(frozenset(inode for _, inode in _sockets()))

    def shut_down_later_ones(
        self,
        is_protected: SocketFilter = leave_none_alone,
        protected_inodes: frozenset[int] = frozenset(),
    ) -> int:
        """Cut every TCP connection that was opened since; how many were still open.

        Whoever reads from one meets its end. Sockets that listen are left alone: gloo ends the
        process if its own is shut down.
        """
        spared = self.inodes | protected_inodes
        later = [(fd, inode) for fd, inode in _sockets() if inode not in spared]
        return sum(_shut_down(fd, inode, is_protected) for fd, inode in later)


def num_sockets() -> int:
    """Sockets that this process has open."""
    return sum(1 for _ in _sockets())


def _sockets() -> Iterator[tuple[int, int]]:
    for file in _FILES.iterdir():
        try:
            target = str(file.readlink())
        except OSError:  # closed since it was listed
            continue
        found = _INODE.match(target)
        if found:
            yield int(file.name), int(found[1])


def _shut_down(fd: int, inode: int, is_protected: SocketFilter) -> bool:
    try:
        own = os.dup(fd)
    except OSError:  # closed since it was listed
        return False
    if os.fstat(own).st_ino != inode:  # closed, and the number used again
        os.close(own)
        return False
    with closing(socket.socket(fileno=own)) as connection:
        return _is_to_end(connection, is_protected) and _is_cut(connection)


def _is_to_end(connection: socket.socket, is_protected: SocketFilter) -> bool:
    if connection.family not in {socket.AF_INET, socket.AF_INET6}:
        return False
    if connection.type != socket.SOCK_STREAM:
        return False
    if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        return False
    return not is_protected(connection)


def _is_cut(connection: Any) -> bool:
    with suppress(OSError):  # not connected, or not any more
        connection.shutdown(socket.SHUT_RDWR)
        return True
    return False
