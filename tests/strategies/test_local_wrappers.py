"""Megatron-Core's fully parallel wrappers around local checkpoints, with groups of one size."""

from __future__ import annotations

import shutil
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)

from dist_ckpt_strategies import LocalOptions
from dist_ckpt_strategies.cli.demo.cpu_stand_ins import cpu_stand_ins
from dist_ckpt_strategies.errors import NoReplicasAvailableError
from dist_ckpt_strategies.strategies.local_replicated import (
    LocalReplicatedLoadShardedStrategy,
    LocalReplicatedSaveShardedStrategy,
)
from tests.strategies.test_parallel_wrappers import (
    GROUPINGS,
    SIZE,
    group_of,
    state_of,
)
from tests.support.entries import prepare
from tests.support.ranks import run_processes

pytestmark = pytest.mark.multiprocess


def local_options(root: Path, algo: str) -> LocalOptions:
    """Two ranks to a node."""
    return LocalOptions(
        replication_jump=2,
        algo=algo,
        node_directory=lambda rank: root / f"node{rank // 2}",
    )


def saved(rank: int, directory: Path, local: LocalOptions, grouping: list[list[int]]) -> Any:
    """Save through the wrapper; the group, and the ranks in it."""
    prepare(60)
    group, ranks = group_of(rank, grouping)
    directory.mkdir(exist_ok=True)
    dist.barrier()
    saver = FullyParallelSaveStrategyWrapper(LocalReplicatedSaveShardedStrategy(local=local), group)
    dist_checkpointing.save(state_of(rank, ranks, objects=True), str(directory), saver)
    return group, ranks


def loaded(
    rank: int, directory: Path, local: LocalOptions, group: Any, ranks: list[int], **what: Any
) -> Any:
    """Load through the wrapper, into memory of the caller's."""
    loader = FullyParallelLoadStrategyWrapper(
        LocalReplicatedLoadShardedStrategy(local=local), group
    )
    wanted = state_of(rank, ranks, data=False, **what)
    with cpu_stand_ins():  # the wrapper moves what it exchanges to CUDA and synchronises it
        return dist_checkpointing.load(wanted, str(directory), loader)


def save_and_load(rank: int, root: str, grouping: list[list[int]]) -> list[str]:
    """The names of what differs; a node is lost between save and load."""
    wrong = []
    for algo, objects in product(("atomic", "fully_parallel"), (True, False)):
        local = local_options(Path(root), algo)
        directory = Path(root) / f"{algo} {objects} 4"
        group, ranks = saved(rank, directory, local, grouping)
        dist.barrier()
        if rank == 0:
            shutil.rmtree(Path(root) / "node1", ignore_errors=True)
        dist.barrier()
        found = loaded(rank, directory, local, group, ranks, objects=objects)
        right = state_of(rank, ranks, objects=objects)
        if objects and found["object"] != right.pop("object").data:
            wrong.append(f"{algo}: object")
        wrong += [
            f"{algo}: {key}"
            for key, value in right.items()
            if not torch.equal(found[key], value.data)
        ]
    return wrong


@pytest.mark.parametrize("grouping", list(GROUPINGS.values()), ids=list(GROUPINGS))
def test_the_wrappers_save_and_load_local_checkpoints_with_groups_of_one_size(
    grouping: list[list[int]], tmp_path: Path
) -> None:
    found = run_processes(SIZE, save_and_load, str(tmp_path), grouping)

    assert found == [[]] * SIZE


def lose_everything(rank: int, root: str, grouping: list[list[int]]) -> str:
    """All copies of rank 1's part are lost."""
    local = local_options(Path(root), "atomic")
    directory = Path(root) / "iter_0000004"
    group, ranks = saved(rank, directory, local, grouping)
    dist.barrier()
    if rank == 0:
        for part in Path(root).glob("node*/iter_0000004/*/iter_*_1_local_*"):
            part.unlink()
    dist.barrier()
    with pytest.raises(NoReplicasAvailableError) as caught:
        loaded(rank, directory, local, group, ranks, objects=True)
    return str(caught.value)


def test_a_part_without_a_copy_is_an_error_on_every_rank_through_the_wrapper(
    tmp_path: Path,
) -> None:
    grouping = GROUPINGS["pairs"]

    for message in run_processes(SIZE, lose_everything, str(tmp_path), grouping):
        assert "nobody has the parts of ranks 1" in message
