"""One attempt to run the block: a thread stops it when a fault is heard, wherever it is."""

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from enum import IntEnum
from types import FrameType
from typing import Any, NoReturn, TypeVar

from dist_ckpt_strategies.comm.teardown import Communication
from dist_ckpt_strategies.device import on_own_gpu
from dist_ckpt_strategies.errors import PeerError, PeerLostError, StrategyError, text_of
from dist_ckpt_strategies.inprocess.health_check import HPState
from dist_ckpt_strategies.inprocess.rendezvous import Fault, FaultMode, RendezvousClient

logger = logging.getLogger(__name__)

T = TypeVar("T")

EXIT_UNSTOPPABLE = 86
"""Exit code of a process whose block could not be stopped in time."""

_POLL_S = 0.5
_PAUSE_S = 0.002
_CUT_PAUSE_S = 0.02

SIGNAL = signal.SIGRTMIN + 5
"""Sent to the main thread; reserved for it."""

_RETRY_S = 0.01
_AGAIN_S = 0.25
_LONGEST_S = 2.0
_DEFER_S = 2.0
_IMPORTING = frozenset({"importlib._bootstrap", "importlib._bootstrap_external"})
_FRAGILE_MODULES = frozenset({"logging"})
_FRAGILE_FUNCTIONS = frozenset({"__del__", "_extract_tensors"})
"""The latter is torch's, called from C++ in a backward pass: what it raises ends the process."""


class RankShouldRestart(BaseException):
    """Raised in the block when a fault has ended the attempt; let it pass.

    Attributes:
        fault: what has happened.
    """

    def __init__(self, fault: Fault | None = None) -> None:
        super().__init__(str(fault) if fault else "a rank has failed")
        self.fault = fault


def is_in_block() -> bool:
    """Whether this process runs a function that a wrapper runs again after a fault."""
    return isinstance(getattr(signal.getsignal(SIGNAL), "__self__", None), Interrupter)


class Interrupter:
    """Raises RankShouldRestart in the block, again and again, until the block has been left.

    By a signal, which also ends ``time.sleep``, waits for locks and system calls. Python delivers
    signals to the main thread alone, so the block has to run there. While the block holds ``lock``,
    a ParameterUpdateLock, parameters change, and it is not interrupted. ``left`` is set unless the
    block is running, or about to.
    """

    def __init__(self, lock: Any = None) -> None:
        self._lock = lock
        self._guard: FrameType | None = None
        self._thread_id = 0
        self._is_installed = False
        self._fault: Fault | None = None
        self._requested_at = 0.0
        self._num_raised = 0
        self._wants_raise = False
        self.left = threading.Event()
        self.left.set()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """While this is open, the signal is ours. Within another one it does nothing."""
        if self._is_installed:
            yield
            return
        if threading.current_thread() is not threading.main_thread():
            raise StrategyError(
                "HPWrapper: the block has to run in the main thread, the only one that a fault can "
                f"interrupt; found {threading.current_thread().name}"
            )
        self._thread_id = threading.get_ident()
        self._is_installed = True
        before = signal.signal(SIGNAL, self._on_signal)
        try:
            yield
        finally:
            signal.signal(SIGNAL, before)
            self._is_installed = False

    def guarded(self, fn: Callable[[], T]) -> T:
        """Call ``fn``; RankShouldRestart may be raised in it, and never after it.

        The signal's handler raises only where a frame above this one is running, so there is no
        moment at which the exception could come too late.
        """
        self.left.clear()
        self._guard = sys._getframe()  # noqa: SLF001 - the handler compares
        try:
            return fn()
        finally:
            self._guard = None
            self.left.set()

    def interrupt(self, fault: Fault, timeout_s: float) -> bool:
        """Have the block left; whether it was within the time. For another thread."""
        self._fault = fault
        self._num_raised = 0
        self._requested_at = time.monotonic()
        deadline = self._requested_at + timeout_s
        pause_s = _AGAIN_S
        while not self.left.is_set():
            if time.monotonic() >= deadline:
                return False
            raised = self._num_raised
            self._wants_raise = True
            while self._num_raised == raised and time.monotonic() < deadline:
                signal.pthread_kill(self._thread_id, SIGNAL)
                if self.left.wait(_RETRY_S):
                    return True
            self.left.wait(min(pause_s, max(0.0, deadline - time.monotonic())))
            pause_s = min(2 * pause_s, _LONGEST_S)
        return True

    def prepare(self) -> None:
        """The block is about to be entered: from now on ``interrupt`` waits for it to be left."""
        self._wants_raise = False
        self.left.clear()

    def _on_signal(self, _number: int, frame: FrameType | None) -> None:
        if not self._wants_raise or not self._may_raise_at(frame):
            return
        if self._lock is not None and self._lock.held_by(self._thread_id):
            return
        self._wants_raise = False
        self._num_raised += 1
        raise RankShouldRestart(self._fault)

    def _may_raise_at(self, frame: FrameType | None) -> bool:
        """Whether the block is running, and at a place that can bear an exception."""
        if self._guard is None or frame is self._guard:
            return False
        defers = time.monotonic() - self._requested_at < _DEFER_S
        while frame is not None and frame is not self._guard:
            module, function = frame.f_globals.get("__name__"), frame.f_code.co_name
            # A module whose import was broken off stays broken as long as the process lives.
            if module in _IMPORTING:
                return False
            if defers and (module in _FRAGILE_MODULES or function in _FRAGILE_FUNCTIONS):
                return False
            frame = frame.f_back
        return frame is not None


