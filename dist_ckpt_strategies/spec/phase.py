"""How far a rank is within a step of training."""

from __future__ import annotations

from enum import IntEnum


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
