"""The state of the training as the two tiers take it, and what every bit of it comes to."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

from dist_ckpt_strategies.local import BasicTensorAwareStateDict
from tests.support.sharded_training import ShardedTraining

NUM_SHARDS = 2
SEED = 11
_OTHER_SEED = 99


def step_once(training: ShardedTraining) -> None:
    """One step of training. Collective: world."""
    training.forward_backward()
    training.reduce_gradients()
    training.apply_update()
    training.gather_weights()
    training.set_step(training.step + 1)


def state_digest(training: ShardedTraining) -> str:
    """Of all tensors, of the objects, and of the state of the random numbers."""
    found = hashlib.sha256(f"{training.step} {training.objects()}".encode())
    tensors = [training.flat, training.master, *training.moments.values(), torch.get_rng_state()]
    for tensor in tensors:
        found.update(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:24]


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
        for name, tensor in _shards(training).items()
    }
    size, rank = dist.get_world_size(), dist.get_rank()
    state["random"] = ShardedObject("random", torch.get_rng_state(), (size,), (rank,))
    return state | {"step": training.step, "objects": dict(training.objects())}


def from_global(training: ShardedTraining, state: Mapping[str, Any]) -> None:
    """Take over what a load has brought. Collective: the replica."""
    _take(training, int(state["step"]), state["objects"], state["random"].data)


def to_local(training: ShardedTraining) -> BasicTensorAwareStateDict:
    """What a local checkpoint holds."""
    return BasicTensorAwareStateDict(
        {
            **_shards(training),
            "random": torch.get_rng_state(),
            "step": training.step,
            "objects": dict(training.objects()),
        }
    )


def from_local(training: ShardedTraining, state: BasicTensorAwareStateDict) -> None:
    """Take over what a load has brought. Collective: the replica."""
    found = state.state_dict
    for name, tensor in _shards(training).items():
        tensor.copy_(found[name])
    _take(training, int(found["step"]), found["objects"], found["random"])


def _shards(training: ShardedTraining) -> dict[str, torch.Tensor]:
    return {"master": training.master, **training.moments}


def _take(
    training: ShardedTraining, step: int, objects: Mapping[str, Any], random: torch.Tensor
) -> None:
    training.load_objects(objects)
    training.set_step(step)
    training.gather_weights()
    torch.set_rng_state(random.clone())
