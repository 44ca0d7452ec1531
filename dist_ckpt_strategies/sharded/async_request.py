"""Saves in the background: the thread, the request that checkpoint queues take, and who waits."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, wait
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from types import MappingProxyType
from typing import Any, Generic, NoReturn, TypeVar

from dist_ckpt_strategies.comm.base import Communicator, run_and_gather, who_is_where
from dist_ckpt_strategies.config import limit_of_wait
from dist_ckpt_strategies.errors import PlanError, StorageTimeoutError
from dist_ckpt_strategies.megatron.types import raises_megatron_errors
from dist_ckpt_strategies.storage.files import file_errors
from dist_ckpt_strategies.storage.host import lower_priority

logger = logging.getLogger(__name__)

T = TypeVar("T")

_PAUSE_S = 0.02


class BackgroundWork(Generic[T]):
    """Work on a thread of its own; other processes can see its end: until then ``mark`` is a file.

    The thread waits for ``begin`` or ``call_off``: that the system has one is known before any
    other rank relies on it. ``nbytes`` are those that this rank itself writes; ``seconds`` is set
    once the work has ended.

    Raises a StorageError if the temporary directory is full, a RuntimeError if the system starts no
    more threads.
    """

    def __init__(self, work: Callable[[], T], name: str, nbytes: int = 0) -> None:
        self._work = work
        self._tasks: SimpleQueue[Callable[[], T]] = SimpleQueue()
        # The thread itself does not tell: Python <= 3.12 takes one for ended whose join() was
        # interrupted by a signal.
        self._future: Future[T] = Future()
        with file_errors(None, tempfile.gettempdir()):
            handle, mark = tempfile.mkstemp(prefix="dist_ckpt-")
        os.close(handle)
        self.mark = Path(mark)
        self.seconds, self.nbytes = 0.0, nbytes
        weakref.finalize(self, _remove_own, self.mark, os.getpid())
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def begin(self) -> None:
        """Have the thread do the work."""
        self._tasks.put(self._work)

    def call_off(self) -> None:
        """Have the thread end without doing anything."""
        self._tasks.put(_called_off)

    def ends_within(self, seconds: float) -> bool:
        """Wait for it to end, well or not; whether it has."""
        return bool(wait([self._future], seconds).done)

    def wait(self, timeout_s: float, what: str = "the save") -> None:
        """Return when it has ended, well or not; at once where its own thread asks.

        Raises a StorageTimeoutError if it takes longer.
        """
        if threading.current_thread() is not self._thread and not self.ends_within(timeout_s):
            raise StorageTimeoutError(f"{what} is not done after {timeout_s:g} s")

    def result(self) -> T:
        """The result, once it has ended; raises its error."""
        return self._future.result(0)

    def _run(self) -> None:
        finish: Callable[[], None]
        work = self._tasks.get()
        started = time.monotonic()
        try:
            finish = partial(self._future.set_result, work())
        except BaseException as error:  # noqa: BLE001 - raised again by ``result``
            finish = partial(self._future.set_exception, error)
        self.seconds = time.monotonic() - started
        _remove_own(self.mark, os.getpid())
        finish()


def _called_off() -> NoReturn:
    raise CancelledError


def _remove_own(mark: Path, owner: int) -> None:
    """Remove the mark of a work of this process; a forked child leaves it."""
    if os.getpid() != owner:
        return
    try:
        mark.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("%s cannot be removed: %s", mark, error)


def yield_to_training() -> None:
    """Let other threads of this machine go first, from now on, wherever this one could run too.

    Threads that it starts inherit this. Where the system knows no such thing, nothing changes.
    """
    if sys.platform == "linux":
        lower_priority(threading.get_native_id())


def wait_for_mark(mark: str, pid: int) -> None:
    """Return when the work of process ``pid`` has ended, or the process has.

    This is what the worker process of a checkpoint queue runs: it lasts as long as the save, and
    does nothing that could fail. The finalisation reports how the save ended. ``mark`` is a file
    that is there until the work has ended.
    """
    while Path(mark).exists() and _is_alive(pid):
        time.sleep(_PAUSE_S)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


SaveName = tuple[str, str]
"""The id of a save, equal on all ranks and of this save alone, and what its end is called."""

_unended: dict[SaveName, LocalSaveRequest | None] = {}
"""Saves that this process has begun and not ended; with the request if no other rank takes part."""

os.register_at_fork(after_in_child=_unended.clear)


def _end_alone() -> None:
    """End what a script that ends has not waited for, where no other rank has to take part."""
    for (_, what), request in list(_unended.items()):
        try:
            if request is not None:
                request.await_work()
                request.end()
        except Exception:
            logger.exception("%s failed, after the end of the script", what)


@atexit.register
def _report_lost() -> None:
    for _, what in _unended:
        lost = what.removeprefix("the end of ")
        logger.error("%s is lost: the script ended without wait() or close()", lost)


# Before the functions of atexit, which from Python 3.12 on can start no thread.
threading._register_atexit(_end_alone)  # type: ignore[attr-defined]  # noqa: SLF001


class LocalSaveRequest:
    """A save in the background; queues of Megatron-Core and NVRx take it as a request of theirs.

    It works without a queue too: ``done()`` and ``wait()``. It is finalised once, by a queue or by
    ``wait``; if the save has failed on any rank, that raises on every rank.

    It is of no queue's own class: these change, and a persistent queue passes over requests of
    another library's, for ever. From a request with fewer fields than its own a queue makes one of
    its class, of what ``_asdict`` returns; the other fields here are as they are by default there.

    Args:
        comm: the ranks of the save.
        name: tells the save from others.
        work: this rank's share, on a thread.
        finalise: is called once all ranks' work has ended. Collective. A manager of saves may put
            its own in the place of ``request.finalise``.
        timeout_s: longest wait for the work.
    """

    _fields = ()
    async_fn, async_fn_kwargs = staticmethod(wait_for_mark), MappingProxyType[str, Any]({})
    preload_fn, is_frozen, call_idx = None, False, 0

    def __init__(
        self,
        comm: Communicator,
        name: SaveName,
        work: BackgroundWork[Any],
        finalise: Callable[[], None],
        timeout_s: float,
    ) -> None:
        self.comm, self.work = comm, work
        self._name, self.finalise, self._timeout_s = name, finalise, timeout_s
        self._is_the_same = False  # all ranks end this save
        self._is_ended = False
        self._error: Exception | None = None
        self.async_fn_args = (str(work.mark), os.getpid())
        self.finalize_fns: list[Callable[[], None]] = [self.end]
        _unended[name] = self if comm.size == 1 else None

    def _asdict(self) -> dict[str, Any]:
        return {n: getattr(self, n) for n in ("async_fn", "async_fn_args", "finalize_fns")}

    def freeze(self) -> Any:
        """This as a request of the calling module's own class, for a queue that makes none."""
        kind = sys._getframe(1).f_globals["AsyncRequest"]  # noqa: SLF001 - the only trace of it
        return kind(**self._asdict()).freeze()

    def add_finalize_fn(self, fn: Callable[[], None]) -> None:
        """Have ``fn`` called after those that are there, once the save is finalised."""
        self.finalize_fns.append(fn)

    def give_up(self) -> None:
        """Do not report that the save was never ended: its ranks are no more. Rank-local."""
        _unended.pop(self._name, None)

    def done(self) -> bool:
        """Whether this rank's share of the save has ended, well or not. Rank-local."""
        return self.work.ends_within(0)

    @raises_megatron_errors
    def wait(self, timeout_s: float | None = None) -> None:
        """Finalise the save: it is visible then, or every rank raises, each time.

        Collective over all ranks of the save.

        Args:
            timeout_s: longest wait for this rank's share, in seconds; by default the save's.

        Raises:
            StorageError: a share could not be written.
            StorageTimeoutError: on some rank it takes too long; the save continues, and may be
                waited for again.
            PlanError: another rank waits for another save; all may be waited for again.
            PeerError: another rank failed.
        """
        self.await_work(timeout_s)
        self.end()
        while self.finalize_fns[1:]:  # taken away: a queue that has this list calls them no more
            self.finalize_fns.pop(1)()

    execute_sync = wait

    def await_work(self, timeout_s: float | None = None) -> None:
        """Return when every rank's share has ended, well or not. Collective.

        Ranks exchange their state before any has waited too long for another. All raise a
        StorageTimeoutError if some rank's share takes longer, or a PlanError if they wait for
        different saves: all of these may still be waited for.
        """
        if self._is_ended:
            return
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit_s
        longest_s = limit_of_wait(self._timeout_s)

        def is_done() -> bool:
            left_s = max(0.0, deadline - time.monotonic())
            if self.work.ends_within(min(left_s, longest_s)):
                return True
            if left_s <= longest_s:
                raise StorageTimeoutError(
                    f"the save is not done after {limit_s:g} s; it continues: call wait() again"
                )
            return False

        are_done = False
        while not are_done:
            answers = run_and_gather(self.comm, lambda: [*self._name, is_done()])
            self._require_the_same([name for *name, _ in answers])
            are_done = all(done for *_, done in answers)

    def end(self) -> None:
        """Make the save visible, once, however often it is called; a failure is raised each time.

        Collective; the first of ``finalize_fns``.
        """
        if self._error is not None:
            raise self._error
        if self._is_ended:
            return
        if not self._is_the_same:
            self._require_the_same(run_and_gather(self.comm, lambda: [*self._name]))
        self._is_ended = True
        try:
            self.finalise()
        except Exception as error:
            self._error = error
            self.give_up()
            raise
        self.give_up()

    def _require_the_same(self, names: Sequence[Sequence[str]]) -> None:
        save_ids, texts = zip(*names, strict=True)
        if len(set(save_ids)) > 1:
            raise PlanError(
                "expected all ranks to end their saves in the same order, found "
                + who_is_where(self.comm, save_ids, texts)
            )
        self._is_the_same = True


class SaveQueue(deque[LocalSaveRequest]):
    """A queue with the methods that Megatron-LM calls; what it takes needs no worker process."""

    schedule_async_request = deque.append
    get_num_unfinalized_calls = deque.__len__

    def maybe_finalize_async_calls(self, blocking: bool = False, **_: Any) -> None:  # noqa: FBT001, FBT002
        """Finalise the saves that have ended on all ranks, or all; see ``wait``. Collective."""
        while self and (blocking or all(run_and_gather(self[0].comm, self[0].done))):
            self.popleft().wait()

    def close(self, abort: bool = False) -> None:  # noqa: FBT001, FBT002 - as above, Megatron's
        """Finalise all saves, or forget them. Collective, unless ``abort`` is set."""
        if not abort:
            self.maybe_finalize_async_calls(blocking=True)
        self.clear()
