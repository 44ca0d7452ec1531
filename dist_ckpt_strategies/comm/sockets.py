"""The TCP connections of this process that belong to gloo's groups, or to stores of torch."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Collection, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

Address = tuple[str, int]
"""IP address and port."""

_SOCKET = re.compile(r"socket:\[(\d+)\]")
_EPOLL = "anon_inode:[eventpoll]"
_WATCHED = re.compile(r"^tfd: *(\d+) .*data: *([0-9a-f]+) .*ino:([0-9a-f]+)", re.MULTILINE)
_LOW_32_BITS = 0xFFFFFFFF
_OWN = Path("/proc/self")


def open_sockets() -> dict[int, int]:
    """File descriptors of the sockets of this process, by inode.

    Sockets are told apart by inode: the numbers of file descriptors are used again.
    """
    found = ((_SOCKET.match(target), fd) for fd, target in _open_files())
    return {int(match[1]): fd for match, fd in found if match}


def addresses_of(host: str, port: int) -> frozenset[Address]:
    """The peer addresses that a connection to the host may have; none if its name is unknown."""
    with suppress(socket.gaierror):
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        return frozenset((_plain(str(address[0])), port) for *_, address in found)
    return frozenset()


def shut_down_groups(older: Collection[int], stores: Collection[Address]) -> int:
    """Shut down the connections of gloo's groups and those to stores; how many were still open.

    Their readers see the end of the stream. Sockets that listen are left alone: gloo ends the
    process if its own is shut down.

    Args:
        older: inodes of sockets that are left alone.
        stores: addresses of the stores.
    """
    later = {inode: fd for inode, fd in open_sockets().items() if inode not in older}
    with ExitStack() as closing:
        sockets = {}
        for inode, fd in later.items():
            with suppress(OSError):  # closed since it was listed
                copy = closing.enter_context(socket.socket(fileno=os.dup(fd)))
                if os.fstat(copy.fileno()).st_ino == inode and _is_tcp(copy):
                    sockets[inode] = copy
        listening = {inode for inode, one in sockets.items() if _is_listening(one)}
        groups = _watched_by_gloo(listening)
        return sum(
            _is_cut(one)
            for inode, one in sockets.items()
            if inode not in listening and (inode in groups or _peer_of(one) in stores)
        )


def _open_files() -> Iterator[tuple[int, str]]:
    for file in (_OWN / "fd").iterdir():
        with suppress(OSError):  # closed since it was listed
            yield int(file.name), str(file.readlink())


def _watched_by_gloo(listening: Collection[int]) -> set[int]:
    """Inodes of all that is watched together with one of these listening sockets.

    Each group of gloo has an epoll instance for its listening socket and its connections. Python's
    and libuv's servers have one too, and keep the file descriptor as data, gloo keeps an address.
    """
    found: set[int] = set()
    for epoll in [fd for fd, target in _open_files() if target == _EPOLL]:
        with suppress(OSError):  # closed since it was listed
            watched = _WATCHED.findall((_OWN / "fdinfo" / str(epoll)).read_text())
            inodes = {int(inode, 16) for _, _, inode in watched}
            is_by_number = any(int(data, 16) & _LOW_32_BITS == int(fd) for fd, data, _ in watched)
            if not is_by_number and not inodes.isdisjoint(listening):
                found |= inodes
    return found


def _is_tcp(one: socket.socket) -> bool:
    return one.family in {socket.AF_INET, socket.AF_INET6} and one.type == socket.SOCK_STREAM


def _is_listening(one: socket.socket) -> bool:
    return bool(one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _peer_of(one: socket.socket) -> Address | None:
    with suppress(OSError):  # not connected, or not any more
        host, port = one.getpeername()[:2]
        return _plain(host), port
    return None


def _plain(host: str) -> str:
    """An IPv4 address as such, where a socket of IPv6 has mapped it."""
    return host.removeprefix("::ffff:")


def _is_cut(one: socket.socket) -> bool:
    with suppress(OSError):  # not connected, or not any more
        one.shutdown(socket.SHUT_RDWR)
        return True
    return False
