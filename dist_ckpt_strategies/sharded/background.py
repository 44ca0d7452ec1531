"""A save that goes on behind training, and the requests that checkpoint queues take."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from dist_ckpt_strategies.comm.agree import agree
from dist_ckpt_strategies.comm.base import Communicator
from dist_ckpt_strategies.errors import SaveTimeoutError
from dist_ckpt_strategies.storage.files import file_errors

logger = logging.getLogger(__name__)

T = TypeVar("T")

_PAUSE_S = 0.02
_LOW_PRIORITY = 10


class BackgroundWork(Generic[T]):
    """Work on a thread of its own, from ``start`` on; other processes can see its end.

    ``hold`` and ``let_go`` are ``start`` in two steps: that the system has a thread for it is known
    before anybody else has to rely on that.

    Args:
        work: what to do.
        name: for the thread.

    Raises:
        StorageError: the temporary directory has no room for the mark of its end.
    """

    def __init__(self, work: Callable[[], T], name: str) -> None:
        self._work = work
        self._results: list[T] = []
        self._errors: list[BaseException] = []
        self._decided = threading.Event()
        # The thread itself does not tell: Python <= 3.12 takes one for ended whose join() was
        # interrupted by a signal.
        self._ended = threading.Event()
        self._is_called_off = False
        with file_errors(None, tempfile.gettempdir()):
            self.end_mark = Path(tempfile.mkdtemp(prefix="dist_ckpt-")) / "ended"
        weakref.finalize(self, _remove_own, self.end_mark.parent, os.getpid())
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin."""
        self.hold()
        self.let_go()

    def hold(self) -> None:
        """Start the thread, which waits for ``let_go`` or ``call_off``.

        Raises:
            RuntimeError: the system starts no more threads.
        """
        self._thread.start()

    def let_go(self) -> None:
        """Have the thread begin."""
        self._decided.set()

    def call_off(self) -> None:
        """Nothing is to be done: the thread ends, if there is one."""
        self._is_called_off = True
        self._decided.set()
        self._ended.set()
        self.forget_mark()

    def is_done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._ended.is_set()

    def ends_within(self, seconds: float) -> bool:
        """Wait for it to end, well or not; whether it has."""
        return self._ended.wait(seconds)

    def wait(self, timeout_s: float, what: str = "the save") -> None:
        """Return when it has ended, well or not; at once where its own thread asks.

        Args:
            timeout_s: longest wait, in seconds.
            what: it is, for the message.

        Raises:
            SaveTimeoutError: it goes on for longer.
        """
        if threading.current_thread() is not self._thread and not self.ends_within(timeout_s):
            raise SaveTimeoutError(None, f"{what} is not done after {timeout_s:g} s")

    def result(self) -> T:
        """What came out, once it has ended; raises what it raised."""
        for error in self._errors:
            raise error
        return self._results[0]

    def forget_mark(self) -> None:
        """Remove what tells other processes of its end. A failure is logged: the work is done."""
        try:
            self.end_mark.unlink(missing_ok=True)
            if self.end_mark.parent.exists():
                self.end_mark.parent.rmdir()
        except OSError as error:
            logger.warning("%s is still there: %s", self.end_mark.parent, error)

    def _run(self) -> None:
        self._decided.wait()
        if self._is_called_off:
            return
        try:
            self._results.append(self._work())
        except BaseException as error:  # noqa: BLE001 - raised again by ``result``
            self._errors.append(error)
        finally:
            self._mark_end()
            self._ended.set()

    def _mark_end(self) -> None:
        """Others wait for the mark as long as its directory is there; a full disk takes no mark."""
        try:
            self.end_mark.touch()
        except OSError as error:
            if not self.end_mark.parent.exists():
                return  # it goes as the process ends, and nobody waits
            logger.warning("%s cannot be made, so its directory goes: %s", self.end_mark, error)
            shutil.rmtree(self.end_mark.parent, ignore_errors=True)


def _remove_own(directory: Path, owner: int) -> None:
    """What is left of a save that nobody has finalised; a forked child leaves it to its parent."""
    if os.getpid() == owner:
        shutil.rmtree(directory, ignore_errors=True)


def agree_to_start(
    comm: Communicator, prepare: Callable[[], BackgroundWork[T]]
) -> BackgroundWork[T]:
    """What ``prepare`` gives, begun on every rank; if that fails on one, nothing begins on any.

    Collective, one meeting.
    """
    works: list[BackgroundWork[T]] = []

    def begin() -> None:
        works.append(prepare())
        works[0].hold()

    try:
        agree(comm, begin)
    except BaseException:
        for work in works:
            work.call_off()
        raise
    works[0].let_go()
    return works[0]


def yield_to_training() -> None:
    """Let other threads of this machine go first, from now on, wherever this one could run too.

    Threads that it starts inherit this. Where the system knows no such thing, nothing changes.
    """
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOW_PRIORITY)


def wait_for_mark(end_mark: str, pid: int) -> None:
    """Return when the work of process ``pid`` has ended, or the process has.

    This is what the worker process of a checkpoint queue runs: it lasts as long as the save, and
    does nothing that could fail. How the save ended is for the finalisation to tell.

    Args:
        end_mark: a file that is there once the work has ended; gone again after finalisation,
            with its directory.
        pid: the process whose thread does the work.
    """
    path = Path(end_mark)
    while path.parent.exists() and not path.exists() and _is_alive(pid):
        time.sleep(_PAUSE_S)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
