"""Four gloo ranks, two replicas of two shards: a rank loses its state, at every point of a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from dist_ckpt_strategies.recovery import CheckpointManager
from tests.support.ranks import run_processes
from tests.support.sharded_training import Groups, ShardedTraining, make_groups, state_digest

NUM_STEPS = 4
FAULT_STEP = 2


class FaultError(Exception):
    """All ranks stop here, each at its own point."""


@dataclass(frozen=True, slots=True)
class Scene:
    """What happens in one run.

    Attributes:
        lost: ranks that have no state afterwards, as after a restart of the process.
        points: of each rank, where the fault finds it.
        reuses: whether the tensors of the attempt before are used again.
    """

    lost: tuple[int, ...]
    points: tuple[str, ...]
    reuses: bool = False


def train(manager: CheckpointManager, training: ShardedTraining, stop: str | None) -> list[float]:
    """Train to the end, or to a point of the step of the fault; losses by step."""
    losses: list[float] = []

    def reached(point: str) -> None:
        if training.step == FAULT_STEP and point == stop:
            raise FaultError(point)

    while training.step < NUM_STEPS:
        manager.begin_step()
        losses.append(training.forward_backward())
        reached("forward")
        training.reduce_gradients()
        if training.step == FAULT_STEP and stop == "reduced":
            manager_at_final_gradients(manager)
        manager.vote()
        reached("voted")
        with manager.updating():
            if training.step == FAULT_STEP and stop == "updating":
                training.moments["first"].zero_()
                raise FaultError("updating")
            training.apply_update()
        reached("updated")
        training.gather_weights()
        reached("gathered")
        manager.end_step()
        if stop == "ended" and training.step == FAULT_STEP + 1:
            raise FaultError("ended")
    return losses


def manager_at_final_gradients(manager: CheckpointManager) -> None:
    """In the vote, but not out of it: the others may be."""
    manager.vote()
    kept = manager._in_memory
    assert kept is not None
    manager._in_memory = type(kept)(kept.provider, kept.step, type(kept.phase).GRADS_FINAL)
    raise FaultError("reduced")


SCENES = {
    "forward": Scene((3,), ("forward",) * 4),
    "gradients reduced, no rank voted": Scene((0,), ("forward",) * 4, reuses=True),
    "one has voted": Scene((0,), ("reduced", "voted", "reduced", "reduced")),
    "voted": Scene((0,), ("voted",) * 4),
    "one shard is updating": Scene((3,), ("updating", "voted", "voted", "updating")),
    "updating and reused": Scene((3,), ("updating", "voted", "voted", "updating"), reuses=True),
    "all phases after the vote": Scene((3,), ("gathered", "gathered", "updated", "updating")),
    "updated": Scene((0,), ("updated",) * 4, reuses=True),
    "gathered": Scene((3,), ("gathered",) * 4),
    "one is in the next step": Scene((1,), ("ended", "gathered", "reduced", "updated")),
    "a replica is lost": Scene((0, 1), ("voted",) * 4),
}
"""Ranks 0 and 1 are a replica: its gather is reached by both or by none."""


def run_scenes(rank: int) -> dict[str, Any]:
    """Body of a rank: without a fault, and every scene."""
    groups = make_groups(2)
    return {name: run_scene(rank, groups, scene) for name, scene in [("", None), *SCENES.items()]}


def run_scene(rank: int, groups: Groups, scene: Scene | None) -> dict[str, Any]:
    manager = CheckpointManager(timeout_s=60)
    torch.manual_seed(rank)
    training = ShardedTraining(groups)
    assert manager.try_checkpointless_load(training) is None
    manager.track(training, replica_group=groups.twins)
    loaded = None
    if scene is not None:
        with pytest.raises(FaultError):
            train(manager, training, scene.points[rank])
        if rank in scene.lost:
            manager = CheckpointManager(timeout_s=60)
        if rank in scene.lost or not scene.reuses:
            training = ShardedTraining(groups, seed=99)
        torch.rand(rank + 1)
        loaded = manager.try_checkpointless_load(training)
        assert loaded is not None, manager.last_failure
        torch.rand(5)
        manager.track(training, replica_group=groups.twins)
    losses = train(manager, training, None)
    return {"losses": losses, "state": state_digest(training), "loaded": loaded}


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    of_ranks: list[Any] = run_processes(4, run_scenes)
    assert all(isinstance(one, dict) for one in of_ranks), of_ranks
    return of_ranks


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", SCENES)
def test_training_goes_on_as_if_nothing_had_happened(
    name: str, found: list[dict[str, Any]]
) -> None:
    first_step = found[0][name]["loaded"]["global_step"]
    for of_rank in found:
        assert of_rank[name]["loaded"]["global_step"] == first_step
        assert of_rank[name]["losses"] == of_rank[""]["losses"][first_step:]
        assert of_rank[name]["state"] == of_rank[""]["state"]
