"""State in memory that outlives an attempt, and how ranks get it from those that have it.

``tracked_state.py`` has the steps of an attempt.
"""

import gc
import logging
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any, TypeVar

from dist_ckpt_strategies.comm.base import Communicator
from dist_ckpt_strategies.comm.process_group import ProcessGroup
from dist_ckpt_strategies.comm.torch_communicator import open_communicator
from dist_ckpt_strategies.core.report import RecoveryReport
from dist_ckpt_strategies.device import release_gpu_memory
from dist_ckpt_strategies.errors import (
    CheckpointError,
    PeerLostError,
    PeerTimeoutError,
    RestartError,
    forget_frames,
)
from dist_ckpt_strategies.recovery.plan import Phase, RecoveryPlan
from dist_ckpt_strategies.recovery.provider import (
    HeldTensors,
    InMemoryCheckpoint,
    MemoryChecksumManager,
    Shards,
    StateProvider,
    copied_to_host,
    provider_of,
)
from dist_ckpt_strategies.recovery.recover import Recovery, UnfinishedStepError
from dist_ckpt_strategies.recovery.tracked_state import TrackedState

logger = logging.getLogger(__name__)

T = TypeVar("T")

_MAX_WHY = 800
"""Longest reason why a rank has no state, in characters."""


class InMemoryCheckpointManager(TrackedState):
    """Keeps a rank's state through faults, and brings all ranks back to one step.

    It is made outside the block that is run again. In the block::

        loaded = manager.try_checkpointless_load(provider)   # None: start, or load a checkpoint
        manager.track(provider, replica_group=replicas)
        while provider.step < num_steps:
            manager.begin_step()
            ...                                # forward, backward, reduce the gradients
            manager.vote()                     # commits the step: from here on it counts
            with manager.updating():
                ...                            # update the shard and the objects
            ...                                # gather the weights
            manager.end_step()

    Between ``vote`` and the end of the step nothing may draw a random number. What the
    documentation of HyperPod calls a trainer is a StateProvider here, or has one as its
    ``state_provider``.

    Args:
        enable_checksum: compare the copies of every shard before any is used, and the state in
            memory with its digests of the step's beginning. Looks at every byte in every step.
        enable_offload: let ``maybe_offload_checkpoint`` move the copy to the host.
        timeout_s: longest wait for a peer in each collective; for the GPU that of ``Options``.

    Attributes:
        checksum_manager: the digests, where ``enable_checksum`` is.
        parameter_update_lock: held while parameters change.
        last_report: of the last recovery that succeeded.
        last_failure: why the last one was not possible.
    """

    def __init__(
        self,
        enable_checksum: bool = False,  # noqa: FBT001, FBT002 - the kept signature
        enable_offload: bool = False,  # noqa: FBT001, FBT002
        *,
        timeout_s: float = 60.0,
    ) -> None:
        super().__init__(timeout_s, is_checked=enable_checksum)
        self.enable_offload = enable_offload
        self.last_report: RecoveryReport | None = None
        self.last_failure: CheckpointError | None = None
        self._why = "has no state"
        self._is_filling = False

    def save_checkpoint(self, trainer: Any) -> None:
        """Keep this state, by reference; takes its digests where they are enabled.

        Of a state that is tracked, nothing but that: how far it is within its step stays known.
        """
        provider = provider_of(trainer)
        if self._in_memory is None or self._in_memory.provider is not provider:
            self._keep(provider)
            self.store_rng_states()
        self._record_checksums()

    def delete_checkpoint(self) -> None:
        """Forget the in-memory state and its random states, and collect what they leave."""
        self._drop("delete_checkpoint was called")
        gc.collect()
        release_gpu_memory()

    def maybe_offload_checkpoint(self) -> None:
        """Move the in-memory state to the host, if that is enabled and the state may be released.

        A rank whose step counts finishes it first. One that cannot know yet whether its step
        counts keeps its live state: it needs its gradients. With checksums, a state that fails
        them is not moved either: the copy would look intact.
        """
        checkpoint = self._in_memory
        if (
            not self.enable_offload
            or checkpoint is None
            or isinstance(checkpoint.provider, HeldTensors)
        ):
            return
        if checkpoint.phase is Phase.GRADS_FINAL:
            logger.info("step %d may be committed or not: its state is not moved", checkpoint.step)
            return
        if checkpoint.damage(self._checksums()):
            return
        if checkpoint.phase is Phase.COMMITTED:
            try:
                self._finish_step()
            except RestartError as error:  # only its trainer could: it is inconsistent now
                logger.warning("step %d is not finished: %s", checkpoint.step, error)
        checkpoint = self._in_memory
        assert checkpoint is not None  # noqa: S101 - finishing a step keeps it
        is_whole = checkpoint.phase is not Phase.UPDATING  # otherwise nothing but its step counts
        shards = self._shards_of(checkpoint.provider) if is_whole else {}
        self._in_memory = copied_to_host(checkpoint, shards)
        self._record_checksums()  # of the copy, which need not have all that the state has

    def checkpointless_recovery_feasible(
        self,
        trainer: Any,
        include_checksum_verification: bool = True,  # noqa: FBT001, FBT002 - the kept signature
        *,
        group: ProcessGroup | None = None,
    ) -> bool:
        """Whether all ranks can get to one step from memory; the reason stays if not.

        Collective; changes nothing. Copies are compared where checksums are enabled, unless
        ``include_checksum_verification`` is not set.
        """
        recovery = self._recovery(self._communicator(group), provider_of(trainer))

        def check() -> RecoveryPlan:
            plan = recovery.plan()
            if include_checksum_verification and self.enable_checksum:
                recovery.compare(plan)
            return plan

        return self._answer(check) is not None

    def try_checkpointless_load(
        self, trainer: Any, *, group: ProcessGroup | None = None
    ) -> dict[str, Any] | None:
        """Fill a state from memory, this rank's own or that of others.

        Collective. Call it before anything changes the tracked model: the recovery may need its
        gradients. Afterwards, whether it succeeded or not, what was kept is released. If a peer was
        lost on the way nothing was decided, and it is kept for another attempt.

        Args:
            trainer: the state to be filled; afterwards it is the one that is kept.
            group: ranks that take part; None for the world.

        Returns:
            What was done, ``global_step`` the step that is run next; None, on all ranks alike,
            where it cannot be done: ``last_failure`` says why.

        Raises:
            PeerTimeoutError, PeerLostError: a rank does not take part any more.
            RestartError: it broke off when ``trainer`` had been filled in part, on all ranks alike.
                HPWrapper runs the block again, which creates it again.
        """
        provider = provider_of(trainer)
        comm = self._communicator(group)
        report = self._answer(lambda: self._recover(comm, provider))
        if report is None:
            self._drop(f"a recovery was refused: {self.last_failure}")
            self._require_unfilled()
            return None
        self.last_report, self.last_failure = report, None
        logger.info("recovered from memory: %s", report)
        return {"global_step": report.step, **asdict(report)}

    def decline(self, why: str) -> None:
        """Release the in-memory state, for a reason that all ranks see; a checkpoint serves.

        Rank-local, called on all ranks alike in place of ``try_checkpointless_load``.
        """
        logger.warning("no recovery from memory: %s", why)
        self.last_failure = RestartError(why)
        self._drop(f"a recovery was refused: {why}")

    def _answer(self, call: Callable[[], T]) -> T | None:
        """The result of ``call``; None if memory has no answer, on all ranks alike.

        ``last_failure`` says why; its frames would keep the tensors that they look at.
        """
        try:
            return call()
        except (PeerTimeoutError, PeerLostError):
            raise
        except CheckpointError as error:
            logger.warning("no recovery from memory: %s", error)
            forget_frames(error)
            self.last_failure = error
            return None

    def _drop(self, when: str) -> None:
        """Forget the state and all that belongs to it; other ranks may ask since when."""
        if self._in_memory is not None:
            self._why = f"has let its state go when {when[:_MAX_WHY]}"
        self._in_memory = self._commit = None
        self._restores = False
        self._random.clear()
        self.checksum_manager.clear()

    def _require_unfilled(self) -> None:
        """Raise where the state to be filled is neither new nor old now, on all ranks alike.

        A new run that began with it would begin with weights of the old.
        """
        if not self._is_filling:
            return
        failure = self.last_failure
        assert failure is not None  # noqa: S101 - ``_answer`` has noted it
        error = RestartError(
            f"a recovery from memory broke off with the state filled in part: {failure.message}; "
            "the block has to create it again"
        )
        error.global_rank = failure.global_rank
        raise error from failure

    def _note_filling(self) -> None:
        self._is_filling = True

    def _communicator(self, group: ProcessGroup | None) -> Communicator:
        return open_communicator(
            group, timeout_s=self._timeout_s, purpose="recovery from the memory of other ranks"
        )

    def _checksums(self) -> MemoryChecksumManager | None:
        return self.checksum_manager if self.enable_checksum else None

    def _recovery(self, comm: Communicator, new: StateProvider) -> Recovery:
        self._is_filling = False
        return Recovery(
            comm,
            new,
            self._in_memory,
            why=self._why,
            random_states=self._random,
            checksums=self._checksums(),
            shards_of=self._shards_of,
            gather_timeout_s=self._timeout_s,
        )

    def _recover(self, comm: Communicator, new: StateProvider) -> RecoveryReport:
        recovery, adopt = self._recovery(comm, new), partial(self._adopt, new)
        try:
            plan = recovery.plan()
            return recovery.run(plan, self._finish_step, adopt, on_filling=self._note_filling)
        except UnfinishedStepError as unfinished:
            # That rank's state is inconsistent, and known to be: the next plan has one rank less.
            logger.warning("%s; trying another copy", unfinished)
            try:
                return self._recover(comm, new)
            except (PeerTimeoutError, PeerLostError):
                raise
            except CheckpointError as error:
                raise RestartError(f"{unfinished}; without it: {error}") from error

    def _shards_of(self, provider: StateProvider) -> Shards:
        """The parts of a state that a recovery moves: here all."""
        return provider.parts()

    def _adopt(self, new: StateProvider, step: int, random_states: dict[int, bytes]) -> None:
        self._random.add(step, random_states)
        self._random.forget_before(step)
        self._in_memory = InMemoryCheckpoint(new, step, Phase.RUNNING)
        self._commit = None
        self._restores = True
        self.load_rng_states()
        self._record_checksums()


CheckpointManager = InMemoryCheckpointManager
"""HyperPod's name."""
