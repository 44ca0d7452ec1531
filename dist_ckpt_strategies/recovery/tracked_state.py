"""A state that is kept while it is trained, and how far it is within its step."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from dist_ckpt_strategies.comm.process_group import ProcessGroup
from dist_ckpt_strategies.comm.step_commit import StepCommit
from dist_ckpt_strategies.config import options_from_environment
from dist_ckpt_strategies.device import await_gpu, raise_if_aborted
from dist_ckpt_strategies.errors import (
    PeerLostError,
    RestartError,
)
from dist_ckpt_strategies.recovery.plan import Phase
from dist_ckpt_strategies.recovery.provider import (
    InMemoryCheckpoint,
    MemoryChecksumManager,
    ParameterUpdateLock,
    StateProvider,
    dump_objects,
    flat_shards,
    provider_of,
)
from dist_ckpt_strategies.recovery.random_states import KnownRandomStates, RandomState


class TrackedState:
    """Keeps a rank's state by reference, its phase within its step, and its random states.

    ``timeout_s`` is the longest wait for a peer in each collective. With ``is_checked``, digests of
    the state are taken at the beginning of each step.
    """

    def __init__(self, timeout_s: float, *, is_checked: bool) -> None:
        self.enable_checksum = is_checked
        self.checksum_manager = MemoryChecksumManager()
        self.parameter_update_lock = ParameterUpdateLock()
        self._timeout_s = timeout_s
        self._gpu_timeout_s = max(timeout_s, options_from_environment().timeout_s)
        self._in_memory: InMemoryCheckpoint | None = None
        self._random = KnownRandomStates()
        self._commit: StepCommit | None = None
        self._restores = False

    @property
    def global_step(self) -> int | None:
        """The step that the in-memory state is in; None without one."""
        return None if self._in_memory is None else self._in_memory.step

    @property
    def phase(self) -> Phase | None:
        """How far the in-memory state is within its step; None without one."""
        return None if self._in_memory is None else self._in_memory.phase

    @property
    def rng_states(self) -> list[RandomState] | None:
        """This rank's random states at the beginning of its step; None if they are not known."""
        return self._random.own(self.global_step or 0)

    def track(
        self,
        provider: Any,
        *,
        group: ProcessGroup | None = None,
        replica_group: ProcessGroup | None = None,
    ) -> None:
        """Keep this state from now on, by reference; the first thing after it is loaded.

        Args:
            provider: it is at the beginning of its step.
            group: ranks that commit steps; None for the world.
            replica_group: ranks that replicate their random states to each other: those that hold
                the same shards. None for ``group``.

        Raises:
            PlanError: some of it could not be sent to another rank; says what.
        """
        found = provider_of(provider)
        flat_shards(found.parts())  # what could not be sent is refused here, not at the fault
        dump_objects(dict(found.objects()))
        self._keep(found)
        self._commit = StepCommit(
            group, replica_group, timeout_s=self._timeout_s, gpu_timeout_s=self._gpu_timeout_s
        )

    def begin_step(self) -> None:
        """Note that a step begins. In the first of an attempt, collective over the replicas.

        Raises:
            RestartError: nothing is tracked, or the step before has not ended.
        """
        checkpoint, commit = self._tracked(Phase.RUNNING)
        if commit.is_new:
            self._begin_attempt(checkpoint, commit)
        elif checkpoint.step != checkpoint.provider.step:
            raise RestartError(
                f"step {checkpoint.provider.step} begins, expected {checkpoint.step}; call "
                "begin_step, vote, updating and end_step once for each step"
            )
        checkpoint, _ = self._tracked(Phase.RUNNING)
        self._in_memory = replace(checkpoint, begun=checkpoint.provider.objects())

    def vote(self) -> None:
        """Commit the step with all ranks, after the last change of a gradient; then it counts.

        Collective: two numbers among those that commit, the random states among the replicas. What
        needs other ranks for the update, such as the norm of the gradients, comes before.

        Raises:
            RestartError: some rank commits another step; on all ranks alike.
        """
        checkpoint, commit = self._tracked(Phase.RUNNING)
        commit.await_gradients(checkpoint.step)
        after = checkpoint.step + 1
        content = self._random.take(after)
        self._in_memory = replace(checkpoint, phase=Phase.GRADS_FINAL)
        self._random.add(after, commit.replicate(content))
        # A rank that has committed knows that all have reached this, and replicated theirs before.
        if not commit.should_commit(checkpoint.step):
            raise RestartError(
                f"commit of step {checkpoint.step}: some rank commits another one; load the same "
                "checkpoint on all ranks, and start at the same step"
            )
        self._in_memory = replace(checkpoint, phase=Phase.COMMITTED)

    @contextmanager
    def updating(self) -> Iterator[None]:
        """``begin_update`` and ``end_update``; left by an exception, ``abandon_update``."""
        self.begin_update()
        try:
            yield
        except BaseException:  # an interruption is none of Exception
            self.abandon_update()
            raise
        self._note_update()  # it has asked no peer, so that an abort has spoiled nothing
        raise_if_aborted()

    def begin_update(self) -> None:
        """Take the lock: this rank's shard and objects change from here on.

        Where a block has no place for ``updating()``; ``end_update`` or ``abandon_update`` follows.
        """
        checkpoint, _ = self._tracked(Phase.COMMITTED)
        self.parameter_update_lock.acquire()
        self._in_memory = replace(checkpoint, phase=Phase.UPDATING, begun=None)

    def end_update(self) -> None:
        """Give the lock back: this rank's shard and objects are those of the next step.

        Raises a PeerLostError if communication was ended: what the block has received since
        ``begin_update`` may be garbage, so the state stays inconsistent.
        """
        self._require_not_aborted()
        self._note_update()

    def abandon_update(self) -> None:
        """Give the lock back if this thread holds it; a state amid its update is inconsistent."""
        if self.parameter_update_lock.held_by(threading.get_ident()):
            self.parameter_update_lock.release()

    def on_fault(self, _fault: object) -> None:
        """The block has been left; HPWrapper calls this in its thread."""
        self.abandon_update()

    def end_step(self) -> None:
        """Note that the step is over: the weights are gathered. Gives back a lock that is held.

        The GPU need not have gathered them: every recovery gathers them again. Raises a
        PeerLostError if communication was ended.
        """
        checkpoint, _ = self._tracked(Phase.UPDATED)
        self._require_not_aborted()
        self._in_memory = replace(checkpoint, step=checkpoint.step + 1, phase=Phase.RUNNING)
        checkpoint.provider.set_step(checkpoint.step + 1)
        self._random.forget_before(checkpoint.step + 1)
        self._record_checksums()
        self.abandon_update()

    def store_rng_states(self) -> None:
        """Take the random states of this process for those of its step's beginning."""
        self._random.take(self.global_step or 0)

    def load_rng_states(self) -> None:
        """Go back to the random states of the step's beginning, if they are known."""
        self._random.restore(self.global_step or 0)

    def _keep(self, provider: StateProvider) -> None:
        """Keep the state of its step's beginning, once the GPU has reached that."""
        provider.set_step(provider.step)  # before forward and its collectives change a buffer
        await_gpu(self._gpu_timeout_s, f"beginning of step {provider.step}")
        self._in_memory = InMemoryCheckpoint(provider, provider.step, Phase.RUNNING)

    def _note_update(self) -> None:
        checkpoint, _ = self._tracked(Phase.UPDATING)
        self._in_memory = replace(checkpoint, phase=Phase.UPDATED)
        self.parameter_update_lock.release()

    def _require_not_aborted(self) -> None:
        try:
            raise_if_aborted()
        except PeerLostError:
            self.abandon_update()
            raise

    def _finish_step(self) -> None:
        """Update the in-memory state from its gradients; interrupted, it counts as inconsistent."""
        checkpoint = self._in_memory
        assert checkpoint is not None  # noqa: S101 - only called for a state that is kept
        with self.parameter_update_lock:
            self._in_memory = replace(checkpoint, phase=Phase.UPDATING, begun=None)
            checkpoint.provider.apply_update()
            self._in_memory = replace(checkpoint, phase=Phase.UPDATED, begun=None)

    def _tracked(self, phase: Phase) -> tuple[InMemoryCheckpoint, StepCommit]:
        checkpoint, commit = self._in_memory, self._commit
        if checkpoint is None or commit is None:
            raise RestartError("no state is tracked; call track(provider) first")
        if checkpoint.phase is not phase:
            raise RestartError(
                f"step {checkpoint.step}: it is {checkpoint.phase.name}, expected {phase.name}"
            )
        return checkpoint, commit

    def _begin_attempt(self, checkpoint: InMemoryCheckpoint, commit: StepCommit) -> None:
        """The beginning of the first step: the one point that no earlier commit covers."""
        step = checkpoint.provider.step
        self._keep(checkpoint.provider)
        if self._restores:
            self.load_rng_states()
            self._restores = False
        self._random.add(step, commit.replicate(self._random.take(step)))
        self._record_checksums()

    def _record_checksums(self) -> None:
        if (
            self.enable_checksum
            and self._in_memory is not None
            and self._in_memory.phase is Phase.RUNNING
        ):
            self.checksum_manager.record(self._in_memory.step, self._in_memory.provider.parts())
