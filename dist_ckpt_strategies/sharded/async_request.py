"""Saves in the background: the thread, the request that checkpoint queues take, and who waits."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from dist_ckpt_strategies.comm.agree import agree, agree_and_gather
from dist_ckpt_strategies.comm.base import Communicator, who_is_where
from dist_ckpt_strategies.config import limit_of_wait
from dist_ckpt_strategies.errors import MissingDependencyError, PlanError, SaveTimeoutError
from dist_ckpt_strategies.formats.locations import Location
from dist_ckpt_strategies.megatron.types import AsyncRequest
from dist_ckpt_strategies.storage.files import file_errors
from dist_ckpt_strategies.storage.io_pool import limited

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
        StorageError: the temporary directory is full.
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
                return  # it is removed as the process ends, and no worker waits
            logger.warning("%s cannot be made, so its directory goes: %s", self.end_mark, error)
            shutil.rmtree(self.end_mark.parent, ignore_errors=True)


def _remove_own(directory: Path, owner: int) -> None:
    """Remove what a save left that was never finalised; a forked child does not."""
    if os.getpid() == owner:
        shutil.rmtree(directory, ignore_errors=True)


def agree_to_start(
    comm: Communicator, prepare: Callable[[], BackgroundWork[T]]
) -> BackgroundWork[T]:
    """What ``prepare`` gives, begun on every rank; if that fails on one, nothing begins on any.

    Collective: one check.
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


