"""Messages between a process and the one that writes for it, over a Unix socket."""

from __future__ import annotations

import socket
import struct

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
