"""What recovery asks of a training: its state by name, its step, and how an update is finished."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, cast

import torch

from dist_ckpt_strategies.errors import StrategyError
from dist_ckpt_strategies.recovery.plan import Phase
from dist_ckpt_strategies.recovery.shards import dump_objects, flat_shards

__all__ = ["HasStateProvider", "Phase", "StateProvider", "provider_of"]


class StateProvider(Protocol):
    """One rank's training state. Nothing here but ``gather_weights`` talks to other ranks.

    A *replicated shard* is a set of tensors; ranks that give one the same id hold equal copies of
    it. Two ranks need not have the same: the weights may be one of all ranks, a shard of the
    optimizer one of the two that hold it.
    """

    @property
    def step(self) -> int:
        """Steps that the state has seen; ``set_step`` changes it."""
        ...

    def set_step(self, step: int) -> None:
        """Take the state for that of ``step``."""
        ...

    def parts(self) -> Mapping[str, Mapping[str, torch.Tensor]]:
        """The live tensors, by shard id and name: recovery reads them, and writes into them.

        All of them are there from the beginning, an optimizer's moments too: a fresh rank can only
        receive what it has a place for.
        """
        ...

    def gathered_parts(self) -> frozenset[str]:
        """Ids of the shards of which ``gather_weights`` makes every tensor anew."""
        ...

    def objects(self) -> Mapping[str, Any]:
        """State that is no tensor: schedulers, counters, data position. A copy, to be pickled.

        Equal on all ranks that share a shard. It changes together with the tensors: in the update.
        """
        ...

    def load_objects(self, objects: Mapping[str, Any]) -> None:
        """Take over what ``objects`` gave on another rank, or here before."""
        ...

    def apply_update(self) -> None:
        """Update this rank's shard, and its objects, from its final gradients.

        Local: no peer is asked, and none of the groups of the attempt that ended is left. Called
        for a rank whose step counts and that was interrupted before its update. What needs the
        other ranks, the norm of the gradients for one, is done before the step is committed.
        """
        ...

    def gather_weights(self) -> None:
        """Make the weights anew from the shards. Collective over the ranks that share them.

        May be called again: equal shards give equal weights.
        """
        ...


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


def require_movable(provider: StateProvider) -> None:
    """Raise unless all of a state could be sent to another rank: at the start, not at the fault.

    Raises:
        PlanError: a tensor has no memory of its own, or an object cannot be pickled.
    """
    flat_shards(provider.parts())
    dump_objects(provider.objects())