class RunningSaves:
    """The saves that this process writes in the background, by the place that they write to.

    Another save to the same place waits for them first, whichever strategy wrote them: their
    files may have the names of the new ones. One that has ended is not kept for this: with it goes
    the memory that it was written from.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._works: list[tuple[str, weakref.ref[BackgroundWork[Any]]]] = []

    def add(self, place: Location, work: BackgroundWork[Any]) -> None:
        """Take note of one that has begun; it lives as long as its thread, at least."""
        with self._lock:
            running = [(known, held) for known, held in self._works if held() is not None]
            self._works = [*running, (_name_of(place), weakref.ref(work))]

    def wait(self, place: Location, timeout_s: float) -> None:
        """Return when all that write to a place have ended, well or not. Rank-local.

        Raises:
            SaveTimeoutError: that takes longer.
        """
        name = _name_of(place)
        with self._lock:
            held = [work() for known, work in self._works if known == name]
        deadline = time.monotonic() + timeout_s
        for work in filter(None, held):
            work.wait(max(0.0, deadline - time.monotonic()))


RUNNING_SAVES = RunningSaves()
"""Those of this process."""


@limited
def _name_of(place: Location) -> str:
    return str(place.resolve() if isinstance(place, Path) else place)


@dataclass(frozen=True, slots=True)
class SaveName:
    """What a request is told from others by.

    Attributes:
        save_id: equal on all ranks, and of this save alone.
        what: is ended, in words; each rank may see it in its own way.
    """

    save_id: str
    what: str


class _Finalisation:
    """Ends a save, once, however often it is called; if that fails, every call raises the same."""

    def __init__(
        self,
        comm: Communicator,
        name: SaveName,
        work: BackgroundWork[Any],
        finalise: Callable[[], None],
        timeout_s: float,
    ) -> None:
        self.work = work
        self.timeout_s = timeout_s
        self._comm = comm
        self._name = name
        self._finalise = finalise
        self._is_the_same = False
        self._is_called = False
        self._error: Exception | None = None

    def __call__(self) -> None:
        """End the save. Collective."""
        if self._error is not None:
            raise self._error
        if self._is_called:
            return
        if not self._is_the_same:
            self._require_the_same(agree_and_gather(self._comm, lambda: astuple(self._name)))
        self._is_called = True
        try:
            self._finalise()
        except SaveTimeoutError:
            self._is_called = False  # it may still end well
            raise
        except Exception as error:
            self._error = error
            raise

    def await_work(self, timeout_s: float) -> None:
        """Return when every rank's share has ended, well or not. Collective.

        Ranks exchange their state before any has waited too long for another.

        Raises:
            SaveTimeoutError: some rank's takes longer; on every rank.
            PlanError: ranks wait for different saves; all may still be waited for.
        """
        if self._is_called:
            return
        deadline = time.monotonic() + timeout_s
        longest_s = limit_of_wait(self.timeout_s)

        def is_done() -> bool:
            left_s = max(0.0, deadline - time.monotonic())
            if self.work.ends_within(min(left_s, longest_s)):
                return True
            if left_s <= longest_s:
                raise SaveTimeoutError(None, f"the save is not done after {timeout_s:g} s")
            return False

        are_done = False
        while not are_done:
            answers = agree_and_gather(self._comm, lambda: [*astuple(self._name), is_done()])
            self._require_the_same([name for *name, _ in answers])
            are_done = all(done for *_, done in answers)

    def _require_the_same(self, names: Sequence[Sequence[str]]) -> None:
        save_ids, texts = zip(*names, strict=True)
        if len(set(save_ids)) > 1:
            raise PlanError(
                "expected all ranks to end their saves in the same order, found "
                + who_is_where(self._comm, save_ids, texts)
            )
        self._is_the_same = True


class LocalSaveRequest(AsyncRequest):  # type: ignore[misc]
    """A save in the background; Megatron-Core's queues take it as a request of theirs.

    It works without a queue too: ``done()`` and ``wait()``. It is finalised once, by a queue or by
    ``wait``; if the save has failed on any rank, that raises on every rank.
    """

    __slots__ = ()

    _fields = ("async_fn", "async_fn_args", "finalize_fns", "async_fn_kwargs")
    """Fewer than NVRx's request has today: its queue makes one of its own class of those, as it
    does of requests from before it had the others. Here the others always are as they are by
    default, and Megatron-Core's queue asks the instance for them."""

    @classmethod
    def of(
        cls,
        comm: Communicator,
        name: SaveName,
        work: BackgroundWork[Any],
        finalise: Callable[[], None],
        timeout_s: float,
    ) -> LocalSaveRequest:
        """The request of a save.

        Args:
            comm: the ranks that save together.
            name: of this save.
            work: what runs in the background.
            finalise: called by every rank once that has ended on all of them.
            timeout_s: longest wait for it, in seconds.
        """
        end = _Finalisation(comm, name, work, finalise, timeout_s)
        return cls(wait_for_mark, (str(work.end_mark), os.getpid()), [end], {})

    def for_nvrx(self) -> Any:
        """The same request in the class of NVRx.

        The queue of 0.4.1 makes that itself; one that does not, if persistent, passes over
        requests of others.

        Raises:
            MissingDependencyError: nvidia-resiliency-ext is not installed.
        """
        try:
            from nvidia_resiliency_ext.checkpointing.async_ckpt import (  # noqa: PLC0415
                core as nvrx,
            )
        except ImportError as error:
            raise MissingDependencyError(
                f"NVRx's queue needs a package that does not import here ({error}); install "
                "nvidia-resiliency-ext, or use Megatron-Core's queue"
            ) from error
        return nvrx.AsyncRequest(
            self.async_fn, self.async_fn_args, self.finalize_fns, self.async_fn_kwargs
        )

    def done(self) -> bool:
        """Whether this rank's share of the save has ended, well or not. Rank-local."""
        return bool(self.finalize_fns[0].work.is_done())

    def wait(self, timeout_s: float | None = None) -> None:
        """Finalise the save: every rank's part is there then, or every rank raises.

        Collective over all ranks of the manager.

        Args:
            timeout_s: longest wait for this rank's share, in seconds; by default the manager's.

        Raises:
            StorageError: a part could not be written.
            SaveTimeoutError: on some rank it takes too long; the save goes on, and may be waited
                for again.
            PlanError: another rank waits for another save; all may be waited for again.
            PeerError: another rank failed.
        """
        end = self.finalize_fns[0]
        end.await_work(end.timeout_s if timeout_s is None else timeout_s)
        for finalize in self.finalize_fns:
            finalize()
