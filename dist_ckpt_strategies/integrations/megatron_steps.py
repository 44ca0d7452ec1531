"""A vote within Megatron-Core's ``optimizer.step``, for those who only call it as a whole."""

from __future__ import annotations

from typing import Any, Protocol

from dist_ckpt_strategies.recovery import CheckpointManager


class StepInParts(Protocol):
    """Megatron-Core's step in parts, before the loops around it count it."""

    def finish_gradients(self) -> bool:
        """Make the gradients final; whether they are finite. Collective."""
        ...

    def update_shard(self) -> None:
        """Update this rank's shard. Local."""
        ...

    def gather_weights(self) -> None:
        """Make the weights anew. Collective."""
        ...

    def begin_ending(self) -> None:
        """The loops change from here on."""
        ...


def guard_optimizer(optimizer: Any, provider: StepInParts, manager: CheckpointManager) -> None:
    """Put a step in the place of ``optimizer.step`` that has a vote and the lock in it.

    The lock is taken again at its end, until that of Lightning's step: its loops change there.

    It returns what Megatron-Core's own does: whether the update was made, the norm of the
    gradients and the number of zeros in them; the last two are None here.
    """

    def step() -> tuple[bool, None, None]:
        applies = provider.finish_gradients()
        manager.vote()
        with manager.updating():
            provider.update_shard()
        provider.gather_weights()
        manager.hold_until_end()
        provider.begin_ending()
        return applies, None, None

    optimizer.step = step
