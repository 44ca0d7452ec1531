"""What ranks ask each other after a step: signals, minutes, and whether a save has ended."""

import logging
import signal
import threading
import time
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from dist_ckpt_strategies.comm.base import Communicator, run_and_gather
from dist_ckpt_strategies.errors import PlanError
from dist_ckpt_strategies.manager.candidates import Tier
from dist_ckpt_strategies.manager.policy import ManagerOptions, SavePolicy
from dist_ckpt_strategies.manager.saves import Saves
from dist_ckpt_strategies.manager.tiers import RunningSave

logger = logging.getLogger(__name__)

_PREEMPTED, _LATE, _DONE = 1, 2, 4
"""In an answer: a signal has come, ``every_minutes`` have passed, this rank's share is written."""

_ENDING: set[str] = set()  # roots of trainings that have to end, whichever attempt heard of it


class Poll(NamedTuple):
    """What all ranks know after a step.

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
        self._handlers: dict[int, Any] = {}
        self._is_watching = False
        self._pending: tuple[Callable[[], list[int]], RunningSave | None] | None = None

    def preempt(self) -> None:
        """Have the next poll tell all ranks to end. Rank-local."""
        _ENDING.add(self._root)

    def is_preempted(self) -> bool:
        """Whether this rank was told to end. Rank-local."""
        return self._root in _ENDING

    def forget(self) -> None:
        """Forget that ranks were to end: they do. Rank-local."""
        _ENDING.discard(self._root)

    def begin(self) -> None:
        """Begin anew, in a process group. Rank-local."""
        self._pending = None

    def handle_signals(self) -> None:
        """Handle the preemption signals, from the first call on. Rank-local."""
        if self._is_watching:
            return
        self._is_watching = True
        if threading.current_thread() is threading.main_thread():
            for number in self._options.preemption_signals:
                self._handlers[number] = signal.signal(number, lambda *_: self.preempt())
        elif self._options.preemption_signals:
            logger.warning("preemption_signals: only the main thread can handle signals")

    def release(self) -> None:
        """Give up the signals. Rank-local."""
        self._is_watching = False
        for number, handler in self._handlers.items():
            signal.signal(number, handler or signal.SIG_DFL)
        self._handlers.clear()

    def due(self, comm: Communicator, step: int, tiers: Collection[Tier]) -> Tier | None:
        """The tier that a step is due for, by numbers and ``should_save``. Collective with that.

        The answer of the first rank counts.
        """
        due, policy = self._policy.due(step), self._policy
        if policy.should_save is None:
            return due

        def ask() -> Tier | None:
            answer = policy.asked(step)
            if answer not in {None, *tiers}:
                raise PlanError(f"should_save: the {answer} tier is due, and the manager has none")
            return answer

        answers = run_and_gather(comm, ask)
        if comm.rank == 0 and len(set(answers)) > 1:
            logger.warning("step %d: should_save differs between ranks; rank 0's counts", step)
        named = {due, answers[0]}
        return next((tier for tier in (Tier.GLOBAL, Tier.LOCAL) if tier in named), None)

    def ask(self, comm: Communicator, step: int, due: Tier | None, saves: Saves) -> Poll:
        """What all ranks know; ``due`` is what this step is due for without asking.

        Collective, unless at this step nothing can have happened: that is known on all ranks alike.
        """
        options, minutes, running = self._options, self._policy.every_minutes, saves.running
        can_happen = running or options.preemption_signals or minutes
        asks = (running and due is Tier.LOCAL) or (
            can_happen and step % options.poll_every_steps == 0
        )
        answers = [0] * comm.size
        if self._pending is not None:  # of ranks on GPUs, whose answers come one call later
            numbers, was_running = self._pending
            found, self._pending = numbers(), None
            answers = found if was_running is running else [one & _PREEMPTED for one in found]
        if asks:
            numbers = comm.begin_gather(self._answer(saves))
            if due is None and comm.device.type != "cpu":
                self._pending = numbers, running
            else:
                answers = [old | new for old, new in zip(answers, numbers(), strict=True)]
        preempted = [comm.global_ranks[n] for n, one in enumerate(answers) if one & _PREEMPTED]
        if preempted:
            logger.warning("ranks %s: preempted; step %d is the last one", preempted, step)
        is_done = all(one & _DONE for one in answers)
        is_due = bool(preempted) or answers[0] & _LATE
        return Poll(bool(preempted), is_done, Tier.GLOBAL if is_due else due)

    def _answer(self, saves: Saves) -> int:
        """What this rank has to tell. Rank-local."""
        minutes, running = self._policy.every_minutes, saves.running
        is_late = minutes is not None and time.monotonic() - saves.global_s >= 60 * minutes
        is_done = running is not None and running.request.done()
        return _PREEMPTED * self.is_preempted() | _LATE * is_late | _DONE * is_done
