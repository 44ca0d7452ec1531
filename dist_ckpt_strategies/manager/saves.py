"""The save under way: how it begins, ends, and who raises its error. At most one runs at a time."""

import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from dist_ckpt_strategies.comm.base import Communicator, run_and_gather, run_on_first_rank
from dist_ckpt_strategies.core.report import SaveMetrics
from dist_ckpt_strategies.errors import (
    CheckpointError,
    PeerLostError,
    PeerTimeoutError,
    StorageError,
)
from dist_ckpt_strategies.manager.candidates import Tier
from dist_ckpt_strategies.manager.policy import (
    ManagerOptions,
    SavePolicy,
    numbers_of,
    require_same,
)
from dist_ckpt_strategies.manager.root import Resumed, Root, now
from dist_ckpt_strategies.manager.tiers import DiskTier, RunningSave, State
from dist_ckpt_strategies.megatron.shards import StateDict
from dist_ckpt_strategies.sharded.async_request import LocalSaveRequest

logger = logging.getLogger(__name__)


class Saves:
    """Begins and ends saves, one after the other, and reports them.

    Attributes:
        running: the save under way.
        last: tier and step that were saved or loaded last; such a step is not saved again.
        resumed: what the training has loaded since its last save: the next one notes it.
        global_s: when the last global save began, or the first call.
    """

    def __init__(
        self,
        root: Root,
        tiers: Mapping[Tier, DiskTier],
        policy: SavePolicy,
        options: ManagerOptions,
    ) -> None:
        self._root, self._tiers, self._policy, self._options = root, tiers, policy, options
        self.running: RunningSave | None = None
        self.last: tuple[Tier, int] | None = None
        self.resumed: Resumed | None = (None, now())
        self.global_s = time.monotonic()

    def still_due(self, comm: Communicator, step: int, due: Tier | None) -> Tier | None:
        """The tier that is due, unless the step is saved, or a local save would join another."""
        if due is None or self.last in {(due, step), (Tier.GLOBAL, step)}:
            return None
        if self.running is None:
            return due
        why = f"{self.running} is still running"
        logger.warning("local save of step %d skipped: %s", step, why)
        if comm.rank == 0:
            self._options.report(SaveMetrics(step, due.value, 0.0, 0.0, kind="skip", reason=why))
        return None

    def begin_load(self) -> None:
        """Note when a load begins: what is saved from now on may be of another course."""
        self.last, self.resumed = None, (None, now())

    def note_load(self, tier: Tier, step: int) -> None:
        """Note what was loaded: training goes on from there."""
        self.last = tier, step
        if self.resumed is not None:
            self.resumed = step, self.resumed[1]

    def leave(self) -> None:
        """Say which save has not ended, here and not again where the script ends. Rank-local."""
        if self.running is not None:
            text = "%s had not ended when its manager was released: it is probably lost"
            logger.warning(text, self.running)
            self.running.request.give_up()

    def give_up(self, comm: Communicator, begun: tuple[int, str] | None) -> None:
        """Forget the save under way and what was saved last: ranks have been replaced.

        ``begun`` is the step and tier of that save on any rank; rank 0 may be new.
        """
        if self.running is not None:
            logger.warning("%s is given up", self.running)
            self.running.request.give_up()
        self.running = self.last = None
        if begun is not None:
            why = "given up: the process group has changed since it began"
            self._report_failure(comm, SaveMetrics(*begun, 0.0, 0.0), why)

    def begin(
        self,
        comm: Communicator,
        begun: SaveMetrics,
        state_dict: State,
        metrics: Mapping[str, float] | None = None,
        **arguments: Any,
    ) -> LocalSaveRequest:
        """Begin the save of a tier and step; none is under way. Collective.

        Raises:
            CheckpointChangedError: another job has taken over; nothing of its is touched.
            PlanError: ranks save different steps.
        """
        began, tier = time.monotonic(), Tier(begun.tier)
        resumed = self.resumed
        if self.last is not None and begun.step < self.last[1]:  # back without a load
            resumed = (None, now())
            self._root.await_removal()  # perhaps of this very step
        try:
            state, numbers = self._prepared(comm, begun.step, state_dict, metrics)
            request = self._tiers[tier].begin(begun.step, state, **arguments)
        except CheckpointError as error:
            self._report_failure(comm, begun, error)
            raise
        begun = replace(begun, blocking_s=time.monotonic() - began)
        save = RunningSave(comm, begun, request, request.finalise, numbers)
        request.finalise = partial(self._end, save)
        self.running, self.last, self.resumed = save, (tier, begun.step), resumed
        if tier is Tier.GLOBAL:
            self.global_s = time.monotonic()
        return request

    def end_previous(self, comm: Communicator, step: int) -> tuple[float, CheckpointError | None]:
        """Make the save under way visible, if there is one; what was waited, and why it failed.

        Collective. Raises the error at once if training cannot continue after it.
        """
        if self.running is None:
            return 0.0, None
        began, before = time.monotonic(), self.running
        failed: CheckpointError | None = None
        is_waited_for = not before.request.done()
        try:
            before.request.wait()
        except (PeerLostError, PeerTimeoutError):
            raise
        except CheckpointError as error:
            if self.running is before:  # it still runs, and may succeed
                raise
            logger.warning("%s failed: %s", before, error)
            failed = error
        # A save fails on all ranks, with each one's own reason: all of them have to allow going on.
        if failed and not all(run_and_gather(comm, lambda: isinstance(failed, StorageError))):
            raise failed
        waited_s = time.monotonic() - began
        if is_waited_for and comm.rank == 0:
            logger.warning("step %d: training waited %.1f s for %s", step, waited_s, before)
        return waited_s, failed

    def _prepared(
        self,
        comm: Communicator,
        step: int,
        state_dict: State,
        metrics: Mapping[str, float] | None,
    ) -> tuple[StateDict, dict[str, float]]:
        """State and metrics, if the job still has the lock and all ranks save one step."""
        prepared: list[tuple[StateDict, dict[str, float]]] = []

        def prepare() -> int:
            if comm.rank == 0:
                self._root.require_lock()
            state = state_dict() if callable(state_dict) else state_dict
            prepared.append((state, numbers_of(metrics)))
            return step

        require_same(run_and_gather(comm, prepare))
        return prepared[0]

    def _end(self, save: RunningSave) -> None:
        """Make a save visible, report it, and remove old checkpoints. Collective."""
        comm, begun, work = save.comm, save.event, save.request.work
        tier = Tier(begun.tier)
        mine = [work.nbytes, begun.blocking_s, work.seconds, begun.waited_s]

        def prepare() -> None:
            self._root.require_lock()
            if tier is Tier.GLOBAL:  # so that any visible checkpoint has its metrics
                self._root.within(partial(self._root.write_metrics, begun.step, save.metrics))

        def note() -> list[float]:
            if comm.rank == 0:
                noted = begun.step, tier, self.resumed, self._policy.keep_best
                self._root.within(partial(self._root.note_course, *noted))
            return mine

        try:
            run_on_first_rank(comm, prepare)
            save.commit()
            sizes, *seconds = zip(*run_and_gather(comm, note), strict=True)
        except BaseException as error:
            self.running = self.last = None
            self._report_failure(comm, begun, error)
            raise
        self.running = self.resumed = None
        nbytes, (blocking_s, background_s, waited_s) = sum(sizes), map(max, seconds)
        if comm.rank:
            return
        if tier is Tier.GLOBAL:
            self._root.begin_removal(self._policy)
        times = {"waited_s": waited_s, "blocking_s": blocking_s, "background_s": background_s}
        rate = nbytes / max(1e-9, blocking_s + background_s) / 1e9
        self._options.report(replace(begun, **times, nbytes=nbytes, gb_per_s=rate))

    def _report_failure(self, comm: Communicator, begun: SaveMetrics, error: object) -> None:
        if comm.rank == 0:
            self._options.report(replace(begun, kind="failure", reason=str(error)))
