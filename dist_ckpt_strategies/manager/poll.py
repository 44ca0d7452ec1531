"""The poll of all ranks after a step: signals, minutes, ``should_save``, the end of a save."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, NamedTuple

from dist_ckpt_strategies.comm.base import Communicator, run_collectively
from dist_ckpt_strategies.manager.candidates import Tier
from dist_ckpt_strategies.manager.policy import ManagerOptions, SavePolicy
from dist_ckpt_strategies.manager.saves import Saves
from dist_ckpt_strategies.manager.tiers import RunningSave

logger = logging.getLogger(__name__)

_PREEMPTED, _LATE, _DONE, _FAILED, _LOCAL, _GLOBAL = 1, 2, 4, 8, 16, 32
"""In an answer: a signal has come, ``every_minutes`` have passed, this rank's share is written;
``should_save`` has raised, or has named a tier."""

_WANTED = _LOCAL | _GLOBAL

_ENDING: set[str] = set()  # roots of trainings that have to end, whichever attempt heard of it


class Poll(NamedTuple):
    """The result of a poll, equal on all ranks.

    ``due`` is the tier to save to, if any; ``is_done``: the save under way has ended on all ranks.
    """

    is_preempted: bool
    is_done: bool
    due: Tier | None


class Poller:
    """Asks all ranks after a step, by one small gather.

    Over NCCL, a host that waited would wait for the GPU's queue: unless a save is due, the next
    call reads the answers.
    """

    def __init__(self, root: str, policy: SavePolicy, options: ManagerOptions) -> None:
        self._root, self._policy, self._options = root, policy, options
        self.replaced: dict[int, Any] = {}  # handlers of signals
        self.is_watching = False
        self._pending: tuple[Callable[[], list[int]], RunningSave | None] | None = None

    def preempt(self) -> None:
        """Have the next poll tell all ranks to end. Rank-local."""
        _ENDING.add(self._root)

    def note_signal(self, number: int, *_: object) -> None:
        """Handle a preemption signal, for the other managers of this process too. Rank-local."""
        self.preempt()
        if (other := _poller_of(self.replaced.get(number))) is not None:
            other.note_signal(number)

    def is_preempted(self) -> bool:
        """Whether this rank was told to end. Rank-local."""
        return self._root in _ENDING

    def forget(self) -> None:
        """Forget that ranks were to end: they do. Rank-local."""
        _ENDING.discard(self._root)

    def begin(self) -> None:
        """Begin anew, in a process group. Rank-local."""
        self._pending = None
        pollers = map(_poller_of, map(signal.getsignal, self._options.preemption_signals))
        if any(poller and not poller.is_watching for poller in pollers):
            self.handle_signals()

    def handle_signals(self) -> None:
        """Handle the preemption signals, from the first call on. Rank-local."""
        if self.is_watching:
            return
        if threading.current_thread() is threading.main_thread():
            for number in self._options.preemption_signals:
                before = signal.signal(number, self.note_signal)
                while (left := _poller_of(before)) and not left.is_watching:
                    before = left.replaced[number]  # an earlier attempt's
                self.replaced[number] = before
        elif self._options.preemption_signals:
            logger.warning("preemption_signals: only the main thread can handle signals")
        self.is_watching = True

    def release(self, *, runs_again: bool) -> None:
        """Give up the signals: to the next attempt, if the function ``runs_again``. Rank-local.

        Until its manager opens they are noted here: they must not end the process meanwhile.
        """
        self.is_watching, self._pending = False, None
        if runs_again:
            return
        for number, before in self.replaced.items():
            above, over = None, _poller_of(signal.getsignal(number))
            while over is not None and over is not self:
                above, over = over, _poller_of(over.replaced.get(number))
            if above is not None and over is self:  # of another manager, opened later
                above.replaced[number] = before
            elif over is self:
                signal.signal(number, before or signal.SIG_DFL)
        self.replaced.clear()

    def ask(
        self, comm: Communicator, step: int, saves: Saves, tiers: Collection[Tier], *, force: bool
    ) -> Poll:
        """Poll all ranks, if anything can have happened, which all of them know alike.

        Collective then. ``tiers`` are those that the manager has. ``should_save`` is asked unless
        the step is saved by ``force``.
        """
        due = Tier.GLOBAL if force else self._policy.due(step)
        answers = self._answers(comm, step, due, saves, None if force else tiers)
        preempted = [comm.global_ranks[n] for n, one in enumerate(answers) if one & _PREEMPTED]
        if preempted:
            logger.warning("ranks %s: preempted; step %d is the last one", preempted, step)
        if comm.rank == 0 and len({answer & _WANTED for answer in answers}) > 1:
            logger.warning("step %d: should_save differs between ranks; rank 0's counts", step)
        if preempted or answers[0] & (_LATE | _GLOBAL):
            due = Tier.GLOBAL
        elif due is None and answers[0] & _LOCAL:
            due = Tier.LOCAL
        return Poll(bool(preempted), all(answer & _DONE for answer in answers), due)

    def _answers(
        self,
        comm: Communicator,
        step: int,
        due: Tier | None,
        saves: Saves,
        tiers: Collection[Tier] | None,
    ) -> list[int]:
        """The answers of all ranks, by rank; 0 if nothing was asked. Collective."""
        options, policy, running = self._options, self._policy, saves.running
        asks_caller = policy.should_save is not None and tiers is not None
        can_happen = running or options.preemption_signals or policy.every_minutes
        is_due = can_happen and step % options.poll_every_steps == 0
        answers = [0] * comm.size
        if self._pending is not None:  # of ranks on GPUs, whose answers come one call later
            numbers, was_running = self._pending
            late, self._pending = numbers(), None
            answers = late if was_running is running else [n & _PREEMPTED for n in late]
        if not (asks_caller or is_due or (running and due is Tier.LOCAL)):
            return answers
        failures: list[Exception] = []
        wanted = self._wanted(comm, step, tiers or (), failures) if asks_caller else 0
        numbers = comm.begin_gather(self._answer(saves) | wanted)
        if due is None and not asks_caller and comm.device.type != "cpu":
            self._pending = numbers, running
            return answers
        answers = [old | new for old, new in zip(answers, numbers(), strict=True)]
        if any(answer & _FAILED for answer in answers):
            run_collectively(comm, partial(_raise_any, failures))
        return answers

    def _answer(self, saves: Saves) -> int:
        """The state of this rank, as bits. Rank-local."""
        minutes, running = self._policy.every_minutes, saves.running
        is_late = minutes is not None and time.monotonic() - saves.global_s >= 60 * minutes
        is_done = running is not None and running.request.done()
        return _PREEMPTED * self.is_preempted() | _LATE * is_late | _DONE * is_done

    def _wanted(
        self, comm: Communicator, step: int, tiers: Collection[Tier], failures: list[Exception]
    ) -> int:
        """The answer of ``should_save``, as bits; an error is added to ``failures``. Rank-local."""
        try:
            tier = self._policy.asked(step, tiers)
        except Exception as error:  # noqa: BLE001 - raised on all ranks after the gather
            failures.append(error)
            return _FAILED
        except BaseException as error:  # this rank leaves: peers learn why
            comm.note_failure(error)
            raise
        return _GLOBAL * (tier is Tier.GLOBAL) | _LOCAL * (tier is Tier.LOCAL)


def _poller_of(handler: Any) -> Poller | None:
    """The poller whose method a handler of a signal is, if any."""
    owner = getattr(handler, "__self__", None)
    return owner if isinstance(owner, Poller) else None


def _raise_any(failures: list[Exception]) -> None:
    if failures:
        raise failures.pop()  # in the list it would be part of a cycle, with its frames
