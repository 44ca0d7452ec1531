"""A training's state as it goes through its steps: how far it is, and which of them count."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from dist_ckpt_strategies.comm.process_group import ProcessGroup, global_rank
from dist_ckpt_strategies.comm.step_commit import StepCommit
from dist_ckpt_strategies.errors import RestartError
from dist_ckpt_strategies.recovery.plan import Phase
from dist_ckpt_strategies.recovery.provider import (
    HasStateProvider,
    InMemoryCheckpoint,
    MemoryChecksumManager,
    StateProvider,
    provider_of,
    require_movable,
)
from dist_ckpt_strategies.recovery.random_states import (
    RandomState,
    capture_random_states,
    decode_random_states,
    encode_random_states,
    restore_random_states,
)

_PAUSE_S = 0.001


class ParameterUpdateLock:
    """Held by the one thread that changes parameters.

    Waiting for it is done in slices, so that an exception that another thread or a signal raises
    arrives. Taking it is one operation of the interpreter: a signal handler that looks at
    ``held_by`` sees it either held or not, never in between.
    """

    def __init__(self) -> None:
        self._slot: dict[str, int] = {}

    def acquire(self, timeout_s: float | None = None) -> bool:
        """Take the lock; False if that was not possible within ``timeout_s``.

        Raises:
            RestartError: this thread has it already.
        """
        own = threading.get_ident()
        if self.held_by(own):
            raise RestartError("the parameter update lock is held by this thread already")
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while self._slot.setdefault("owner", own) != own:
            if deadline is not None and time.monotonic() >= deadline:
                return False
            time.sleep(_PAUSE_S)
        return True

    def release(self) -> None:
        """Give the lock back; only the thread that holds it can.

        Raises:
            RestartError: another thread holds it, or none.
        """
        owner = self._slot.get("owner")
        if owner != threading.get_ident():
            who = "by no thread" if owner is None else f"by thread {owner}"
            raise RestartError(
                f"thread {threading.get_ident()} gives the parameter update lock back: it is held "
                f"{who}"
            )
        self._slot.pop("owner")

    def held_by(self, thread_id: int) -> bool:
        """Whether the thread of that ``threading.get_ident()`` holds the lock."""
        return self._slot.get("owner") == thread_id

    def locked(self) -> bool:
        """Whether any thread holds the lock."""
        return bool(self._slot)

    def __enter__(self) -> Self:
        """Take the lock, however long that takes."""
        self.acquire()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Give it back."""
        self.release()


