"""What recovery asks of a training: its state by name, its step, and how an update is finished."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import torch


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
        """The live tensors, by part id and name: recovery reads them, and writes into them.

        All of them are there from the beginning, an optimizer's moments too: what a fresh rank
        has not, it cannot receive.
        """
        ...

    def gathered_parts(self) -> frozenset[str]:
        """Ids of the parts of which ``gather_weights`` makes every tensor anew."""
        ...

    def objects(self) -> Mapping[str, Any]:
        """State that is no tensor, as JSON types: schedulers, counters, data position.

        Equal on all ranks that share a part. It changes together with the tensors: in the update.
        """
        ...

    def load_objects(self, objects: Mapping[str, Any]) -> None:
        """Take over what ``objects`` gave on another rank, or here before."""
        ...

    def apply_update(self) -> None:
        """Update this rank's shard, and its objects, from its final gradients.

        Local: no peer is asked, and none of the groups of the attempt that ended is left. Called
        for a rank whose step counts and that was interrupted before its update. What needs the
        other ranks, the norm of the gradients for one, is done before the vote.
        """
        ...

    def gather_weights(self) -> None:
        """Make the weights anew from the shards. Collective over the ranks that share them.

        May be called again: equal shards give equal weights.
        """
        ...


@runtime_checkable
class HasLateObjects(Protocol):
    """A StateProvider whose objects change after its tensors, so that it may have these alone."""

    def why_no_objects(self) -> str:
        """Why the objects of the step after this one cannot be told; empty where they can.

        Asked for a step that may count already. Those of another rank are taken then.
        """
        ...