class Stage(IntEnum):
    """How far an attempt is; it only grows."""

    RUNNING = 0
    FAULTY = 1  # a fault is known, and ``abort`` runs
    ABORTED = 2  # ``abort`` is done
    STOPPED = 3  # the block has been left too: nothing of the attempt runs
    OVER = 4  # nothing waits for a fault any more


class Attempt:
    """One round of this process.

    Once a fault is known ``abort`` is called, and the block is interrupted: if ``early`` as soon as
    communication has ended, else after ``abort``. A block that has not been left within ``limit_s``
    ends the process. ``progress_s`` is the longest time between two pings; None: unlimited.

    Attributes:
        communication: all that it opens to talk to its peers.
        fault: what has ended it; None before.
        lost: the error of a rendezvous that does not answer; None before.
        restart_round: the rendezvous's number of it.
    """

    def __init__(  # noqa: PLR0913 - options by name
        self,
        state: HPState,
        client: RendezvousClient,
        interrupter: Interrupter,
        abort: Callable[[HPState], HPState] | None,
        *,
        limit_s: float,
        early: bool,
        progress_s: float | None,
    ) -> None:
        self.fault: Fault | None = None
        self.lost: PeerError | None = None
        self.communication = Communication()
        self.restart_round = state.restart_round
        self._abort_by, self._limit_s, self._is_early = abort, limit_s, early
        self._progress_s = progress_s
        self._state = replace(state, communication=self.communication)
        self._client = client
        self._interrupter = interrupter
        self._stage = Stage.RUNNING
        self._changed = threading.Condition()
        self._progress_at = time.monotonic()
        self._thread = threading.Thread(
            target=self._watch, name=f"dist_ckpt-faults-{state.restart_round}", daemon=True
        )

    @property
    def state(self) -> HPState:
        """The state that abort, finalize and health checks get."""
        return replace(self._state, fault=self.fault)

    def start(self) -> None:
        """Watch for faults from now on."""
        self._interrupter.prepare()
        self.ping()
        self._thread.start()

    def ping(self) -> None:
        """The block makes progress."""
        self._progress_at = time.monotonic()

    def report(self, error: BaseException) -> None:
        """Say that the block of this rank has raised."""
        why = f"{type(error).__name__}: {text_of(error)}"
        self._client.report(self._state.rank, self.restart_round, FaultMode.EXCEPTION, why)

    def hears_within(self, timeout_s: float) -> bool:
        """Whether a fault is known by then."""
        return self._await(Stage.FAULTY, timeout_s)

    def wait_stopped(self) -> None:
        """Return when communication has ended, and nothing of this attempt runs.

        The process ends if that takes longer than it may.
        """
        self._await(Stage.STOPPED)
        self._thread.join()

    @contextmanager
    def ending_after(self, limit_s: float, what: str) -> Iterator[None]:
        """End this process if the block takes longer: the other ranks wait for it."""
        why = f"restart round {self.restart_round}: {what} has not returned within {limit_s:g} s"
        timer = threading.Timer(limit_s, _die, [why])
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def end(self) -> None:
        """Watch no longer."""
        self._interrupter.left.set()
        self._reach(Stage.OVER)

    def _reach(self, stage: Stage) -> None:
        with self._changed:
            self._stage = max(self._stage, stage)
            self._changed.notify_all()

    def _await(self, stage: Stage, timeout_s: float | None = None) -> bool:
        """Whether the attempt has come so far by then."""
        with self._changed:
            return self._changed.wait_for(lambda: self._stage >= stage, timeout_s)

    def _watch(self) -> None:
        try:
            fault = self._awaited_fault()
        except Exception as error:  # noqa: BLE001 - a client may raise anything
            self.lost = error if isinstance(error, PeerError) else _lost_by(error)
            why = f"the rendezvous does not answer: {self.lost}"
            fault = Fault(None, self.restart_round, FaultMode.DEATH, why)
        if fault is None or self._stage is Stage.OVER:
            return
        self.fault = fault
        self._reach(Stage.FAULTY)
        try:
            logger.warning("%s", fault)
            self._stop(fault)
        except Exception:  # noqa: BLE001 - no new thread, or a log handler fails
            _die("stopping the block failed")
        self._reach(Stage.STOPPED)

    def _awaited_fault(self) -> Fault | None:
        limit_s = self._progress_s
        poll_s = _POLL_S if limit_s is None else min(_POLL_S, limit_s / 4)
        while self._stage is not Stage.OVER:
            fault = self._client.wait_fault(self.restart_round, poll_s)
            if fault is not None:
                return fault
            silent_s = time.monotonic() - self._progress_at
            # A block that has returned waits for others, and need not make progress.
            if limit_s is not None and silent_s > limit_s and not self._interrupter.left.is_set():
                why = f"no progress for {silent_s:.1f} s, {limit_s:g} s allowed"
                self._client.report(self._state.rank, self.restart_round, FaultMode.HANG, why)
        return None

    def _stop(self, fault: Fault) -> None:
        limit_s = self._limit_s
        deadline = time.monotonic() + limit_s
        aborting = threading.Thread(target=self._abort, name="dist_ckpt-abort", daemon=True)
        aborting.start()
        while not self._may_interrupt() and time.monotonic() < deadline:
            time.sleep(_PAUSE_S)
        has_left = self._interrupter.interrupt(fault, max(0.0, deadline - time.monotonic()))
        aborting.join(max(0.0, deadline - time.monotonic()))
        if not has_left or aborting.is_alive():
            what = "abort is not done" if has_left else "the block has not been left"
            _die(f"{what} within {limit_s:g} s")

    def _may_interrupt(self) -> bool:
        is_early = self._is_early and self.communication.is_ended
        return is_early or self._stage >= Stage.ABORTED

    def _abort(self) -> None:
        """Abort, and cut what is opened afterwards, until the block has been left."""
        try:
            if self._abort_by is not None:
                with on_own_gpu():
                    self._abort_by(self.state)
        except Exception:
            # A step of the user's: the block is interrupted all the same, and where it cannot be,
            # this process ends.
            logger.exception(
                "restart round %d: abort failed; the restart continues", self.restart_round
            )
        finally:
            self._reach(Stage.ABORTED)
        while self.communication.is_ended and not self._interrupter.left.is_set():
            self.communication.cut()
            time.sleep(_CUT_PAUSE_S)


def _lost_by(error: Exception) -> PeerLostError:
    lost = PeerLostError(None, f"{type(error).__name__}: {text_of(error)}")
    lost.__cause__ = error  # raised by the thread of the block, once that has been left
    return lost


def _die(why: str) -> NoReturn:
    """End this process: its block would wait for ever for what does not come."""
    try:
        is_failing = sys.exc_info()[1] is not None
        logger.critical("%s: this process ends", why, exc_info=is_failing)
    finally:
        os._exit(EXIT_UNSTOPPABLE)
