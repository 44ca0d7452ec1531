"""Ports for servers that a test starts a while after it has chosen where they listen."""

import fcntl
import os
import random
import socket
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

HOST = "127.0.0.1"

_PORTS = range(30100, 32700)
"""Below those that the system gives to connections: one of those may be gone when it is used."""

_claims: list[BinaryIO] = []
"""Held to the end of this process: no other test process chooses the same port."""


def free_port() -> int:
    """A port that is free, and given to no other test while this process lives."""
    for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
        with socket.socket() as found, suppress(OSError):
            found.bind((HOST, port))
            if claim(port):
                return port
    raise OSError(f"none of the ports {_PORTS.start} to {_PORTS.stop - 1} is free")


def claim(port: int) -> bool:
    """Whether no other test of this machine has this port; from now on we have it."""
    directory = Path(tempfile.gettempdir()) / f"dist-ckpt-test-ports-{os.getuid()}"
    directory.mkdir(exist_ok=True)
    held = (directory / str(port)).open("ab")
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        held.close()
        return False
    _claims.append(held)
    return True
