"""One attempt to run the block, watched by a thread that stops it when a fault is heard."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn

from dist_ckpt_strategies.comm.teardown import Communication
from dist_ckpt_strategies.errors import PeerError, PeerLostError, text_of
from dist_ckpt_strategies.inprocess.abort import Compose, HPAbortTorchDistributed
from dist_ckpt_strategies.inprocess.health_check import HPState
from dist_ckpt_strategies.inprocess.interruption import Interrupter
from dist_ckpt_strategies.inprocess.rendezvous import Fault, FaultMode, RendezvousClient

if TYPE_CHECKING:
    from dist_ckpt_strategies.inprocess.wrap import HPWrapper

logger = logging.getLogger(__name__)

EXIT_UNSTOPPABLE = 86
"""Exit code of a process whose block could not be stopped in time."""

DEFAULT_ABORT_TIMEOUT_S = 60.0
"""Where ``abort_timeout`` is None: a rank that cannot be stopped must not be waited for."""

_POLL_S = 0.5
_PAUSE_S = 0.002
_CUT_PAUSE_S = 0.02


class Attempt:
    """One round of this process.

    ``communication`` is all that it opens to talk to its peers. ``fault`` is what has ended it, and
    ``lost`` the error of a rendezvous that does not answer; None before.
    """

    def __init__(
        self, wrapper: HPWrapper, state: HPState, client: RendezvousClient, interrupter: Interrupter
    ) -> None:
        self.fault: Fault | None = None
        self.lost: PeerError | None = None
        self.communication = Communication()
        self.restart_round = state.restart_round
        self._wrapper = wrapper
        self._state = replace(state, communication=self.communication)
        self._client = client
        self._interrupter = interrupter
        self._over = threading.Event()
        self._heard = threading.Event()
        self._stopped = threading.Event()
        self._aborted = threading.Event()
        self._progress_at = time.monotonic()
        self._thread = threading.Thread(
            target=self._watch, name=f"dist_ckpt-faults-{state.restart_round}", daemon=True
        )

    @property
    def state(self) -> HPState:
        """What abort, finalize and health checks are given."""
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
        return self._heard.wait(timeout_s)

    def wait_stopped(self) -> None:
        """Return when communication has ended, and nothing of this attempt runs.

        The process ends if that takes longer than it may.
        """
        self._stopped.wait()
        self._thread.join()

    def end(self) -> None:
        """Watch no longer."""
        self._interrupter.leave()
        self._over.set()

    def _watch(self) -> None:
        try:
            fault = self._awaited_fault()
        except Exception as error:  # noqa: BLE001 - a client may raise anything
            self.lost = error if isinstance(error, PeerError) else _lost_by(error)
            why = f"the rendezvous does not answer: {self.lost}"
            fault = Fault(None, self.restart_round, FaultMode.DEATH, why)
        if fault is None or self._over.is_set():
            return
        self.fault = fault
        self._heard.set()
        try:
            logger.warning("%s", fault)
            self._stop(fault)
        except Exception:  # noqa: BLE001 - no new thread, or a log handler fails
            _die("stopping the block failed")
        self._stopped.set()

    def _awaited_fault(self) -> Fault | None:
        limit_s = self._wrapper.progress_timeout_s
        poll_s = _POLL_S if limit_s is None else min(_POLL_S, limit_s / 4)
        while not self._over.is_set():
            fault = self._client.wait_fault(self.restart_round, poll_s)
            if fault is not None:
                return fault
            silent_s = time.monotonic() - self._progress_at
            # A block that has returned waits for others, and need not make progress.
            if limit_s is not None and silent_s > limit_s and not self._interrupter.has_left:
                why = f"no progress for {silent_s:.1f} s, {limit_s:g} s allowed"
                self._client.report(self._state.rank, self.restart_round, FaultMode.HANG, why)
        return None

    def _stop(self, fault: Fault) -> None:
        limit_s = self._wrapper.abort_timeout or DEFAULT_ABORT_TIMEOUT_S
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
        raises_early = self._wrapper.async_raise_before_abort and self.communication.is_ended
        return raises_early or self._aborted.is_set()

    def _abort(self) -> None:
        """Abort, and cut what is opened afterwards, until the block has been left."""
        abort = self._wrapper.abort
        if self._wrapper.early_abort_communicator and isinstance(abort, Compose):
            kind = HPAbortTorchDistributed
            # The last one runs first.
            abort = Compose(*sorted(abort.instances, key=lambda one: isinstance(one, kind)))
        try:
            if abort is not None:
                abort(self.state)
        except Exception:
            # A step of the user's: the block is interrupted all the same, and where it cannot be,
            # this process ends.
            logger.exception(
                "restart round %d: abort failed; the restart continues", self.restart_round
            )
        finally:
            self._aborted.set()
        while self.communication.is_ended and not self._interrupter.has_left:
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
