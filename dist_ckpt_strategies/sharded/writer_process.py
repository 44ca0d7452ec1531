"""A process that writes for this one, so that writing does not take Python's lock from training.

The process runs this module, which does not need torch, and so starts at once.
"""

import logging
import mmap
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any

from dist_ckpt_strategies.config import environment
from dist_ckpt_strategies.errors import CheckpointError, StorageError
from dist_ckpt_strategies.storage.host import lower_priority

logger = logging.getLogger(__name__)

_FAREWELL_S = 2.0
_POLL_S = 0.02
_OF_THE_JOB = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals after which the parent may save yet; the process ends with it.

SLURM sends its warnings to all processes of a step.
"""

_ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def is_supported() -> bool:
    """Whether this system has memory that another process can be given."""
    return hasattr(os, "memfd_create")


class SharedBytes:
    """Memory without a name: a process that is sent its file descriptor can map it too.

    All of it is allocated on return, so that no copy fails halfway; a StorageError if there is not
    so much. The descriptor, ``handle``, is closed when this object is gone; views of ``memory``
    keep the mapping.
    """

    def __init__(self, nbytes: int) -> None:
        self.handle = os.memfd_create("dist_ckpt-snapshot", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self.handle)
        try:
            os.posix_fallocate(self.handle, 0, max(1, nbytes))
        except OSError as error:
            raise StorageError(
                f"no memory to copy {nbytes} bytes to for an asynchronous save: {error.strerror}; "
                "free memory, or save synchronously"
            ) from error
        # Pages that are mapped one by one, at their first use, take several times as long.
        flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
        self.memory = mmap.mmap(self.handle, max(1, nbytes), flags=flags)


class WriterProcess:
    """Starts when it is made, or a StorageError; ends when this object or this process is gone."""

    def __init__(self) -> None:
        self._connection, theirs = Pipe()
        start = f"from {__name__} import main; main()"
        command = [sys.executable, "-P", "-c", start, str(theirs.fileno()), str(os.getpid())]
        path = os.pathsep.join(part or os.getcwd() for part in sys.path)  # noqa: PTH109
        # Sent to the whole job, they stay blocked in the process.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _OF_THE_JOB)
        try:
            self._process = subprocess.Popen(  # noqa: S603 - this interpreter, with our own module
                command,
                env={**environment(), **_ONE_THREAD, "PYTHONPATH": path},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        except OSError as error:
            self._connection.close()
            raise StorageError(
                f"{sys.executable} does not start: {error.strerror}; DIST_CKPT_WRITER_PROCESS=0 "
                "saves with threads"
            ) from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()
        self._owner = os.getpid()
        self._lock = threading.Lock()
        weakref.finalize(self, _end, self._owner, self._process, self._connection)

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    @property
    def is_usable(self) -> bool:
        """Whether it runs, and is this process's own: a fork has a copy that is not."""
        is_ours = self._owner == os.getpid() and not self._connection.closed
        return is_ours and self._process.poll() is None

    def run(self, job: Callable[[memoryview], Any], memory: SharedBytes) -> Any:
        """Have a job done with memory; what it returns, or raises. Blocks, without Python's lock.

        When it returns or raises, nothing is being written any more, unless the error says so.
        Raises a StorageError if the process has ended.
        """
        content = pickle.dumps(job)
        with self._lock:
            try:
                self._connection.send_bytes(content)
                send_handle(self._connection, memory.handle, self.pid)
                answer = pickle.loads(self._connection.recv_bytes())  # noqa: S301 - our own process
            except (OSError, EOFError) as error:
                self._connection.close()  # whatever becomes of the process, it is not asked again
                raise StorageError(f"the writing process {self._ended()}") from error
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _ended(self) -> str:
        """How it has ended; it is made to, if it has not."""
        code = _waited(self._process)
        if code is None:
            self._process.kill()
            code = _waited(self._process)
        if code is None:
            return f"(pid {self.pid}) does not end, not even by SIGKILL: its storage hangs"
        if code < 0:
            return f"(pid {self.pid}) was killed by signal {-code} ({signal.strsignal(-code)})"
        return f"(pid {self.pid}) ended with status {code}"


def _end(owner: int, process: subprocess.Popen[bytes], connection: Any) -> None:
    """Finalizer: stop the writer process."""
    connection.close()
    if owner == os.getpid():
        process.kill()
        _waited(process)


def _waited(process: subprocess.Popen[bytes]) -> int | None:
    """How it has ended; None if it runs: in a call to storage that hangs, no signal ends it."""
    try:
        return process.wait(_FAREWELL_S)
    except subprocess.TimeoutExpired:
        return None


def main() -> None:
    """In the process: do jobs, one after the other, until the connection is closed."""
    connection, parent = Connection(int(sys.argv[1])), int(sys.argv[2])
    lower_priority(0)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    memories: dict[int, memoryview] = {}
    while True:
        try:
            job, handle = connection.recv_bytes(), recv_handle(connection)
            connection.send_bytes(pickle.dumps(_outcome(job, _memory(memories, handle))))
        except (EOFError, ConnectionError):  # a parent that is killed may reset it
            os._exit(0)  # nothing here is to be cleaned up, and a thread may still wait for a disk


def _end_with(parent: int) -> None:
    """End with the parent process: another may write to the same place."""
    while os.getppid() == parent:
        time.sleep(_POLL_S)
    os._exit(1)


def _memory(memories: dict[int, memoryview], handle: int) -> memoryview:
    """The memory of the descriptor; mapped once, as long as it is the same."""
    inode = os.fstat(handle).st_ino
    if inode not in memories:
        memories.clear()
        memories[inode] = memoryview(
            mmap.mmap(handle, 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        )
    os.close(handle)
    return memories[inode]


def _outcome(job: bytes, memory: memoryview) -> Any:
    try:
        return pickle.loads(job)(memory)  # noqa: S301 - from the parent
    except CheckpointError as error:
        return error
    except Exception as error:
        logger.exception("an asynchronous save failed")
        return StorageError(f"the writing process failed: {type(error).__name__}: {error}")
