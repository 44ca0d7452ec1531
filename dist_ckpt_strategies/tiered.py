"""One manager for a training's checkpoints: in memory, on the nodes' disks, on shared storage."""

import json
import logging
import signal
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Self, TypeVar

from dist_ckpt_strategies.comm.base import (
    Communicator,
    run_and_gather,
    run_collectively,
    run_on_first_rank,
)
from dist_ckpt_strategies.comm.torch_communicator import open_communicator
from dist_ckpt_strategies.config import JOB, environment, options_from_environment
from dist_ckpt_strategies.core.report import SaveMetrics
from dist_ckpt_strategies.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    PeerLostError,
    PeerTimeoutError,
    PlanError,
    StorageError,
)
from dist_ckpt_strategies.formats.course import Course, read_course, write_course
from dist_ckpt_strategies.formats.locations import located
from dist_ckpt_strategies.formats.objects import Allowed
from dist_ckpt_strategies.local.manager import LocalCheckpointManager
from dist_ckpt_strategies.local.mcore_state_dict import MCoreTensorAwareStateDict, ShardDistribution
from dist_ckpt_strategies.megatron.shards import StateDict
from dist_ckpt_strategies.megatron.types import raises_megatron_errors
from dist_ckpt_strategies.recovery.latest import (
    Attempt,
    Loaded,
    Tier,
    global_checkpoints,
    load_latest,
)
from dist_ckpt_strategies.recovery.manager import CheckpointManager
from dist_ckpt_strategies.sharded.async_request import LocalSaveRequest
from dist_ckpt_strategies.storage.files import Directory
from dist_ckpt_strategies.storage.io_pool import ALL, WORK, Deadline, run_within
from dist_ckpt_strategies.storage.lease import JOBS, Lease
from dist_ckpt_strategies.strategies.load import load
from dist_ckpt_strategies.strategies.registry import StrategyChoice
from dist_ckpt_strategies.strategies.save import save_async
from dist_ckpt_strategies.tools.prune import prune

T = TypeVar("T")

logger = logging.getLogger(__name__)

_MIN_UNFINISHED_S = 3600.0
"""What an unfinished save has to be unchanged for before it is removed."""

_LEASE_S = 60.0
_REMOVAL_S = 5.0
"""How long ``release`` waits for the removal of old checkpoints: after an error others wait too."""

_PREEMPTED, _LATE, _DONE = 1, 2, 4
"""In a poll: a signal has come, ``every_minutes`` have passed, this share of the save is done."""

_ENDING: set[str] = set()  # roots of trainings that have to end, whichever attempt heard of it

_NONE = -1
_LOCAL_ARGUMENTS = ("strict", "strict_dtype", "validate_access_integrity")
_NAME = r"iter_\d{7,}"
"""What the names of the global checkpoints match; nothing else in the root is loaded or removed."""


@dataclass(frozen=True, slots=True)
class SavePolicy:
    """When a step is saved, and which global checkpoints are kept.

    If both tiers are due, only the global one is saved.

    Attributes:
        every_steps: save every multiple of this step number globally.
        every_minutes: save globally once so many minutes have passed since the last global save,
            by the clock of rank 0.
        local_every_steps: save every multiple of this step number locally.
        keep_last: number of newest global checkpoints to keep; None: all.
        keep_every: with ``keep_last``, also keep those whose step is a multiple of this.
    """

    every_steps: int | None = None
    every_minutes: float | None = None
    local_every_steps: int | None = None
    keep_last: int | None = None
    keep_every: int | None = None

    def __post_init__(self) -> None:
        """Refuse what could only fail at a later step."""
        for name, value in asdict(self).items():
            kind, what = (Real, "number") if name == "every_minutes" else (Integral, "whole number")
            if value is not None and not (isinstance(value, kind) and float(value) > 0):
                raise PlanError(f"{name}: expected a {what} above 0, found {value!r}")
        if self.keep_every and not self.keep_last:
            raise PlanError("keep_every: expected with keep_last; without it, all are kept")

    def due(self, step: int) -> Tier | None:
        """The tier that is due at a step, without regard to ``every_minutes``; None: none."""
        if self.every_steps and step % self.every_steps == 0:
            return Tier.GLOBAL
        if self.local_every_steps and step % self.local_every_steps == 0:
            return Tier.LOCAL
        return None


