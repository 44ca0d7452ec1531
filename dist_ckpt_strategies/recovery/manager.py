"""State in memory that outlives an attempt, and how ranks get it from those that have it."""

from __future__ import annotations

import gc
import logging
from dataclasses import asdict
from typing import Any

import torch

from dist_ckpt_strategies.comm.base import Communicator
from dist_ckpt_strategies.comm.process_group import ProcessGroup
from dist_ckpt_strategies.comm.torch_communicator import open_communicator
from dist_ckpt_strategies.core.report import RecoveryReport
from dist_ckpt_strategies.device import uses_cuda
from dist_ckpt_strategies.errors import (
    CheckpointError,
    PeerLostError,
    PeerTimeoutError,
    RestartError,
    forget_frames,
)
from dist_ckpt_strategies.recovery.plan import Phase
from dist_ckpt_strategies.recovery.provider import (
    HasStateProvider,
    HeldTensors,
    InMemoryCheckpoint,
    MemoryChecksumManager,
    StateProvider,
    host_copy,
    provider_of,
)
from dist_ckpt_strategies.recovery.recover import (
    BrokenGatherError,
    Recovery,
    UnfinishedStepError,
)
from dist_ckpt_strategies.recovery.shards import Shards
from dist_ckpt_strategies.recovery.step_keeper import StepKeeper

logger = logging.getLogger(__name__)

_MAX_WHY = 800
"""Longest reason why a rank has no state, in characters."""


