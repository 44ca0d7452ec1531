"""A vote within Megatron-Core's ``optimizer.step``, for those who only call it as a whole."""

from __future__ import annotations

from typing import Any

from dist_ckpt_strategies.recovery import CheckpointManager
from dist_ckpt_strategies.recovery.megatron_provider import MegatronStateProvider


def guard_optimizer(
    optimizer: Any, provider: MegatronStateProvider, manager: CheckpointManager
) -> None:
    """Put a step in the place of ``optimizer.step`` that has a vote and the lock in it.

    It returns what Megatron-Core's own does: whether the update was made, the norm of the
    gradients and the number of zeros in them; the last two are None here.
    """

    def step() -> tuple[bool, None, None]:
        applies = provider.finish_gradients()
        manager.vote()
        with manager.updating():
            provider.apply_update()
        provider.gather_weights()
        return applies, None, None

    optimizer.step = step
