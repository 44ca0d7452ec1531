"""A FUSE file system whose one file's reads are never answered: its readers do not die of SIGKILL.

    python stuck_file_system.py MOUNTPOINT

Prints ``mounted``, makes ``MOUNTPOINT.read`` when somebody reads, and ends once it is unmounted.
When it ends, the readers do.
"""

import ctypes
import errno
import os
import struct
import sys
from contextlib import suppress
from enum import IntEnum
from pathlib import Path

REQUEST = struct.Struct("<IIQQIIII")  # length, operation, number, node, and who asks
REPLY = struct.Struct("<IiQ")
MODES = {1: 0o40755, 2: 0o100644}


class Operation(IntEnum):
    """Those of the kernel's interface that a lookup, an open and a read take."""

    LOOKUP = 1
    GETATTR = 3
    OPEN = 14
    READ = 15
    INIT = 26


def attributes(node: int) -> bytes:
    sizes = struct.pack("<6Q3I", node, 4096, 8, 0, 0, 0, 0, 0, 0)
    return sizes + struct.pack("<7I", MODES[node], 1, 0, 0, 0, 4096, 0)


def answer(operation: int, node: int) -> bytes | None:
    """What is replied to a request; None: it is not known."""
    match operation:
        case Operation.INIT:
            return struct.pack("<4I2H3I", 7, 31, 1 << 16, 0, 12, 10, 1 << 16, 1, 0) + bytes(28)
        case Operation.LOOKUP:
            return struct.pack("<4Q2I", 2, 0, 0, 0, 0, 0) + attributes(2)
        case Operation.GETATTR:
            return struct.pack("<Q2I", 0, 0, 0) + attributes(node)
        case Operation.OPEN:
            return struct.pack("<Q2I", 1, 1, 0)
        case _:
            return None


def mount(mountpoint: str) -> int:
    """The kernel's end of the file system."""
    device = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0"
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"stuck", mountpoint.encode(), b"fuse", 0, options.encode()):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), mountpoint)
    return device


def reply(device: int, request: bytes) -> None:
    _, operation, number, node, *_ = REQUEST.unpack_from(request)
    data = answer(operation, node)
    code, data = (0, data) if data is not None else (-errno.ENOSYS, b"")
    with suppress(OSError):  # some expect no reply
        os.write(device, REPLY.pack(REPLY.size + len(data), code, number) + data)


def main(mountpoint: str) -> None:
    device = mount(mountpoint)
    sys.stdout.write("mounted\n")
    sys.stdout.flush()
    while True:
        try:
            request = os.read(device, 1 << 18)
        except OSError as error:
            if error.errno == errno.ENODEV:  # unmounted
                return
            continue
        if REQUEST.unpack_from(request)[1] == Operation.READ:
            Path(f"{mountpoint}.read").touch()
        else:
            reply(device, request)


if __name__ == "__main__":
    main(sys.argv[1])