@dataclass(frozen=True, slots=True)
class ManagerOptions:
    """Options of a TieredCheckpointManager. Equal on all ranks.

    Attributes:
        strategy: of global saves: ("safetensors", 1) by default, ("zarr", 1), or an instance.
        load_strategy: strategy of global loads; by default the one that the checkpoint names.
        allow: further classes that objects of the state may have.
        is_async: ``save`` returns while the state is written in the background; False: it waits.
        timeout_s: longest wait for a peer; by default that of the environment.
        poll_every_steps: at multiples of this step number, one small gather finds out whether a
            signal has arrived, ``every_minutes`` have passed, or a save has ended. There is no
            gather if none of these is possible.
        preemption_signals: after one of these signals on any rank, the next poll saves the state,
            and every rank raises SystemExit. Handled in the main thread.
        exit_code: exit code of that SystemExit; ``dist-ckpt run`` takes all but 143 for a death.
        lease_s: seconds without a renewal after which the next job may take over the root;
            by default 60, or a quarter of ``timeout_s`` if that is less.
        metrics: function that rank 0 calls with the SaveMetrics of each save, or a file to which
            it appends them, one line of JSON each. If this fails, the failure is logged.
    """

    strategy: StrategyChoice = None
    load_strategy: StrategyChoice = None
    allow: Allowed = ()
    is_async: bool = True
    timeout_s: float | None = None
    poll_every_steps: int = 1
    preemption_signals: tuple[int, ...] = (signal.SIGTERM,)
    exit_code: int = 128 + signal.SIGTERM
    lease_s: float | None = None
    metrics: Callable[[SaveMetrics], None] | str | Path | None = None


