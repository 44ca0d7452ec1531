"""A process that writes for this one, so that writing does not take Python's lock from training.

``benchmarks/async_save.py`` measures it; with ``DIST_CKPT_WRITER_PROCESS=0`` it measures what
threads of the training's own process do to the same steps.
"""

from __future__ import annotations

import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import weakref

from dist_ckpt_strategies.config import environment
from dist_ckpt_strategies.errors import StorageError
from dist_ckpt_strategies.sharded.staged import Written
from dist_ckpt_strategies.sharded.writer_main import SharedBytes, is_supported, receive, send

logger = logging.getLogger(__name__)

_MODULE = "dist_ckpt_strategies.sharded.writer_main"
_FAREWELL_S = 2.0
_ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class WriterProcess:
    """Starts when it is made; ends when this object is gone, or this process is.

    Raises:
        StorageError: it cannot be started.
    """

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-P", "-m", _MODULE, str(theirs.fileno()), str(os.getpid())]
        path = os.pathsep.join(part or os.getcwd() for part in sys.path)  # noqa: PTH109
        try:
            self._process = subprocess.Popen(  # noqa: S603 - this interpreter, with our own module
                command,
                env={**environment(), **_ONE_THREAD, "PYTHONPATH": path},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        except OSError as error:
            ours.close()
            raise StorageError(f"{sys.executable} does not start: {error.strerror}") from error
        finally:
            theirs.close()
        self._connection = ours
        self._owner = os.getpid()
        self._lock = threading.Lock()
        weakref.finalize(self, _end, self._owner, self._process, ours)

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    @property
    def is_usable(self) -> bool:
        """Whether it runs, and is this process's own: a fork has a copy that is not."""
        is_ours = self._owner == os.getpid() and self._connection.fileno() >= 0
        return is_ours and self._process.poll() is None

    def run(self, job: bytes, memory: SharedBytes) -> bytes:
        """Have a pickled WriteJob done; what ``outcome_of`` takes. Blocks, without Python's lock.

        When it returns or raises, nothing is being written any more, unless the error says so.

        Raises:
            StorageError: the process has ended.
        """
        with self._lock:
            try:
                send(self._connection, job, memory.handle)
                return receive(self._connection)[0]
            except (OSError, EOFError) as error:
                self._connection.close()  # whatever becomes of the process, it is not asked again
                raise StorageError(f"the writing process {self._ended()}") from error

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


def outcome_of(content: bytes) -> Written:
    """What a writing process has answered; raises what it raised."""
    found = pickle.loads(content)  # noqa: S301 - from our own process
    if isinstance(found, Exception):
        raise found
    written: Written = found
    return written


def start_writer() -> WriterProcess | None:
    """A writing process; None where the system has none, which is logged."""
    if not is_supported():
        return None
    try:
        return WriterProcess()
    except StorageError as error:
        logger.warning("asynchronous saves are written by threads of this process: %s", error)
        return None


def _end(owner: int, process: subprocess.Popen[bytes], connection: socket.socket) -> None:
    """Finalizer: stop the writer process."""
    connection.close()
    if owner == os.getpid():
        process.kill()
        _waited(process)


def _waited(process: subprocess.Popen[bytes]) -> int | None:
    """How it has ended; None if it goes on: in a call to storage that hangs, no signal ends it."""
    try:
        return process.wait(_FAREWELL_S)
    except subprocess.TimeoutExpired:
        return None
