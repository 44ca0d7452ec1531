"""The half of a manager that changes nothing: what checkpoints there are, and loading them."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from dist_ckpt_strategies.comm.base import Communicator, run_and_gather, run_collectively
from dist_ckpt_strategies.comm.torch_communicator import open_communicator
from dist_ckpt_strategies.core.report import SaveMetrics
from dist_ckpt_strategies.errors import CheckpointError, CheckpointNotFoundError
from dist_ckpt_strategies.formats.course import Course, read_course, read_metrics
from dist_ckpt_strategies.local.manager import LocalCheckpointManager
from dist_ckpt_strategies.manager.candidates import NO_STEP, Attempt, Loaded, Tier
from dist_ckpt_strategies.manager.latest import load_newest, load_step
from dist_ckpt_strategies.manager.policy import ManagerOptions, require_same, whole_step
from dist_ckpt_strategies.manager.resume import check_resume
from dist_ckpt_strategies.manager.root import NAME, Root
from dist_ckpt_strategies.manager.tiers import DiskTier, GlobalTier, LocalTier, State
from dist_ckpt_strategies.megatron.types import raises_megatron_errors
from dist_ckpt_strategies.recovery.manager import CheckpointManager
from dist_ckpt_strategies.strategies.compare_report import CompareReport
from dist_ckpt_strategies.strategies.load import load

logger = logging.getLogger(__name__)

_LOCAL_ARGUMENTS = ("strict", "strict_dtype", "validate_access_integrity")


class CheckpointReader:
    """Finds and loads the checkpoints of a training. The other half of the manager saves them.

    Args:
        root: where the global checkpoints are.
        local: manager of checkpoints on the nodes' own disks.
        recovery: manager of recovery from memory.
        options: of the manager.
        timeout_s: longest wait for a peer.

    Attributes:
        loaded: what was loaded last, without the state; None: nothing.
    """

    def __init__(
        self,
        root: Root,
        local: LocalCheckpointManager | None,
        recovery: CheckpointManager | None,
        options: ManagerOptions,
        timeout_s: float,
    ) -> None:
        self.root, self.local, self.recovery, self.options = str(root), local, recovery, options
        self._root, self._timeout_s = root, timeout_s
        self.loaded: Loaded | None = None
        saving = {"sharded_strategy": options.strategy, "allow": options.allow}
        saving |= {"on_unchanged": options.on_unchanged, "timeout_s": options.timeout_s}
        self._tiers: dict[Tier, DiskTier] = {}  # of equal steps, the first is loaded
        if local is not None:
            local.bind(self.root)
            self._tiers[Tier.LOCAL] = LocalTier(local)
        self._tiers[Tier.GLOBAL] = GlobalTier(root, NAME, **saving)

    def directory(self, step: int) -> str:
        """Path or URL of the global checkpoint of a step. Rank-local."""
        return self._root.directory(step)

    def all_steps(self) -> list[int]:
        """Sorted steps of all finished global checkpoints. Rank-local; reads the storage."""
        return sorted(one.iteration for one in self._root.candidates() if one.is_finished)

    def latest_step(self) -> int | None:
        """The last finished step of the present course; None: there is none. Rank-local."""
        candidates = [c for c in self._root.candidates() if c.is_finished and c.is_ours]
        return max((c.iteration for c in candidates), default=None)

    def metrics(self, step: int) -> dict[str, float]:
        """The metrics that a global checkpoint was saved with. Rank-local; reads the storage."""
        return read_metrics(self._root.store, step)

    def course(self) -> Course:
        """The course, with the checkpoints that were left. Rank-local; reads the storage."""
        return read_course(self._root.store)

    @raises_megatron_errors
    def load_latest(
        self,
        state_dict: State,
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
            at_most: skip newer steps and memory, to go back in a training. A checkpoint of just
                this step is tried first, also one that the training has left.
            arguments: further arguments of ``load``; for a local checkpoint ``strict``,
                ``strict_dtype`` and ``validate_access_integrity``.

        Returns:
            What was loaded: ``iteration`` is the step from which training continues, ``attempts``
            lists what was refused, with the reasons. None: there is no finished checkpoint.

        Raises:
            StorageError: there are checkpoints, but none can be used, or all are newer than
                ``at_most``, or of a course that was left; the text has the reason for each.
            CheckpointChangedError: another job saves at ``root``.
            StorageError, PeerError: as in ``dist_ckpt_strategies.load_latest``.
        """
        comm, state = self._begin_load(state_dict)
        refused: tuple[Attempt, ...] = ()
        if provider is not None and at_most is None:
            loaded, refused = self._from_memory(comm, provider)
            if loaded is not None:
                return loaded
        find = partial(load_newest, at_most=at_most)
        try:
            return self._load(comm, find, state, arguments, refused=refused)
        except CheckpointNotFoundError as error:
            logger.info("nothing to load: %s", error)
            return None

    @raises_megatron_errors
    def load(self, step: int, state_dict: State, **arguments: Any) -> Loaded:
        """Load the checkpoint of just this step, local before global. Collective.

        For a training it is a way to go back, as ``load_latest(at_most=step)`` is.

        Args:
            step: equal on all ranks. It may be of a course that the training has left.
            state_dict: as for ``load_latest``.
            arguments: as for ``load_latest``.

        Raises:
            CheckpointNotFoundError: there is none of this step; the text lists the steps that there
                are.
            StorageError: it is damaged; the text has the reason. Nothing else is loaded.
            CheckpointChangedError, PeerError: as for ``load_latest``.
        """
        step = whole_step(step)
        comm, state = self._begin_load(state_dict)
        require_same(run_and_gather(comm, lambda: step))
        return self._load(comm, partial(load_step, step=step), state, arguments, step)

    @raises_megatron_errors
    def check_resume(self, get_state: State, *, ignore: Sequence[str] = ()) -> CompareReport | None:
        """Compare the state with what was loaded last, once the training has taken it over.

        Collective; call it before the first step, with the function that ``save`` is given. Rank 0
        logs the report, as a warning if they differ. It finds a random state that was not restored,
        a new optimizer, a scheduler at 0; see docs/right_state.md. A local checkpoint is read a
        second time, to host memory.

        Args:
            get_state: the sharded state dict as it is now, or a function that returns it.
            ignore: see ``dist_ckpt_strategies.compare``.

        Returns:
            The report; None if nothing was loaded from a disk.

        Raises:
            CheckpointError: as for ``dist_ckpt_strategies.compare``.
        """
        if self.loaded is None:
            return None
        how = tuple(ignore), self.options.allow, self._timeout_s
        return check_resume(self.loaded, get_state, self.local, *how)

    def _comm(self) -> Communicator:
        return open_communicator(None, timeout_s=self._timeout_s, purpose="checkpoint manager")

    def _open(self) -> Communicator:
        """All ranks. A manager that saves takes the lock here."""
        return self._comm()

    def _begin_load(self, state_dict: State) -> tuple[Communicator, Any]:
        """All ranks, and the state to load. Collective."""
        comm = self._open()
        state = run_collectively(comm, state_dict) if callable(state_dict) else state_dict
        if self.local is not None:
            resumed = lambda: None if comm.rank else self._root.within(self.course).resumed  # noqa: E731
            self.local.resumed_at(run_and_gather(comm, resumed)[0])
        return comm, state

    def _note_load(self, loaded: Loaded) -> None:
        """Note from where the training goes on. Rank-local."""

    def _from_memory(
        self, comm: Communicator, provider: Any
    ) -> tuple[Loaded | None, tuple[Attempt, ...]]:
        """The state in memory, or the reason why it is not used. Collective."""
        began, recovery = time.monotonic(), self.recovery
        if recovery is None:
            return None, ()
        restored = recovery.try_checkpointless_load(provider)
        if restored is None:
            return None, (Attempt(Tier.MEMORY, NO_STEP, "memory", str(recovery.last_failure)),)
        loaded = self.loaded = Loaded(Tier.MEMORY, restored["global_step"], "memory", None)
        self._report_load(comm, loaded, began)
        return loaded, ()

    def _load(
        self,
        comm: Communicator,
        find: Callable[..., Loaded],
        state: Any,
        arguments: Mapping[str, Any],
        step: int = NO_STEP,
        refused: tuple[Attempt, ...] = (),
    ) -> Loaded:
        """Load from the disk tiers by ``find``, note it, and report it. Collective."""
        began, options = time.monotonic(), self.options
        how = {key: arguments[key] for key in _LOCAL_ARGUMENTS if key in arguments}
        global_arguments = {"sharded_strategy": options.load_strategy, "allow": options.allow}
        global_arguments |= {"timeout_s": options.timeout_s, **arguments}
        reads = {
            Tier.LOCAL: lambda shards: shards.load_into(state, **how),
            Tier.GLOBAL: partial(load, state, **global_arguments),
        }
        try:
            result = find(comm, [*self._tiers.values()], reads)
        except CheckpointError as error:
            facts = step, "", 0.0, time.monotonic() - began
            is_new = step == NO_STEP and isinstance(error, CheckpointNotFoundError)
            if comm.rank == 0 and not is_new:  # a training that begins has nothing to load
                options.report(SaveMetrics(*facts, kind="failure", reason=str(error)))
            raise
        loaded = replace(result, attempts=(*refused, *result.attempts))
        self.loaded = replace(loaded, state=None)
        self._note_load(loaded)
        self._report_load(comm, loaded, began)
        return loaded

    def _report_load(self, comm: Communicator, loaded: Loaded, began: float) -> None:
        if comm.rank == 0:
            why = "; ".join(map(str, loaded.attempts))
            facts = loaded.iteration, loaded.tier.value, 0.0, time.monotonic() - began
            self.options.report(SaveMetrics(*facts, kind="load", reason=why))
