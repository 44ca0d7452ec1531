"""One manager for a training's checkpoints: in memory, on the nodes' disks, on shared storage."""

import logging
import time
import uuid
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, Self

from dist_ckpt_strategies.comm.base import (
    Communicator,
    run_and_gather,
    run_collectively,
    run_on_first_rank,
)
from dist_ckpt_strategies.config import options_from_environment
from dist_ckpt_strategies.core.report import SaveMetrics
from dist_ckpt_strategies.errors import CheckpointError, PlanError
from dist_ckpt_strategies.inprocess.attempt import is_in_block
from dist_ckpt_strategies.local.manager import LocalCheckpointManager
from dist_ckpt_strategies.manager.candidates import Loaded, Tier
from dist_ckpt_strategies.manager.policy import (
    ManagerOptions,
    SavePolicy,
    require_one_schedule,
    schedule_of,
    whole_step,
)
from dist_ckpt_strategies.manager.poll import Poller
from dist_ckpt_strategies.manager.reader import CheckpointReader
from dist_ckpt_strategies.manager.root import Root
from dist_ckpt_strategies.manager.saves import Saves
from dist_ckpt_strategies.manager.tiers import State
from dist_ckpt_strategies.megatron.types import raises_megatron_errors
from dist_ckpt_strategies.recovery.manager import CheckpointManager
from dist_ckpt_strategies.sharded.async_request import LocalSaveRequest
from dist_ckpt_strategies.storage.io_pool import WORK

logger = logging.getLogger(__name__)

_REMOVAL_S = 5.0
"""Longest wait of ``release`` for the removal of old checkpoints: other ranks wait meanwhile."""


