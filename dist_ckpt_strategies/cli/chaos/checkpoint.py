"""Checkpoints of the training on a disk that all ranks share, for when no memory has the state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

import dist_ckpt_strategies
from dist_ckpt_strategies.cli.chaos.training import ShardedTraining
from dist_ckpt_strategies.errors import CheckpointNotFoundError
from dist_ckpt_strategies.recovery.latest import load_latest

_FORMAT = ("zarr", 2)


def save(training: ShardedTraining, directory: Path) -> None:
    """Save the beginning of the present step. Collective: world."""
    path = directory / f"iter_{training.step:07d}"
    if dist.get_rank() == 0:
        path.mkdir(exist_ok=True)
    state = _state(training) | {"step": training.step, "objects": dict(training.objects())}
    dist_ckpt_strategies.save(state, str(path), _FORMAT, overwrite=True)


def load_newest(training: ShardedTraining, directory: Path) -> int | None:
    """Load the newest checkpoint that is whole; its step, None where there is none. Collective."""
    try:
        found = load_latest(
            None, [directory], lambda path: dist_ckpt_strategies.load(_state(training), str(path))
        )
    except CheckpointNotFoundError:
        return None
    training.load_objects(found.state["objects"])
    training.set_step(int(found.state["step"]))
    training.gather_weights()
    torch.set_rng_state(found.state["random"].data.clone())
    return training.step


def _state(training: ShardedTraining) -> dict[str, Any]:
    groups = training.groups
    replica = dist.get_rank() // groups.num_shards
    shards = {"master": training.master, **training.moments}
    state: dict[str, Any] = {
        name: ShardedTensor.from_rank_offsets(
            f"optimizer.{name}", tensor, (0, groups.shard, groups.num_shards), replica_id=replica
        )
        for name, tensor in shards.items()
    }
    size, rank = dist.get_world_size(), dist.get_rank()
    state["random"] = ShardedObject("random", torch.get_rng_state(), (size,), (rank,))
    return state
