"""What recovery asks of a training, under the names by which users import it."""

from __future__ import annotations

from typing import Any, Protocol, cast

from dist_ckpt_strategies.errors import StrategyError
from dist_ckpt_strategies.run.state_provider import StateProvider
from dist_ckpt_strategies.spec.phase import Phase

__all__ = ["HasStateProvider", "Phase", "StateProvider", "provider_of"]


class HasStateProvider(Protocol):
    """What stands for a StateProvider: a trainer that an integration has given one."""

    state_provider: StateProvider


def provider_of(trainer: StateProvider | HasStateProvider) -> StateProvider:
    """The StateProvider that a trainer has as ``state_provider``, or is.

    Raises:
        StrategyError: it is none, and has none.
    """
    found: Any = getattr(trainer, "state_provider", trainer)
    if not callable(getattr(found, "parts", None)):
        raise StrategyError(
            f"{type(trainer).__name__}: expected a StateProvider, or an object that has one as "
            "state_provider; CheckpointlessCallback and CheckpointlessCompatibleConnector give a "
            "trainer of Lightning one"
        )
    return cast("StateProvider", found)
