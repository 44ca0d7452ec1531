"""State in memory that outlives an attempt, and how ranks get it from those that have it."""

import copy
import gc
import logging
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from typing import Any, TypeVar

import torch

from dist_ckpt_strategies.comm.base import Communicator
from dist_ckpt_strategies.comm.process_group import ProcessGroup, global_rank
from dist_ckpt_strategies.comm.step_commit import StepCommit
from dist_ckpt_strategies.comm.torch_communicator import open_communicator
from dist_ckpt_strategies.config import options_from_environment
from dist_ckpt_strategies.core.report import RecoveryReport
from dist_ckpt_strategies.device import HostSnapshot, await_gpu, raise_if_aborted, uses_cuda
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
    ParameterUpdateLock,
    Shards,
    StateProvider,
    dump_objects,
    flat_shards,
    provider_of,
)
from dist_ckpt_strategies.recovery.random_states import (
    RandomState,
    capture_random_states,
    restore_random_states,
)
from dist_ckpt_strategies.recovery.recover import Recovery, UnfinishedStepError

logger = logging.getLogger(__name__)

T = TypeVar("T")

_MAX_WHY = 800
"""Longest reason why a rank has no state, in characters."""


class CheckpointManager:
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
        self.enable_checksum = enable_checksum
        self.enable_offload = enable_offload
        self.checksum_manager = MemoryChecksumManager()
        self.parameter_update_lock = ParameterUpdateLock()
        self.last_report: RecoveryReport | None = None
        self.last_failure: CheckpointError | None = None
        self._why = "has no state"
        self._is_filling = False
        self._timeout_s = timeout_s
        self._gpu_timeout_s = max(timeout_s, options_from_environment().timeout_s)
        self._in_memory: InMemoryCheckpoint | None = None
        self._random: dict[tuple[int, int], bytes] = {}  # of the last steps, by rank and step
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
        content = self._random.get((global_rank(), self.global_step or 0))
        return None if content is None else list(pickle.loads(content))  # noqa: S301 - of this job

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
        content = self._random[global_rank(), after] = pickle.dumps(capture_random_states())
        self._in_memory = replace(checkpoint, phase=Phase.GRADS_FINAL)
        self._replicate(commit, after, content)
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
        self._in_memory = replace(checkpoint, phase=Phase.UPDATING)

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
        self._forget_random_states(checkpoint.step + 1)
        self._record_checksums()
        self.abandon_update()

    def store_rng_states(self) -> None:
        """Take the random states of this process for those of its step's beginning."""
        content = pickle.dumps(capture_random_states())
        self._random[global_rank(), self.global_step or 0] = content

    def load_rng_states(self) -> None:
        """Go back to the random states of the step's beginning, if they are known."""
        states = self.rng_states
        if states is None:
            raise RestartError(f"no random states are known for step {self.global_step}")
        restore_random_states(states)

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
        if self._in_memory is not None:
            self._why = "has let its state go when delete_checkpoint was called"
        self._release()
        gc.collect()
        if uses_cuda():
            torch.cuda.empty_cache()

    def maybe_offload_checkpoint(self) -> None:
        """Move the in-memory state to the host, if that is enabled and the state may be released.

        A rank whose step counts finishes it first. One that cannot know yet whether its step
        counts keeps its live state: it needs its gradients. With checksums, a state that is not
        what it was stays too: a copy would pass for whole.
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
        flat_shards(shards)  # a tensor without memory cannot be copied
        every = [tensor for tensors in shards.values() for tensor in tensors.values()]
        copies = iter(HostSnapshot().take(every))
        copied = {shard_id: dict(zip(names, copies)) for shard_id, names in shards.items()}  # noqa: B905 - as many as there are names
        host = HeldTensors(
            lambda: copied,
            step=checkpoint.step,
            gathered=checkpoint.provider.gathered_parts(),
            objects=copy.deepcopy(dict(checkpoint.provider.objects())),
        )
        self._in_memory = InMemoryCheckpoint(host, checkpoint.step, checkpoint.phase)
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

        return self._unless_refused(check) is not None

    def try_checkpointless_load(
        self, trainer: Any, *, group: ProcessGroup | None = None
    ) -> dict[str, Any] | None:
        """Fill a state from memory, this rank's own or that of others.

        Collective. Before it nothing may touch what is kept: where the model is the same as in
        the attempt before, its gradients may still be needed. Afterwards, whether it succeeded or
        not, what was kept is released; but where a peer was lost on the way nothing was decided,
        and it is kept for another attempt.

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
        report = self._unless_refused(lambda: self._recover(comm, provider))
        if report is None:
            self._let_go()
            return None
        self.last_report, self.last_failure = report, None
        logger.info("recovered from memory: %s", report)
        return {"global_step": report.step, **asdict(report)}

    def decline(self, why: str) -> None:
        """Release the in-memory state, for a reason that all ranks see; a checkpoint serves.

        Rank-local, called on all ranks alike in place of ``try_checkpointless_load``.
        """
        self._is_filling = False
        self._refuse(RestartError(why))
        self._let_go()

    def _unless_refused(self, call: Callable[[], T]) -> T | None:
        """What ``call`` returns; None where memory has no answer, on all ranks alike."""
        try:
            return call()
        except (PeerTimeoutError, PeerLostError):
            raise
        except CheckpointError as error:
            self._refuse(error)
            return None

    def _refuse(self, error: CheckpointError) -> None:
        """Note why; the frames that the error came through would keep the tensors they look at."""
        logger.warning("no recovery from memory: %s", error)
        forget_frames(error)
        self.last_failure = error

    def _let_go(self) -> None:
        """Release everything after a recovery that was refused."""
        if self._in_memory is not None:
            why = str(self.last_failure)[:_MAX_WHY]
            self._why = f"has let its state go when a recovery was refused: {why}"
        self._release()
        self._require_unfilled()

    def _require_unfilled(self) -> None:
        """Raise where the state to be filled is neither new nor old now, on all ranks alike.

        A new run that began with it would begin with weights of the old.
        """
        if not self._is_filling:
            return
        failure = self.last_failure
        assert failure is not None  # noqa: S101 - callers have noted it by _refuse
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

    def _shards_of(self, provider: StateProvider) -> Shards:
        """What of a state a recovery moves: here all of it."""
        return provider.parts()

    def _finish_step(self) -> None:
        """Update the in-memory state from its gradients; interrupted, it counts as inconsistent."""
        checkpoint = self._in_memory
        assert checkpoint is not None  # noqa: S101 - only called for a state that is kept
        with self.parameter_update_lock:
            self._in_memory = replace(checkpoint, phase=Phase.UPDATING)
            checkpoint.provider.apply_update()
            self._in_memory = replace(checkpoint, phase=Phase.UPDATED)

    def _adopt(self, new: StateProvider, step: int, random_states: dict[int, bytes]) -> None:
        for rank, content in random_states.items():
            self._random[rank, step] = content
        self._forget_random_states(step)
        self._in_memory = InMemoryCheckpoint(new, step, Phase.RUNNING)
        self._commit = None
        self._restores = True
        self.load_rng_states()
        self._record_checksums()

    def _release(self) -> None:
        self._in_memory = None
        self._commit = None
        self._restores = False
        self._random.clear()
        self.checksum_manager.clear()

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
        self.store_rng_states()
        self._replicate(commit, step, self._random[global_rank(), step])
        self._record_checksums()

    def _replicate(self, commit: StepCommit, step: int, content: bytes) -> None:
        for rank, found in commit.replicate(content).items():
            self._random[rank, step] = found

    def _forget_random_states(self, before: int) -> None:
        self._random = {key: found for key, found in self._random.items() if key[1] >= before}

    def _record_checksums(self) -> None:
        if (
            self.enable_checksum
            and self._in_memory is not None
            and self._in_memory.phase is Phase.RUNNING
        ):
            self.checksum_manager.record(self._in_memory.step, self._in_memory.provider.parts())
