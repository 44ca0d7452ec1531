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
from tests.support.entries import Entry, load, prepare, save
from tests.support.groups import group_of_size
from tests.support.ranks import run_processes
from tests.support.sharding import (
    Cut,
    at_random,
    differences,
    no_data,
    on_grid,
    replicated,
    state_of,
    zeros,
)

pytestmark = pytest.mark.multiprocess

both_entries = pytest.mark.parametrize("entry", list(Entry))
sizes = pytest.mark.parametrize("size", [1, 2, 4])

SIZE = 4
ALGORITHMS = ("broadcast", "gather_object", "gather_rounds")
KINDS = ("zarr 1", "zarr 2", "local atomic", "local fully_parallel")


def strategies(kind: str, scratch: Path) -> tuple[Any, Any]:
    """What saves and what loads; local checkpoints with two ranks to a node."""
    backend, _, how = kind.partition(" ")
    if backend == "zarr" and how == "1":
        return ZarrSaveShardedStrategy(), ZarrLoadShardedStrategy()
    if backend == "zarr":
        return Format2SaveShardedStrategy(), Format2LoadShardedStrategy()
    local = LocalOptions(
        replication_jump=2,
        algo=how,
        node_directory=lambda rank: scratch / f"node{rank // 2}",
    )
    return (
        LocalReplicatedSaveShardedStrategy(local=local),
        LocalReplicatedLoadShardedStrategy(local=local),
    )


def cuts(algorithm: str = "broadcast") -> list[Cut]:
    """Arrays that all ranks want, that some want, and that one wants; regular and not.

    gather_rounds gathers tensors of several sizes at once, which NCCL does and gloo does not: for
    it, as many arrays of one size as four ranks can share evenly.
    """
    if algorithm == "gather_rounds":
        return [on_grid(f"all.{n}", (8, 4), (1, 1), num_replicas=4) for n in range(12)]
    dtypes = (torch.float32, torch.bfloat16, torch.bool, torch.int64)
    return [
        *(on_grid(f"all.{d}", (8, 4), (2, 1), dtype=d, num_replicas=4) for d in dtypes),
        on_grid("layers", (4, 6), (4, 1), num_replicas=2, num_prepended=1),
        on_grid("own", (4, 3), (4, 1)),
        replicated(at_random("boxes", (12, 9), 5)),
    ]


def objects(rank: int, *, has_data: bool) -> dict[str, Any]:
    """An object that all hold alike, and one for each rank."""
    return {
        "own": ShardedObject("o.own", {"rank": rank} if has_data else None, (4,), (rank,)),
        "all": ShardedObject("o.all", {"x": 1} if has_data else None, (1,), (0,), replica_id=rank),
    }


def full_state(rank: int, arrays: list[Cut], data: Any = None) -> dict[str, Any]:
    """Arrays and objects: with their content, or what a load asks for with ``data``."""
    tensors = state_of(rank, arrays, data) if data else state_of(rank, arrays)
    return {"tensors": tensors, "objects": objects(rank, has_data=data is None)}


def load_wrapped(
    entry: Entry, wanted: dict[str, Any], root: Path, loader: Any, group: Any, **options: Any
) -> Any:
    wrapped = FullyParallelLoadStrategyWrapper(loader, group, **options)
    with cpu_stand_ins():  # the wrapper moves what it exchanges to CUDA and synchronises it
        return load(entry, wanted, root, sharded_strategy=wrapped)


def save_and_load(rank: int, entry: Entry, size: int, scratch: Path) -> list[str]:
    """What differs, over all strategies and ways to exchange; a node is lost before the load."""
    prepare(60)
    group, wrong = group_of_size(size), []
    for kind in KINDS:
        saver, loader = strategies(kind, scratch)
        for algorithm in ALGORITHMS if kind == "zarr 1" and size == SIZE else ALGORITHMS[:1]:
            arrays, root = cuts(algorithm), scratch / f"{kind} {algorithm} 4"
            if rank == 0:
                root.mkdir()
            dist.barrier()
            state = full_state(rank, arrays)
            wrapper = FullyParallelSaveStrategyWrapper(saver, group)
            save(entry, state, root, sharded_strategy=wrapper, validate_access_integrity=False)
            dist.barrier()
            if rank == 0:
                shutil.rmtree(scratch / "node1", ignore_errors=True)
            dist.barrier()
            for target in (zeros, no_data):
                wanted = full_state(rank, arrays, target)
                way = {"do_cache_distribution": True, "exchange_algo": algorithm}
                loaded = load_wrapped(entry, wanted, root, loader, group, **way)
                found = differences(rank, arrays, loaded["tensors"])
                if loaded["objects"] != {"own": {"rank": rank}, "all": {"x": 1}}:
                    found.append("objects")
                wrong += [f"{root.name} {target.__name__}: {key}" for key in found]
    return wrong


@both_entries
@sizes
def test_the_wrappers_save_and_load_with_groups_of_one_size(
    entry: Entry, size: int, tmp_path: Path
) -> None:
    assert run_processes(SIZE, save_and_load, entry, size, tmp_path) == [[]] * SIZE