class StepKeeper:
    """Notes how far a state is within its step, with the random numbers of the step's beginning.

    What is noted at any moment says what a recovery may do with the state; CheckpointManager does
    it. See there for how a block calls these.

    Args:
        enable_checksum: take digests of the state at the beginning of each step.
        timeout_s: longest wait for a peer in each collective.
    """

    def __init__(self, *, enable_checksum: bool, timeout_s: float) -> None:
        self.enable_checksum = enable_checksum
        self.checksum_manager = MemoryChecksumManager()
        self.parameter_update_lock = ParameterUpdateLock()
        self._timeout_s = timeout_s
        self._kept: InMemoryCheckpoint | None = None
        self._random: dict[tuple[int, int], bytes] = {}  # of the last steps, by rank and step
        self._commit: StepCommit | None = None
        self._restores = False

    @property
    def global_step(self) -> int | None:
        """The step that the kept state is in; None where none is kept."""
        return None if self._kept is None else self._kept.step

    @property
    def phase(self) -> Phase | None:
        """How far the kept state is within its step; None where none is kept."""
        return None if self._kept is None else self._kept.phase

    @property
    def rng_states(self) -> list[RandomState] | None:
        """This rank's random states at the beginning of its step; None if they are not known."""
        content = self._random.get((global_rank(), self.global_step or 0))
        return None if content is None else list(decode_random_states(content))

    def track(
        self,
        provider: StateProvider | HasStateProvider,
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
        require_movable(found)
        self._kept = InMemoryCheckpoint(found, found.step, Phase.RUNNING)
        self._commit = StepCommit(group, replica_group, timeout_s=self._timeout_s)

    def begin_step(self) -> None:
        """Note that a step begins. In the first of an attempt, collective over the replicas.

        Raises:
            RestartError: nothing is tracked, or the step before has not ended.
        """
        kept, commit = self._tracked({Phase.RUNNING})
        if commit.is_new:
            self._begin_attempt(kept, commit)
        elif kept.step != kept.provider.step:
            raise RestartError(f"step {kept.provider.step} begins, expected {kept.step}")

    def vote(self) -> None:
        """Commit the step with all ranks, after the last change of a gradient; then it counts.

        Collective: two numbers among those that commit, the random states among the replicas. What
        needs other ranks for the update, such as the norm of the gradients, comes before.

        Raises:
            RestartError: some rank commits another step; on all ranks alike.
        """
        kept, commit = self._tracked({Phase.RUNNING})
        after = kept.step + 1
        content = encode_random_states(capture_random_states())
        self._random[global_rank(), after] = content
        self._kept = InMemoryCheckpoint(kept.provider, kept.step, Phase.GRADS_FINAL)
        self._replicate(commit, after, content)
        # A rank that has committed knows that all have reached this, and replicated theirs before.
        if not commit.should_commit(kept.step):
            raise RestartError(
                f"commit of step {kept.step}: some rank commits another one; all have to load the "
                "same checkpoint, and to begin with the same step"
            )
        self._kept = InMemoryCheckpoint(kept.provider, kept.step, Phase.COMMITTED)

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Hold the lock while the block changes this rank's shard and objects.

        Left by an exception, the state counts as inconsistent.
        """
        self.begin_update()
        try:
            yield
        except BaseException:  # an interruption is none of Exception
            self.abandon_update()
            raise
        self.end_update()

    def begin_update(self) -> None:
        """Take the lock: this rank's shard and objects change from here on.

        Where a block has no place for ``updating()``; ``end_update`` or ``abandon_update`` follows.
        """
        kept, _ = self._tracked({Phase.COMMITTED})
        self.parameter_update_lock.acquire()
        self._kept = InMemoryCheckpoint(kept.provider, kept.step, Phase.UPDATING)

    def end_update(self) -> None:
        """Give the lock back: this rank's shard and objects are those of the next step."""
        kept, _ = self._tracked({Phase.UPDATING})
        self._kept = InMemoryCheckpoint(kept.provider, kept.step, Phase.UPDATED)
        self.parameter_update_lock.release()

    def abandon_update(self) -> None:
        """Give the lock back if this thread holds it; a state amid its update is inconsistent."""
        if self.parameter_update_lock.held_by(threading.get_ident()):
            self.parameter_update_lock.release()

    def on_fault(self, _fault: object) -> None:
        """The block has been left; HPWrapper calls this in its thread."""
        self.abandon_update()

    def end_step(self) -> None:
        """Note that the step is over: the weights are gathered. Gives back a lock that is held."""
        kept, _ = self._tracked({Phase.UPDATED})
        self._kept = InMemoryCheckpoint(kept.provider, kept.step + 1, Phase.RUNNING)
        kept.provider.set_step(kept.step + 1)
        self._forget_random_states(kept.step + 1)
        self._record_checksums()
        self.abandon_update()

    def store_rng_states(self) -> None:
        """Take the random states of this process for those of its step's beginning."""
        content = encode_random_states(capture_random_states())
        self._random[global_rank(), self.global_step or 0] = content

    def load_rng_states(self) -> None:
        """Go back to the random states of the step's beginning.

        Raises:
            RestartError: they are not known.
        """
        states = self.rng_states
        if states is None:
            raise RestartError(f"no random states are known for step {self.global_step}")
        restore_random_states(states)

    def _tracked(self, phases: set[Phase]) -> tuple[InMemoryCheckpoint, StepCommit]:
        if self._kept is None or self._commit is None:
            raise RestartError("no state is tracked; call track(provider) first")
        if self._kept.phase not in phases:
            names = " or ".join(sorted(phase.name for phase in phases))
            raise RestartError(
                f"step {self._kept.step}: it is {self._kept.phase.name}, expected {names}"
            )
        return self._kept, self._commit

    def _begin_attempt(self, kept: InMemoryCheckpoint, commit: StepCommit) -> None:
        """The beginning of the first step: the one point that no earlier commit covers."""
        step = kept.provider.step
        self._kept = InMemoryCheckpoint(kept.provider, step, Phase.RUNNING)
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
        if self.enable_checksum and self._kept is not None and self._kept.phase is Phase.RUNNING:
            self.checksum_manager.record(self._kept.step, self._kept.provider.parts())
