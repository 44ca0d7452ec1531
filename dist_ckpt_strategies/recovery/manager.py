"""State in memory that outlives an attempt, and how ranks get it from those that have it."""

from __future__ import annotations

import gc
import logging
from dataclasses import asdict
from typing import Any

import torch

from dist_ckpt_strategies.comm.base import Communicator
from dist_ckpt_strategies.comm.collective import run_collectively
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
from dist_ckpt_strategies.recovery.kept_state import (
    HeldTensors,
    KeptState,
    damage_of,
    held_state,
    host_copy,
)
from dist_ckpt_strategies.recovery.part_transfer import FlatPart, flat_parts
from dist_ckpt_strategies.recovery.plan import Phase, RankFacts
from dist_ckpt_strategies.recovery.provider import HasStateProvider, StateProvider, provider_of
from dist_ckpt_strategies.recovery.recover import (
    BrokenGatherError,
    Recovered,
    Survivor,
    UnfinishedStepError,
    plan_recovery,
    run_recovery,
)
from dist_ckpt_strategies.recovery.step_keeper import StepKeeper

logger = logging.getLogger(__name__)

_MAX_WHY = 800
"""Characters that are told of why a rank has no state."""


class CheckpointManager(StepKeeper):
    """Keeps a rank's state through faults, and brings all ranks back to one step.

    It is made outside the block that is run again. In the block::

        loaded = manager.try_checkpointless_load(provider)   # None: start, or load a checkpoint
        manager.track(provider, replica_group=replicas)
        while provider.step < num_steps:
            manager.begin_step()
            ...                                # forward, backward, reduce the gradients
            manager.vote()                     # from here on the step counts
            with manager.updating():
                ...                            # update the shard and the objects
            ...                                # gather the weights
            manager.end_step()

    Between the vote and the end of the step nothing may draw a random number. What the
    documentation of HyperPod calls a trainer is a StateProvider here, or has one as its
    ``state_provider``.

    Args:
        enable_checksum: compare the copies of every part before any is used, and the state in
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
            self._kept = KeptState(provider, provider.step, Phase.RUNNING)
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
        """Move the kept state to the host, if that is enabled and the state may be let go of.

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
        if self.enable_checksum and damage_of(kept, self.checksum_manager):
            return
        if kept.phase is Phase.COMMITTED:
            try:
                self._finish_step()
            except RestartError as error:  # only its trainer could: the state is torn now
                logger.warning("step %d is not finished: %s", kept.step, error)
        kept = self._kept
        assert kept is not None  # noqa: S101 - finishing a step keeps it
        is_whole = kept.phase is not Phase.UPDATING
        host = host_copy(self._view(kept.provider), kept.step, holds_parts=is_whole)
        self._kept = KeptState(host, kept.step, kept.phase)
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
        comm = self._communicator(group)
        try:
            self._plan(comm, provider_of(trainer), with_digests=include_checksum_verification)
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
        not, what was kept is let go of; but where a peer was lost on the way nothing was decided,
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
            recovered = self._recover(comm, provider)
            run_collectively(comm, lambda: self._adopt(provider, recovered))
        except (PeerTimeoutError, PeerLostError):
            raise
        except BrokenGatherError as error:
            raise PeerLostError(None, str(error)) from error
        except CheckpointError as error:
            self._give_up(error)
            return None
        return {"global_step": recovered.report.step, **asdict(recovered.report)}

    def decline(self, why: str) -> None:
        """Let the kept state go, for a reason that all ranks see: a checkpoint is loaded instead.

        Rank-local, called on all ranks alike in place of ``try_checkpointless_load``.
        """
        self._is_filling = False
        self._give_up(RestartError(why))

    def on_attempt(self, _epoch: object) -> None:
        """An attempt begins; HPWrapper calls this in the block's thread."""
        self._is_run_again = True

    def _give_up(self, error: CheckpointError) -> None:
        """Let go of everything; raise where the state to be filled is neither new nor old now.

        On all ranks alike. Who would begin a new run with it would begin with weights of the old.
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

    def _plan(self, comm: Communicator, new: StateProvider, *, with_digests: bool) -> Any:
        parts: list[dict[str, FlatPart]] = []
        view = self._view(new)

        def describe() -> RankFacts:
            wanted, kept = flat_parts(view.parts()), self._flat_kept()
            recorded = self.checksum_manager if self.enable_checksum else None
            held, why = held_state(self._kept, kept, recorded, with_digests=with_digests)
            if held is None and self._let_go_for:
                why = f"has let its state go when {self._let_go_for[:_MAX_WHY]}"
            parts.extend([wanted, kept])
            return RankFacts(
                tuple(part.facts() for part in wanted.values()),
                tuple(sorted(view.gathered_parts())),
                held,
                why,
                tuple(sorted(self._random)),
            )

        return plan_recovery(comm, describe, parts)

    def _flat_kept(self) -> dict[str, FlatPart]:
        return {} if self._kept is None else flat_parts(self._view(self._kept.provider).parts())

    def _recover(self, comm: Communicator, new: StateProvider) -> Recovered:
        try:
            return self._carry_out(comm, new)
        except UnfinishedStepError as unfinished:
            # That rank's state is torn now, and known to be: the next plan has one rank less.
            logger.warning("%s; is there another copy?", unfinished)
            try:
                return self._recover(comm, new)
            except (PeerTimeoutError, PeerLostError):
                raise
            except CheckpointError as error:
                raise RestartError(f"{unfinished}; without it: {error}") from error

    def _carry_out(self, comm: Communicator, new: StateProvider) -> Recovered:
        self._is_filling = False
        plan = self._plan(comm, new, with_digests=False)
        kept = self._kept
        survivor = None
        if kept is not None:
            survivor = Survivor(self._view(kept.provider), self._finish_step)
        return run_recovery(
            comm,
            plan,
            survivor,
            self._view(new),
            dict(self._random),
            compares_copies=self.enable_checksum,
            on_filling=self._note_filling,
        )

    def _view(self, provider: StateProvider) -> StateProvider:
        """What of a state a recovery moves: here all of it."""
        return provider

    def _finish_step(self) -> None:
        """Update the kept state from its gradients; interrupted, it is torn, and known to be."""
        kept = self._kept
        assert kept is not None  # noqa: S101 - only called for a state that is kept
        with self.parameter_update_lock:
            self._kept = KeptState(kept.provider, kept.step, Phase.UPDATING)
            kept.provider.apply_update()
            self._kept = KeptState(kept.provider, kept.step, Phase.UPDATED)

    def _adopt(self, new: StateProvider, recovered: Recovered) -> None:
        report = recovered.report
        for rank, content in recovered.random_states.items():
            self._random[rank, report.step] = content
        self._forget_random_states(report.step)
        self._kept = KeptState(new, report.step, Phase.RUNNING)
        self._commit = None
        self._restores = True
        self.load_rng_states()
        self._record_checksums()
        self.last_report, self.last_failure = report, None
        logger.info("recovered from memory: %s", report)

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
