"""Megatron-Core's fully parallel wrappers around our strategies, with groups of one size."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedObject
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)

from dist_ckpt_strategies import LocalOptions
from dist_ckpt_strategies.cli.demo.cpu_stand_ins import cpu_stand_ins
from dist_ckpt_strategies.strategies.local_replicated import (
    LocalReplicatedLoadShardedStrategy,
    LocalReplicatedSaveShardedStrategy,
)
from dist_ckpt_strategies.strategies.zarr import (
    Format2LoadShardedStrategy,
    Format2SaveShardedStrategy,
    ZarrLoadShardedStrategy,
    ZarrSaveShardedStrategy,
)
from tests.support.entries import Entry, load, require_on_ranks, save
from tests.support.sharding import (
    Cut,
    at_random,
    differences,
    no_data,
    on_grid,
    part_of,
    replicated,
    state_of,
    zeros,
)

pytestmark = pytest.mark.multiprocess

SIZE = 4


def strategies(scratch: Path) -> dict[str, tuple[Any, Any]]:
    """What saves and what loads; local checkpoints with two ranks to a node."""
    found: dict[str, tuple[Any, Any]] = {
        "zarr 1": (ZarrSaveShardedStrategy(), ZarrLoadShardedStrategy()),
        "zarr 2": (Format2SaveShardedStrategy(), Format2LoadShardedStrategy()),
    }
    for algo in ("atomic", "fully_parallel"):
        local = LocalOptions(
            replication_jump=2, algo=algo, node_directory=lambda rank: scratch / f"node{rank // 2}"
        )
        saver = LocalReplicatedSaveShardedStrategy(local=local)
        found[f"local {algo}"] = saver, LocalReplicatedLoadShardedStrategy(local=local)
    return found


def cuts() -> list[Cut]:
    """Arrays that all ranks want, that some want, and that one wants; regular and not."""
    dtypes = (torch.float32, torch.bfloat16, torch.bool, torch.int64)
    return [
        *(on_grid(f"all.{d}", (8, 4), (2, 1), dtype=d, num_replicas=4) for d in dtypes),
        on_grid("layers", (4, 6), (4, 1), num_replicas=2, num_prepended=1),
        on_grid("own", (4, 3), (4, 1)),
        replicated(at_random("regions", (12, 9), 5)),
    ]


def full_state(rank: int, data: Any) -> dict[str, Any]:
    """Arrays as ``data`` fills them, an object that all hold alike, and one of each rank."""
    own, everyones = ({"rank": rank}, {"x": 1}) if data is part_of else (None, None)
    return {
        "tensors": state_of(rank, cuts(), data),
        "own": ShardedObject("o.own", own, (SIZE,), (rank,)),
        "all": ShardedObject("o.all", everyones, (1,), (0,), replica_id=rank),
    }


def save_and_load(rank: int, entry: Entry, size: int, scratch: Path) -> None:
    """Over all strategies; a node is lost before the load."""
    group = dist.new_subgroups(size)[0]
    for kind, (saver, loader) in strategies(scratch).items():
        root, state = scratch / kind, full_state(rank, part_of)
        wrapper = FullyParallelSaveStrategyWrapper(saver, group)
        save(entry, state, root, sharded_strategy=wrapper, validate_access_integrity=False)
        dist.barrier()
        if rank == 0:
            shutil.rmtree(scratch / "node1", ignore_errors=True)
        dist.barrier()
        for target in (zeros, no_data):
            wrapped = FullyParallelLoadStrategyWrapper(loader, group, do_cache_distribution=True)
            with cpu_stand_ins():  # the wrapper moves what it exchanges to CUDA
                loaded = load(entry, full_state(rank, target), root, sharded_strategy=wrapped)
            assert differences(rank, cuts(), loaded["tensors"]) == [], (kind, target)
            assert (loaded["own"], loaded["all"]) == ({"rank": rank}, {"x": 1}), (kind, target)


@pytest.mark.parametrize("entry", list(Entry))
@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_wrappers_save_and_load_with_groups_of_one_size(
    entry: Entry, size: int, tmp_path: Path
) -> None:
    require_on_ranks(SIZE, save_and_load, entry, size, tmp_path)