class CheckpointManager(StepKeeper):
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
        timeout_s: longest wait for a peer in each collective.

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
        super().__init__(enable_checksum=enable_checksum, timeout_s=timeout_s)
        self.enable_offload = enable_offload
        self.last_report: RecoveryReport | None = None
        self.last_failure: CheckpointError | None = None
        self._let_go_for = ""
        self._is_run_again = False
        self._is_filling = False

    def save_checkpoint(self, trainer: StateProvider | HasStateProvider) -> None:
        """Keep this state, by reference; takes its digests where they are enabled.

        Of a state that is tracked, nothing but that: how far it is within its step stays known.
        """
        provider = provider_of(trainer)
        if self._kept is None or self._kept.provider is not provider:
            self._kept = InMemoryCheckpoint(provider, provider.step, Phase.RUNNING)
            self.store_rng_states()
        self._record_checksums()

    def delete_checkpoint(self) -> None:
        """Forget the kept state and its random states, and collect what they leave."""
        if self._kept is not None:
            self._let_go_for = "delete_checkpoint was called"
        self._release()
        self._random.clear()
        gc.collect()
        if uses_cuda():
            torch.cuda.empty_cache()

    def maybe_offload_checkpoint(self) -> None:
        """Move the kept state to the host, if that is enabled and the state may be released.

        A rank whose step counts finishes it first. One that cannot know yet whether its step
        counts keeps its live state: it needs its gradients. With checksums, a state that is not
        what it was stays too: a copy would pass for whole.
        """
        kept = self._kept
        if not self.enable_offload or kept is None or isinstance(kept.provider, HeldTensors):
            return
        if kept.phase is Phase.GRADS_FINAL:
            logger.info("step %d may count or not: its state stays where it is", kept.step)
            return
        if kept.damage(self._checksums()):
            return
        if kept.phase is Phase.COMMITTED:
            try:
                self._finish_step()
            except RestartError as error:  # only its trainer could: it is inconsistent now
                logger.warning("step %d is not finished: %s", kept.step, error)
        kept = self._kept
        assert kept is not None  # noqa: S101 - finishing a step keeps it
        is_whole = kept.phase is not Phase.UPDATING  # otherwise nothing but its step counts
        shards = self._shards_of(kept.provider) if is_whole else {}
        host = host_copy(kept.provider, shards, kept.step)
        self._kept = InMemoryCheckpoint(host, kept.step, kept.phase)
        self._record_checksums()  # of the copy, which need not have all that the state has

    def checkpointless_recovery_feasible(
        self,
        trainer: StateProvider | HasStateProvider,
        include_checksum_verification: bool = True,  # noqa: FBT001, FBT002 - the kept signature
        *,
        group: ProcessGroup | None = None,
    ) -> bool:
        """Whether all ranks can get to one step from memory; the reason stays if not.

        Collective; changes nothing.

        Args:
            trainer: the state to be filled.
            include_checksum_verification: compare the copies, where checksums are enabled.
            group: ranks that take part; None for the world.

        Raises:
            PeerTimeoutError, PeerLostError: a rank does not take part any more.
        """
        recovery = self._recovery(self._communicator(group), provider_of(trainer))
        try:
            plan = recovery.plan()
            if include_checksum_verification and self.enable_checksum:
                recovery.compare(plan)
        except (PeerTimeoutError, PeerLostError):
            raise
        except CheckpointError as error:
            self._refuse(error)
            return False
        return True

    def try_checkpointless_load(
        self, trainer: StateProvider | HasStateProvider, *, group: ProcessGroup | None = None
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
            RestartError: it broke off when ``trainer`` had been filled in part, and HPWrapper runs
                the block again, which makes it anew; on all ranks alike. Without HPWrapper None
                is returned then too, and a checkpoint has to be loaded over it.
        """
        provider = provider_of(trainer)
        comm = self._communicator(group)
        try:
            report = self._recover(comm, provider)
        except (PeerTimeoutError, PeerLostError):
            raise
        except BrokenGatherError as error:
            raise PeerLostError(None, str(error)) from error
        except CheckpointError as error:
            self._give_up(error)
            return None
        self.last_report, self.last_failure = report, None
        logger.info("recovered from memory: %s", report)
        return {"global_step": report.step, **asdict(report)}

    def decline(self, why: str) -> None:
        """Release the kept state, for a reason that all ranks see: a checkpoint is loaded instead.

        Rank-local, called on all ranks alike in place of ``try_checkpointless_load``.
        """
        self._is_filling = False
        self._give_up(RestartError(why))

    def on_attempt(self, _epoch: object) -> None:
        """An attempt begins; HPWrapper calls this in the block's thread."""
        self._is_run_again = True

    def _give_up(self, error: CheckpointError) -> None:
        """Release everything; raise where the state to be filled is neither new nor old now.

        On all ranks alike. A new run that began with it would begin with weights of the old.
        """
        self._refuse(error)
        if self._kept is not None:
            self._let_go_for = f"a recovery was refused: {error}"
        self._release()
        self._random.clear()
        self._require_unfilled(error)

    def _require_unfilled(self, error: CheckpointError) -> None:
        """Raise after a recovery that broke off when it had begun to fill the state."""
        if self._is_filling and self._is_run_again:
            raise RestartError(
                f"a recovery from memory broke off with the state filled in part: {error}; the "
                "block has to make it anew"
            ) from error
        if self._is_filling:
            logger.warning("the state is filled in part: load a checkpoint, or make it anew")

    def _note_filling(self) -> None:
        self._is_filling = True

    def _communicator(self, group: ProcessGroup | None) -> Communicator:
        return open_communicator(
            group, timeout_s=self._timeout_s, purpose="recovery from the memory of other ranks"
        )

    def _checksums(self) -> MemoryChecksumManager | None:
        return self.checksum_manager if self.enable_checksum else None

    def _recovery(self, comm: Communicator, new: StateProvider) -> Recovery:
        why = f"has let its state go when {self._let_go_for[:_MAX_WHY]}"
        return Recovery(
            comm,
            new,
            self._kept,
            why=why if self._let_go_for else "has no state",
            random_states=self._random,
            checksums=self._checksums(),
            shards_of=self._shards_of,
        )

    def _recover(self, comm: Communicator, new: StateProvider) -> RecoveryReport:
        self._is_filling = False
        recovery = self._recovery(comm, new)

        def adopt(step: int, random_states: dict[int, bytes]) -> None:
            self._adopt(new, step, random_states)

        try:
            plan = recovery.plan()
            return recovery.run(plan, self._finish_step, adopt, on_filling=self._note_filling)
        except UnfinishedStepError as unfinished:
            # That rank's state is inconsistent, and known to be: the next plan has one rank less.
            logger.warning("%s; is there another copy?", unfinished)
            try:
                return self._recover(comm, new)
            except (PeerTimeoutError, PeerLostError):
                raise
            except CheckpointError as error:
                raise RestartError(f"{unfinished}; without it: {error}") from error

    def _shards_of(self, provider: StateProvider) -> Shards:
        """What of a state a recovery moves: here all of it."""
        return provider.parts()

    def _finish_step(self) -> None:
        """Update the kept state from its gradients; interrupted, it counts as inconsistent."""
        kept = self._kept
        assert kept is not None  # noqa: S101 - only called for a state that is kept
        with self.parameter_update_lock:
            self._kept = InMemoryCheckpoint(kept.provider, kept.step, Phase.UPDATING)
            kept.provider.apply_update()
            self._kept = InMemoryCheckpoint(kept.provider, kept.step, Phase.UPDATED)

    def _adopt(self, new: StateProvider, step: int, random_states: dict[int, bytes]) -> None:
        for rank, content in random_states.items():
            self._random[rank, step] = content
        self._forget_random_states(step)
        self._kept = InMemoryCheckpoint(new, step, Phase.RUNNING)
        self._commit = None
        self._restores = True
        self.load_rng_states()
        self._record_checksums()

    def _refuse(self, error: CheckpointError) -> None:
        """Note why; the frames that the error came through would keep the tensors they look at."""
        logger.warning("no recovery from memory: %s", error)
        forget_frames(error)
        self.last_failure = error

    def _release(self) -> None:
        self._kept = None
        self._commit = None
        self._restores = False
        self.checksum_manager.clear()
