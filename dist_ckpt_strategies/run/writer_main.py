"""``python -m dist_ckpt_strategies.run.writer_main SOCKET PARENT``: write what the parent sends.

It imports no torch, and ends when its parent does.
"""

from __future__ import annotations

import logging
import os
import pickle
import signal
import socket
import sys
import threading
import time
from typing import Any

from dist_ckpt_strategies.errors import CheckpointError, StorageError
from dist_ckpt_strategies.run.socket_messages import receive, send
from dist_ckpt_strategies.storage.shared_bytes import mapped

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
    """A write must not go on when whoever asked for it has gone: another may follow."""
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
