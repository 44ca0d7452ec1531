"""Jobs with a manager of all tiers, in buckets and in a directory."""

import os
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedTensor

from dist_ckpt_strategies import ManagerOptions, SavePolicy, TieredCheckpointManager
from dist_ckpt_strategies.errors import CheckpointChangedError, StorageError
from dist_ckpt_strategies.local import LocalCheckpointManager
from tests.stores.commands import ONE_SERVER
from tests.support.folders import Folder
from tests.support.object_stores import ObjectStore
from tests.support.processes import until
from tests.support.ranks import run_processes

POLICY = SavePolicy(every_steps=2, keep_last=2)
OPTIONS = ManagerOptions(timeout_s=60.0, lease_s=8.0)


def trains(
    rank: int, variables: Mapping[str, str], root: str, num_steps: int, at_most: int | None = None
) -> tuple[int, float]:
    """Body of a rank: go on from the newest checkpoint; where from, and the value at the end."""
    os.environ.update(variables)
    data = torch.zeros(4, 4)
    state = {"w": ShardedTensor.from_rank_offsets("w", data, (0, rank, dist.get_world_size()))}
    with TieredCheckpointManager(root, policy=POLICY, options=OPTIONS) as manager:
        loaded = manager.load_latest(state, at_most=at_most)
        first = loaded.iteration if loaded else 0
        for step in range(first, num_steps):
            data += 1
            manager.save(step + 1, state)
    return first, float(data.sum())


@ONE_SERVER
def test_a_job_continues_from_a_bucket_and_old_checkpoints_are_removed(
    environment: ObjectStore, in_bucket: Folder
) -> None:
    root = in_bucket.address
    first = run_processes(2, trains, environment.variables, root, 7)
    second = run_processes(2, trains, environment.variables, root, 10)

    assert first == [(0, 7 * 16.0)] * 2
    assert second == [(6, 10 * 16.0)] * 2
    assert TieredCheckpointManager(root).all_steps() == [8, 10]
    assert run_processes(2, trains, environment.variables, root, 9, 8)[0][0] == 8  # saves nothing
    assert run_processes(2, trains, environment.variables, root, 10)[0][0] == 10
    in_bucket.put("latest_checkpointed_iteration.txt", b"8")  # as another program that went back
    assert run_processes(2, trains, environment.variables, root, 9)[0][0] == 8
    assert not [name for name in in_bucket.names() if "lock" in name]


def keeps_local_checkpoints(rank: int, variables: Mapping[str, str], root: str, node: str) -> None:
    """Body of a rank: jobs of two roots with one local directory."""
    os.environ.update(variables)
    where = (0, rank, dist.get_world_size())
    state = {"w": ShardedTensor.from_rank_offsets("w", torch.zeros(4), where)}
    policy = SavePolicy(local_every_steps=1)
    for name, refused in (("one", None), ("other", StorageError), ("one", None)):
        local = LocalCheckpointManager(node)
        address = f"{root}/{name}"
        with TieredCheckpointManager(
            address, local=local, policy=policy, options=OPTIONS
        ) as manager:
            if refused is not None:
                with pytest.raises(refused, match="is of training"):
                    manager.load_latest(state)
                continue
            loaded = manager.load_latest(state)
            assert manager.save(loaded.iteration + 1 if loaded else 1, state)
    assert loaded is not None
    assert (loaded.tier, loaded.iteration) == ("local", 1)


@ONE_SERVER
def test_local_checkpoints_belong_to_the_job_of_a_bucket(
    environment: ObjectStore, in_bucket: Folder, tmp_path: Path
) -> None:
    arguments = environment.variables, in_bucket.address, str(tmp_path / "node")
    assert run_processes(2, keeps_local_checkpoints, *arguments) == [None] * 2


def begins(rank: int, variables: Mapping[str, str], root: str, rendezvous: str) -> str:
    """Body of a process: a job of its own, which begins in the moment in which others do."""
    os.environ.update(variables)
    manager = TieredCheckpointManager(root, options=OPTIONS)
    Path(rendezvous, f"ready{rank}").touch()
    until(lambda: len(list(Path(rendezvous).glob("ready*"))) == 4)
    try:
        with manager:
            until(lambda: len(list(Path(rendezvous).glob("refused*"))) == 3, 60.0)
    except CheckpointChangedError as error:
        Path(rendezvous, f"refused{rank}").touch()
        return str(error)
    return ""


def test_one_of_four_jobs_that_start_together_runs(place: Folder, tmp_path: Path) -> None:
    rendezvous = tmp_path / "rendezvous"
    rendezvous.mkdir()
    args = ({**os.environ}, place.address, str(rendezvous))
    found = run_processes(4, begins, *args, makes_group=False)
    refused = list(filter(None, found))

    assert len(refused) == 3, found
    said = f"{place.address}: another job saves here: process "
    assert all(said in text for text in refused), refused


def test_a_lock_that_is_not_renewed_expires_by_the_clock_of_the_next_job(in_bucket: Folder) -> None:
    holder = b'{"id": "a", "process": "", "pid": 5, "host": "node9", "lease_s": 1.5, "beat": 4}'
    in_bucket.put(".dist-ckpt-lock-00000007", holder)
    began = time.monotonic()
    with TieredCheckpointManager(in_bucket.address, options=replace(OPTIONS, lease_s=20.0)):
        waited_s = time.monotonic() - began
        names = in_bucket.names()

    assert waited_s >= 1.5
    assert names == [".dist-ckpt-lock-00000008"]
