"""The state of the training as a global checkpoint takes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

from tests.support.sharded_training import ShardedTraining, shards_of, take

NUM_SHARDS = 2
SEED = 11
_OTHER_SEED = 99


def spoil(training: ShardedTraining) -> None:
    """Nothing of the state is left; what is not restored will be seen."""
    for tensor in (training.flat, training.master, *training.moments.values()):
        tensor.detach().fill_(-12345.0)
    training.set_step(-1)
    training.load_objects({"num_updates": -1})
    torch.manual_seed(_OTHER_SEED)


def to_global(training: ShardedTraining) -> dict[str, Any]:
    """What a global checkpoint holds; the tensors are filled in place by a load."""
    groups = training.groups
    replica = dist.get_rank() // groups.num_shards
    state: dict[str, Any] = {
        name: ShardedTensor.from_rank_offsets(
            f"optimizer.{name}", tensor, (0, groups.shard, groups.num_shards), replica_id=replica
        )
        for name, tensor in shards_of(training).items()
    }
    size, rank = dist.get_world_size(), dist.get_rank()
    state["random"] = ShardedObject("random", torch.get_rng_state(), (size,), (rank,))
    return state | {"step": training.step, "objects": dict(training.objects())}


def from_global(training: ShardedTraining, state: Mapping[str, Any]) -> None:
    """Take over what a load has brought. Collective: the replica."""
    take(training, int(state["step"]), state["objects"], state["random"].data)
