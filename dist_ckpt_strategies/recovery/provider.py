"""What recovery asks of a training: its state by name, its step, and how an update is finished."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Any, Protocol

import torch


class Phase(IntEnum):
    """How far a rank is within its step; the numbers grow as it goes on."""

    RUNNING = 0
    """Forward or backward: the state is that of the step's beginning."""

    GRADS_FINAL = 1
    """No gradient changes any more; the state is still that of the step's beginning."""

    COMMITTED = 2
    """The vote is over: the gradients of all ranks are final, so the step counts."""

    UPDATING = 3
    """Some tensors of the parts are new, others old."""

    UPDATED = 4
    """The shard is that of the next step; weights that others' shards make up may be old."""


class StateProvider(Protocol):
    """One rank's training state. Nothing here but ``gather_weights`` talks to other ranks.

    A *part* is a set of tensors; ranks that give a part the same id hold equal copies of it. Two
    ranks need not have the same parts: weights may be one part of all ranks, an optimizer's shard
    a part of the two that hold it.
    """

    @property
    def step(self) -> int:
        """Steps that the state has seen; ``set_step`` changes it."""
        ...

    def set_step(self, step: int) -> None:
        """Take the state for that of ``step``."""
        ...

    def parts(self) -> Mapping[str, Mapping[str, torch.Tensor]]:
        """The live tensors, by part id and name: recovery reads them, and writes into them."""
        ...

    def objects(self) -> Mapping[str, Any]:
        """State that is no tensor, as JSON types: schedulers, counters, data position.

        Equal on all ranks that share a part.
        """
        ...

    def load_objects(self, objects: Mapping[str, Any]) -> None:
        """Take over what ``objects`` gave on another rank, or here before."""
        ...

    def apply_update(self) -> None:
        """Update this rank's shard from its final gradients. Local: no peer is asked.

        Called for a rank whose step counts and that was interrupted before its update.
        """
        ...

    def gather_weights(self) -> None:
        """Make the weights anew from the shards. Collective over the ranks that share them.

        May be called again: equal shards give equal weights.
        """
        ...