class TieredCheckpointManager:
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

    Args:
        root: directory of the global checkpoints ``iter_0000100`` and so on, which all ranks see,
            or ``s3://bucket/path`` or ``gs://bucket/path``.
        local: manager of checkpoints on the nodes' own disks, if these are used.
        recovery: manager of recovery from memory, if this is used.
        policy: when to save, and what to keep; by default only ``force=True`` saves.
        options: everything else.

    Raises:
        PlanError: the policy has local saves without ``local``, or the reverse; ``local`` is bound
            to another root; or an option is out of range.
    """

    def __init__(
        self,
        root: str | Path,
        *,
        local: LocalCheckpointManager | None = None,
        recovery: CheckpointManager | None = None,
        policy: SavePolicy = SavePolicy(),
        options: ManagerOptions = ManagerOptions(),
    ) -> None:
        if (local is None) is not (policy.local_every_steps is None):
            raise PlanError(
                "local and policy.local_every_steps: expected both or none, found "
                f"{local!r} and {policy.local_every_steps!r}"
            )
        defaults = options_from_environment()
        self._timeout_s = options.timeout_s or defaults.timeout_s
        lease_s = options.lease_s
        if lease_s is None:
            lease_s = min(_LEASE_S, self._timeout_s / 4)
        if not (options.poll_every_steps >= 1 and 0 < lease_s < WORK * self._timeout_s):
            raise PlanError(
                f"options: expected poll_every_steps >= 1 and 0 < lease_s < {WORK:g} * timeout_s, "
                f"found {options.poll_every_steps}, {lease_s:g} and {self._timeout_s:g}"
            )
        place = located(root, defaults)
        self.root, self.policy, self.options = str(place), policy, options
        self.local, self.recovery = local, recovery
        if local is not None:
            local.bind(self.root)
        self._place = Directory(place) if isinstance(place, Path) else place
        self._lease = Lease(self._place, lease_s)
        self._is_open = self._is_watching = False
        self._group_id = ""
        self._pending: tuple[Callable[[], list[int]], object] | None = None
        self._resumed: tuple[int | None, str] | None = (None, _now())
        self._handlers: dict[int, Any] = {}
        self._running: tuple[SaveMetrics, LocalSaveRequest] | None = None
        self._newest = {Tier.LOCAL: _NONE, Tier.GLOBAL: _NONE}
        self._distribution: ShardDistribution | None = None
        self._pruning: threading.Thread | None = None
        self._one_removal = threading.Lock()
        self._last_s = time.monotonic()

    def directory(self, step: int) -> str:
        """Path or URL of the global checkpoint of a step. Rank-local."""
        return f"{self.root}/iter_{step:07d}"

    def all_steps(self) -> list[int]:
        """Sorted steps of all finished global checkpoints. Rank-local; reads the storage."""
        found = global_checkpoints([self.root], _NAME)
        return sorted(step for step, _, is_done, _ in found if is_done)

    def latest_step(self) -> int | None:
        """The last finished step of the present course; None: there is none. Rank-local."""
        return max(filter(self.course().has, self.all_steps()), default=None)

    def course(self) -> Course:
        """Which checkpoints the training has left. Rank-local; reads the storage."""
        return read_course(self._place)

    def preempt(self) -> None:
        """Save the state and end all ranks at the next poll, as after a signal. Rank-local."""
        _ENDING.add(self.root)

    @raises_megatron_errors
    def load_latest(
        self,
        state_dict: StateDict | Callable[[], StateDict],
        provider: Any = None,
        *,
        at_most: int | None = None,
        **arguments: Any,
    ) -> Loaded | None:
        """Load the newest complete state: from memory, else from disk, local before global.

        Collective. After going back with ``at_most``, the first save makes what is newer another
        course, which the training has left: later calls without ``at_most`` do not load it, and
        ``keep_last`` counts it as older than the present course. One line is logged while it is
        there.

        Args:
            state_dict: sharded state dict to load, or a function that returns it; the tensors of
                ShardedTensors are filled in place.
            provider: StateProvider, or an object that has one, to fill from memory.
            at_most: skip newer steps and memory, to go back in a training. A global checkpoint of
                just this step is tried first, also one that the training has left.
            arguments: further arguments of ``load``; for a local checkpoint ``strict``,
                ``strict_dtype`` and ``validate_access_integrity``.

        Returns:
            What was loaded: ``iteration`` is the step from which training continues, ``attempts``
            lists what was refused, with the reasons. None: there is no finished checkpoint.

        Raises:
            StorageError: there are checkpoints, but none can be used, or all are newer than
                ``at_most``, or of a course that was left; the text has the reason for each.
            CheckpointChangedError: another job saves at ``root``.
            StorageError, PeerError: as in ``recovery.load_latest``.
        """
        comm = self._open()
        self.wait()
        since = _now()
        self._resumed = None, since
        state = run_collectively(comm, state_dict) if callable(state_dict) else state_dict
        if self.local is not None:
            resumed = lambda: None if comm.rank else self._within(self.course).resumed  # noqa: E731
            self.local.resumed_at(run_and_gather(comm, resumed)[0])
        refused: tuple[Attempt, ...] = ()
        if self.recovery is not None and provider is not None and at_most is None:
            report = self.recovery.try_checkpointless_load(provider)
            if report is not None:
                return Loaded(Tier.MEMORY, report["global_step"], "memory", None, ())
            why = str(self.recovery.last_failure)
            refused = (Attempt(Tier.MEMORY, _NONE, "memory", why),)
        how = {key: arguments[key] for key in _LOCAL_ARGUMENTS if key in arguments}
        known = {"sharded_strategy": self.options.load_strategy, "allow": self.options.allow}
        known |= {"timeout_s": self.options.timeout_s} | arguments
        self._newest = dict.fromkeys(self._newest, _NONE)  # newer ones may be of another course
        try:
            found = load_latest(
                self.local,
                [self.root],
                partial(load, state, **known),
                load_local=lambda found: found.load_into(state, **how),
                at_most=at_most,
                pattern=_NAME,
            )
        except CheckpointNotFoundError as error:
            logger.info("nothing to load: %s", error)
            return None
        self._newest[found.tier] = found.iteration
        self._resumed = found.iteration, since
        return replace(found, attempts=refused + found.attempts)

    @raises_megatron_errors
    def save(
        self,
        step: int,
        state_dict: StateDict | Callable[[], StateDict],
        *,
        force: bool = False,
    ) -> bool:
        """Save a step if the policy says so. Collective; call it after every step.

        If nothing is due and nothing has to be polled, it returns without a collective.

        Args:
            step: number of steps done; equal on all ranks.
            state_dict: the sharded state dict, or a function that returns it, called if the step is
                saved. Its tensors may be overwritten when this returns.
            force: save globally whatever the policy says.

        Returns:
            Whether a save of the step has begun; False if the step is saved already.

        Raises:
            SystemExit: a preemption signal has arrived; the state is saved, the manager closed.
            CheckpointChangedError: another job has, or has taken over, the root.
            StorageError: this save, or the previous one, could not be written; after the latter
                this step's save has begun. Training may continue: earlier checkpoints are complete.
            PeerTimeoutError, PeerLostError: a rank does not respond; training cannot continue.
            CheckpointError: as in ``save_async``.
        """
        step = _whole(step)
        comm = self._open()
        self._handle_signals()
        due = Tier.GLOBAL if force else self.policy.due(step)
        is_preempted, is_done, due = self._poll(comm, step, due)
        waited_s, failed = 0.0, None
        if is_preempted or is_done or due is Tier.GLOBAL:
            waited_s, failed = self._finish_previous(comm, step)
        if is_preempted:
            self._leave(comm, step, state_dict)
        due = self._still_due(step, due)
        if due is not None:
            self._begin(comm, due, step, state_dict, waited_s)
            if not self.options.is_async:
                self.wait()
        if failed is not None:
            raise failed
        return due is not None

    @raises_megatron_errors
    def begin(
        self,
        step: int,
        state_dict: StateDict | Callable[[], StateDict],
        **arguments: Any,
    ) -> LocalSaveRequest:
        """Begin a global save, without regard to policy and signals. Collective.

        For a loop that decides by itself when to save, and may have a queue that ends saves.

        Args:
            step: as for ``save``.
            state_dict: as for ``save``.
            arguments: further arguments of ``save_async``.

        Returns:
            The request. Its ``wait``, a checkpoint queue, or the manager's next call ends it.

        Raises:
            StorageError: the previous save could not be written; this one has not begun.
            CheckpointError: as for ``save``.
        """
        step = _whole(step)
        comm = self._open()
        waited_s, failed = self._finish_previous(comm, step)
        if failed is not None:
            raise failed
        return self._begin(comm, Tier.GLOBAL, step, state_dict, waited_s, **arguments)

    @raises_megatron_errors
    def wait(self) -> None:
        """Wait until no save is running: the last one is visible. Collective.

        A save of a process group that is no more is left to the next call, which gives it up.

        Raises:
            StorageError: it could not be written.
        """
        if self._running is not None and self._comm().group_id == self._group_id:
            self._running[1].wait()

    @raises_megatron_errors
    def close(self) -> None:
        """Wait for the last save, then release lock and signals. Collective and idempotent.

        Raises:
            StorageError: the save could not be written.
        """
        try:
            self.wait()
            if self._pruning is not None:
                self._pruning.join(WORK * self._timeout_s)
        finally:
            self.release()

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
        self.release()

    def _comm(self) -> Communicator:
        return open_communicator(None, timeout_s=self._timeout_s, purpose="checkpoint manager")

    def _open(self) -> Communicator:
        """All ranks; the first time in a process group, rank 0 takes the lock. Collective then."""
        comm = self._comm()
        if self._is_open and comm.group_id == self._group_id:
            return comm
        begun = self._running and [self._running[0].step, self._running[0].tier]
        is_stale = bool(begun) and comm.group_id != self._group_id
        known = [is_stale, begun, *self._newest.values()]
        own = JOBS.get(self.root) or environment().get(JOB)
        answers = run_and_gather(comm, lambda: [own, uuid.uuid4().hex, *known])
        jobs = [job for job, *_ in answers if job]
        JOBS[self.root] = [*jobs, answers[0][1]][0]
        acquire = partial(self._lease.acquire, WORK * self._timeout_s, jobs)
        run_on_first_rank(comm, partial(self._within, acquire))
        # Some rank has been replaced, or the save under way is of another process group.
        if any(one != known or one[0] for _, _, *one in answers):
            if self._running is not None:
                logger.warning("%s is given up", _name(self._running[0]))
                self._running[1].give_up()
            if self.local is not None:
                run_collectively(comm, self.local.abandon)
            self._running, self._newest = None, dict.fromkeys(self._newest, _NONE)
        self._is_open, self._group_id, self._pending = True, comm.group_id, None
        self._last_s = time.monotonic()
        return comm

    def _within(self, step: Callable[[], T]) -> T:
        """What a step returns that asks the root's storage. Rank-local."""
        return run_within(Deadline.after(ALL * self._timeout_s), self.root, step)

    def _handle_signals(self) -> None:
        if self._is_watching:
            return
        self._is_watching = True
        if threading.current_thread() is threading.main_thread():
            for number in self.options.preemption_signals:
                self._handlers[number] = signal.signal(number, lambda *_: self.preempt())
        elif self.options.preemption_signals:
            logger.warning("preemption_signals: only the main thread can handle signals")

    def _poll(
        self, comm: Communicator, step: int, due: Tier | None
    ) -> tuple[bool, bool, Tier | None]:
        """Whether any rank is preempted, whether the save under way is done, and what is due.

        Collective, unless at this step nothing can have happened: that is known on all ranks alike.
        Over NCCL, a host that waited would wait for the GPU's queue: unless a save is due, the next
        call reads the answers.
        """
        options, running, minutes = self.options, self._running, self.policy.every_minutes
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
            is_late = bool(minutes) and time.monotonic() - self._last_s >= 60 * (minutes or 0)
            is_done = running is not None and running[1].done()
            number = _PREEMPTED * (self.root in _ENDING) | _LATE * is_late | _DONE * is_done
            numbers = comm.begin_gather(number)
            if due is None and comm.device.type != "cpu":
                self._pending = numbers, running
            else:
                answers = [old | new for old, new in zip(answers, numbers(), strict=True)]
        preempted = [comm.global_ranks[n] for n, one in enumerate(answers) if one & _PREEMPTED]
        if preempted:
            logger.warning("ranks %s: preempted; step %d is the last one", preempted, step)
        is_done = all(one & _DONE for one in answers)
        return bool(preempted), is_done, Tier.GLOBAL if answers[0] & _LATE else due

    def _still_due(self, step: int, due: Tier | None) -> Tier | None:
        """What is due of what is not saved already; no local save beside another save."""
        if due is None or step in {self._newest[due], self._newest[Tier.GLOBAL]}:
            return None
        if self._running is not None:
            before = _name(self._running[0])
            logger.warning("local save of step %d skipped: %s is still running", step, before)
            return None
        return due

    def _finish_previous(
        self, comm: Communicator, step: int
    ) -> tuple[float, CheckpointError | None]:
        """Make the save under way visible, if there is one; what was waited, and why it failed.

        Collective.
        """
        if (running := self._running) is None:
            return 0.0, None
        began, (before, request) = time.monotonic(), running
        failed: CheckpointError | None = None
        is_waited_for = not request.done()
        try:
            self.wait()
        except (PeerLostError, PeerTimeoutError):
            raise
        except CheckpointError as error:
            if self._running is running:  # it still runs, and may succeed
                raise
            logger.warning("%s failed: %s", _name(before), error)
            failed = error
        # A save fails on all ranks, with each one's own reason: all of them have to allow going on.
        if failed and not all(run_and_gather(comm, lambda: isinstance(failed, StorageError))):
            raise failed
        waited_s = time.monotonic() - began
        if is_waited_for:
            logger.warning("step %d: training waited %.1f s for %s", step, waited_s, _name(before))
        return waited_s, failed

    def _begin(
        self,
        comm: Communicator,
        tier: Tier,
        step: int,
        state_dict: StateDict | Callable[[], StateDict],
        waited_s: float,
        **arguments: Any,
    ) -> LocalSaveRequest:
        """Begin a save; none is under way. Collective.

        Raises:
            CheckpointChangedError: another job has taken over; nothing of its is touched.
            PlanError: ranks save different steps.
        """
        began, options = time.monotonic(), self.options

        states: list[StateDict] = []

        def prepare() -> int:
            if comm.rank == 0:
                self._within(self._lease.require)
            states.append(state_dict() if callable(state_dict) else state_dict)
            return step

        steps = run_and_gather(comm, prepare)
        if len(set(steps)) > 1:
            raise PlanError(f"step: expected the same on all ranks, found {steps} on ranks 0, 1, …")
        (state,) = states
        if tier is Tier.LOCAL and self.local is not None:
            shards, self._distribution = MCoreTensorAwareStateDict.from_state_dict(
                state, cached_metadata=self._distribution
            )
            request = self.local.save(shards, step, is_async=True)
            assert request is not None  # noqa: S101 - an asynchronous save returns one
        else:
            known = {"sharded_strategy": options.strategy, "allow": options.allow}
            known |= {"timeout_s": options.timeout_s} | arguments
            request = save_async(
                state,
                self.directory(step),
                overwrite=True,
                **known,
            )
            self._last_s = time.monotonic()
        self._newest[tier] = step
        begun = SaveMetrics(step, tier.value, waited_s, time.monotonic() - began)
        self._running = begun, request
        request.wrap_end(partial(self._end, comm, begun, request))
        return request

    def _end(
        self,
        comm: Communicator,
        begun: SaveMetrics,
        request: LocalSaveRequest,
        commit: Callable[[], None],
    ) -> None:
        """Make a save visible, report it, and remove old checkpoints. Collective."""
        try:
            run_on_first_rank(comm, partial(self._within, self._lease.require))
            commit()
        except BaseException:
            self._running, self._newest[Tier(begun.tier)] = None, _NONE
            raise
        self._running = None
        mine = [request.work.nbytes, begun.waited_s, begun.blocking_s, request.work.seconds]

        def report() -> list[float]:
            if comm.rank == 0:
                self._within(partial(self._note_course, begun))
            return mine

        sizes, *seconds = zip(*run_and_gather(comm, report), strict=True)
        self._resumed = None
        if comm.rank == 0:
            try:
                if begun.tier == Tier.GLOBAL:
                    self._begin_removal()
                self._report(begun, sum(sizes), *map(max, seconds))  # the caller's, which may raise
            except Exception:  # one rank must not leave the others
                logger.exception("after %s", _name(begun))

    def _note_course(self, begun: SaveMetrics) -> None:
        """Note what was written last; after a load, also what the training has left; on rank 0."""
        before, (base, since) = self.course(), self._resumed or (None, "")
        left, newest, resumed = set(before.left), before.newest, before.resumed
        if since:
            base = begun.step if base is None else base
            found = [one for one in global_checkpoints([self.root], _NAME) if one[2]]
            left = {step for step, _, _, is_ours in found if step > base or not is_ours} - {base}
            newest = max((one[0] for one in found if one[0] not in left), default=newest)
            resumed = base, since
        if begun.tier == Tier.GLOBAL:
            left.discard(begun.step)
            newest = begun.step
        after = Course(newest, frozenset(left), resumed=resumed)
        if after != before:
            write_course(self._place, after)

    def _report(
        self, begun: SaveMetrics, nbytes: int, waited_s: float, blocking_s: float, work_s: float
    ) -> None:
        """Give the caller its metrics; on rank 0."""
        rate = nbytes / max(1e-9, blocking_s + work_s) / 1e9
        known = (begun.step, begun.tier, waited_s, blocking_s, work_s)
        metrics, sink = SaveMetrics(*known, nbytes, rate, time.time()), self.options.metrics
        logger.info("save: %s", metrics)
        if callable(sink):
            sink(metrics)
        elif sink is not None:
            with Path(sink).open("a") as file:
                file.write(json.dumps(asdict(metrics)) + "\n")

    def _begin_removal(self) -> None:
        """Remove what is not to be kept, in the background; on rank 0."""
        if self.policy.keep_last:
            pruning = threading.Thread(target=self._remove, name="dist-ckpt-prune", daemon=True)
            try:
                pruning.start()
                self._pruning = pruning
            except RuntimeError as error:  # such as at the end of a script, from Python 3.12 on
                logger.warning("%s: old checkpoints could not be removed yet: %s", self.root, error)

    def _remove(self) -> None:
        with self._one_removal:
            try:
                report = prune(
                    self.root,
                    keep_last=self.policy.keep_last,
                    keep_every=self.policy.keep_every,
                    unfinished=True,
                    older_than_s=max(_MIN_UNFINISHED_S, 2 * self._timeout_s),
                    pattern=_NAME,
                )
            except CheckpointError as error:
                logger.warning("%s: old checkpoints could not be removed yet: %s", self.root, error)
            else:
                names = ", ".join(one.name for one in report.removed)
                logger.info("%s: removed %s", self.root, names or "nothing")

    def _leave(
        self, comm: Communicator, step: int, state_dict: StateDict | Callable[[], StateDict]
    ) -> None:
        """Save the step, release the manager, and end the process. Collective.

        No removal is waited for: the sender of the signal kills the process after a while.
        """
        began = time.monotonic()
        if self._newest[Tier.GLOBAL] != step:
            self._begin(comm, Tier.GLOBAL, step, state_dict, 0.0)
        self.wait()
        logger.warning("step %d: saved in %.1f s", step, time.monotonic() - began)
        self.release()
        _ENDING.discard(self.root)
        raise SystemExit(self.options.exit_code)

    def release(self) -> None:
        """Give up the signals, then the lock, once a removal under way has had 5 s. Rank-local."""
        if not self._is_open:
            return
        self._is_open = self._is_watching = False
        for number, handler in self._handlers.items():
            signal.signal(number, handler or signal.SIG_DFL)
        self._handlers.clear()
        if self._pruning is not None:
            self._pruning.join(_REMOVAL_S)
        self._lease.release()


def _whole(step: object) -> int:
    if not (isinstance(step, Integral) and int(step) >= 0):
        raise PlanError(f"step: expected the number of steps done, found {step!r}")
    return int(step)


def _now() -> str:
    """The time, as stamps of local saves begin."""
    return f"{time.time_ns():016x}"


def _name(begun: SaveMetrics) -> str:
    return f"the {begun.tier} save of step {begun.step}"