class TieredCheckpointManager(CheckpointReader):
    """Saves training state by a policy, loads the newest complete state, removes old checkpoints.

    In a training loop::

        with TieredCheckpointManager(root, policy=SavePolicy(every_steps=1000)) as manager:
            loaded = manager.load_latest(state_dict())
            for step in range(loaded.iteration if loaded else 0, num_steps):
                train_step()
                manager.save(step + 1, state_dict)

    All ranks create it with the same arguments, and call its methods together, except those marked
    rank-local. A step's number is the number of steps done. At most one save runs: a global save
    waits for the previous one, a local save is skipped; both are logged.

    The first call takes the lock of ``root``; a second job there raises. In a new process group, as
    after a fault, the next call begins anew on all ranks: the lock stays with the job, and a save
    under way is given up.

    If a save in the background fails, one call raises its error, on all ranks: the first one that
    sees its end, which is ``wait``, ``close``, a load, the request of ``begin``, or the next
    ``save`` or ``begin``. These two begin their own save first, if training may continue.

    Args:
        root: directory of the global checkpoints ``iter_0000100`` and so on, which all ranks see,
            or ``s3://bucket/path`` or ``gs://bucket/path``.
        local: manager of checkpoints on the nodes' own disks, if these are used.
        recovery: manager of recovery from memory, if this is used.
        policy: when to save, and what to keep; by default only ``force=True`` saves.
        options: everything else.
        read_only: take no lock and change nothing, to load beside a running training; ``save`` and
            ``begin`` raise a PlanError.

    Raises:
        PlanError: the policy has local saves without ``local``, or the reverse; ``local`` is bound
            to another root; an option is out of range; or ``read_only`` with ``local`` or
            ``recovery``, which belong to the training.
    """

    def __init__(
        self,
        root: str | Path,
        *,
        local: LocalCheckpointManager | None = None,
        recovery: CheckpointManager | None = None,
        policy: SavePolicy | None = None,
        options: ManagerOptions | None = None,
        read_only: bool = False,
    ) -> None:
        policy, options = policy or SavePolicy(), (options or ManagerOptions()).anchored()
        if read_only and (local is not None or recovery is not None):
            raise PlanError("read_only: expected without local and recovery, which a training has")
        is_due = policy.local_every_steps is not None
        if is_due if local is None else not (is_due or policy.should_save):
            raise PlanError(
                "local and policy.local_every_steps: expected both or none, found "
                f"{local!r} and {policy.local_every_steps!r}"
            )
        checked = options_from_environment().with_changes(on_unchanged=options.on_unchanged)
        timeout_s, lease_s = options.limits(checked.timeout_s)
        super().__init__(Root(root, timeout_s, lease_s), local, recovery, options, timeout_s)
        self.policy, self.read_only = policy, read_only
        self._saves = Saves(self._root, self._tiers, policy, options)
        self._poller = Poller(self.root, policy, options)
        self._is_open, self._group_id = False, ""

    def is_saving(self) -> bool:
        """Whether a save has begun and is not visible yet. Rank-local."""
        return self._saves.running is not None

    def is_preempted(self) -> bool:
        """Whether this process has had a preemption signal, or ``preempt`` was called. Rank-local.

        Other ranks hear of it in the next poll, in ``save``, which all of them still have to call.
        """
        return self._poller.is_preempted()

    def preempt(self) -> None:
        """Save the state and end all ranks at the next poll, as after a signal. Rank-local."""
        self._poller.preempt()

    @raises_megatron_errors
    def save(
        self,
        step: int,
        state_dict: State,
        *,
        force: bool = False,
        metrics: Mapping[str, float] | None = None,
    ) -> bool:
        """Save a step if the policy says so. Collective; call it after every step.

        If nothing is due and nothing has to be polled, it returns without a collective.

        Args:
            step: number of steps done; equal on all ranks.
            state_dict: the sharded state dict, or a function that returns it, called if the step is
                saved. Its tensors may be overwritten when this returns.
            force: save globally whatever the policy says.
            metrics: numbers by name, such as ``{"loss": 2.5}``, kept with a global checkpoint for
                ``keep_best`` and ``metrics``. Those of rank 0 count.

        Returns:
            Whether a save of the step has begun; False if the step is saved already.

        Raises:
            SystemExit: a preemption signal has arrived; the state is saved, the manager closed.
            CheckpointChangedError: another job has, or has taken over, the root.
            PlanError: the ranks' policies or options would have them meet in different steps.
            StorageError: this save, or the previous one, could not be written; after the latter
                this step's save has begun. Training may continue: earlier checkpoints are complete.
            PeerTimeoutError, PeerLostError: a rank does not respond; training cannot continue.
            CheckpointError: as in ``save_async``.
        """
        step, comm, saves = whole_step(step), self._open(to_save=True), self._saves
        self._poller.handle_signals()
        poll = self._poller.ask(comm, step, saves, self._tiers, force=force)
        waited_s, failed = 0.0, None
        if poll.is_done or poll.due is Tier.GLOBAL:
            waited_s, failed = saves.end_previous(comm, step)
        began, due = time.monotonic(), saves.still_due(comm, step, poll.due)
        if due is not None:
            saves.begin(comm, SaveMetrics(step, due, waited_s, 0.0), state_dict, metrics)
        if poll.is_preempted:
            self._leave(step, began)
        if due is not None and not self.options.is_async:
            self.wait()
        if failed is not None:
            raise failed
        return due is not None

    @raises_megatron_errors
    def begin(
        self,
        step: int,
        state_dict: State,
        *,
        metrics: Mapping[str, float] | None = None,
        **arguments: Any,
    ) -> LocalSaveRequest:
        """Begin a global save, without regard to policy and signals. Collective.

        For a loop that decides by itself when to save, and may have a queue that ends saves.

        Args:
            step: as for ``save``.
            state_dict: as for ``save``.
            metrics: as for ``save``.
            arguments: further arguments of ``save_async``.

        Returns:
            The request. Its ``wait``, a checkpoint queue, or the manager's next call ends it.

        Raises:
            CheckpointError: as for ``save``.
        """
        step, comm = whole_step(step), self._open(to_save=True)
        waited_s, failed = self._saves.end_previous(comm, step)
        begun = SaveMetrics(step, Tier.GLOBAL, waited_s, 0.0)
        request = self._saves.begin(comm, begun, state_dict, metrics, **arguments)
        if failed is not None:
            raise failed
        return request

    @raises_megatron_errors
    def wait(self) -> None:
        """Wait until no save is running: the last one is visible. Collective.

        A save of a process group that is no more is left to the next call, which gives it up.

        Raises:
            StorageError: it could not be written.
        """
        if self._saves.running is not None and self._comm().group_id == self._group_id:
            self._saves.running.request.wait()

    @raises_megatron_errors
    def close(self) -> None:
        """Wait for the last save, then release lock and signals. Collective and idempotent.

        Raises:
            StorageError: the save could not be written.
        """
        try:
            self.wait()
            self._root.await_removal()
        finally:
            self.release()

    def release(self) -> None:
        """Give up the signals, then the lock, once a removal under way has had 5 s. Rank-local.

        A save that has not ended is left, with a warning.
        """
        self._release(runs_again=False)

    def _release(self, *, runs_again: bool) -> None:
        if not self._is_open:
            return
        self._is_open = False
        self._saves.leave()
        self._poller.release(runs_again=runs_again)
        self._root.await_removal(_REMOVAL_S)
        self._root.release()

    def __enter__(self) -> Self:
        """Take the lock. Collective."""
        self._open()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close; after an error give up the lock alone: other ranks may be elsewhere.

        A process that is alone ends its save first, unless the function is to run again.
        """
        if kind is None:
            self.close()
            return
        try:
            if not self._group_id and issubclass(kind, Exception | SystemExit | KeyboardInterrupt):
                self.wait()
        except CheckpointError:
            logger.exception("the save under way failed")
        is_end = issubclass(kind, SystemExit | KeyboardInterrupt)
        self._release(runs_again=is_in_block() and not is_end)

    def _open(self, *, to_save: bool = False) -> Communicator:
        """All ranks; the first time in a process group, rank 0 takes the lock. Collective then."""
        if self.read_only and to_save:
            raise PlanError(f"{self.root}: the manager is read_only; save with one that is not")
        comm, saves, root = self._comm(), self._saves, self._root
        if self.read_only or (self._is_open and comm.group_id == self._group_id):
            return comm
        begun = saves.running and [saves.running.event.step, saves.running.event.tier]
        is_stale = bool(begun) and comm.group_id != self._group_id
        progress = [is_stale, begun, saves.last and [*saves.last]]
        schedule = schedule_of(self.policy, self.options)
        answers = run_and_gather(comm, lambda: [root.job(), uuid.uuid4().hex, schedule, *progress])
        require_one_schedule([of_rank for _, _, of_rank, *_ in answers])
        jobs = [job for job, *_ in answers if job]
        root.join([*jobs, answers[0][1]][0])
        run_on_first_rank(comm, partial(root.acquire, WORK * self._timeout_s, jobs))
        # Some rank has been replaced, or the save under way is of another process group.
        if any(of_rank != progress or of_rank[0] for _, _, _, *of_rank in answers):
            saves.give_up(comm, next((save for *_, save, _ in answers if save), None))
            if self.local is not None:
                run_collectively(comm, self.local.abandon)
        self._is_open, self._group_id, saves.global_s = True, comm.group_id, time.monotonic()
        self._poller.begin()
        return comm

    def _begin_load(self, state_dict: State) -> tuple[Communicator, Any]:
        self._open()
        self.wait()
        self._saves.begin_load()
        return super()._begin_load(state_dict)

    def _note_load(self, loaded: Loaded) -> None:
        if loaded.tier is not Tier.MEMORY:
            self._saves.note_load(loaded.tier, loaded.iteration)

    def _leave(self, step: int, began: float) -> NoReturn:
        """Wait for the last save, release the manager, and end the process. Collective.

        No removal is waited for: the sender of the signal kills the process after a while.
        """
        self.wait()
        logger.warning("step %d: saved in %.1f s", step, time.monotonic() - began)
        self.release()
        self._poller.forget()
        raise SystemExit(self.options.exit_code)
