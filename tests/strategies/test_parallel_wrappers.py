"""Megatron-Core's fully parallel wrappers around our strategies, with groups of one size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)

from dist_ckpt_strategies.cli.demo.cpu_stand_ins import cpu_stand_ins
from dist_ckpt_strategies.strategies.zarr import (
    Format2LoadShardedStrategy,
    Format2SaveShardedStrategy,
    ZarrLoadShardedStrategy,
    ZarrSaveShardedStrategy,
)
from tests.support.entries import prepare
from tests.support.ranks import run_processes

pytestmark = pytest.mark.multiprocess

SIZE = 4
WHOLE = torch.arange(48, dtype=torch.float32).reshape(8, 6)
GROUPINGS = {
    "one group": [[0, 1, 2, 3]],
    "pairs": [[0, 1], [2, 3]],
    "singles": [[0], [1], [2], [3]],
}


def group_of(rank: int, grouping: list[list[int]]) -> tuple[Any, list[int]]:
    groups = [dist.new_group(ranks) for ranks in grouping]
    number = next(n for n, ranks in enumerate(grouping) if rank in ranks)
    return groups[number], grouping[number]


def state_of(rank: int, ranks: list[int], *, objects: bool, data: bool = True) -> dict[str, Any]:
    """One replicated array for each group, one array in rows over all ranks, and an object."""
    filled = WHOLE if data else torch.zeros_like(WHOLE)
    group, replica = ranks[0], ranks.index(rank)
    state: dict[str, Any] = {
        f"replicated {n}": ShardedTensor.from_rank_offsets(
            f"group {group}.{n}", filled * (n + 1), replica_id=replica
        )
        for n in range(5)
    }
    rows = filled[2 * rank : 2 * rank + 2].clone()
    state["rows"] = ShardedTensor.from_rank_offsets("rows", rows, (0, rank, SIZE))
    if objects:
        state["object"] = ShardedObject("object", {"rank": rank}, (SIZE,), (rank,))
    return state


FORMATS: dict[int, tuple[Any, Any]] = {
    1: (ZarrSaveShardedStrategy, ZarrLoadShardedStrategy),
    2: (Format2SaveShardedStrategy, Format2LoadShardedStrategy),
}


def save_and_load(
    rank: int, root: str, grouping: list[list[int]], objects: bool, version: int = 1
) -> list[str]:
    prepare(60)
    saving, loading = FORMATS[version]
    group, ranks = group_of(rank, grouping)
    saver = FullyParallelSaveStrategyWrapper(saving(), group)
    dist_checkpointing.save(state_of(rank, ranks, objects=objects), root, saver)
    loader = FullyParallelLoadStrategyWrapper(loading(), group)
    wanted = state_of(rank, ranks, objects=objects, data=False)
    with cpu_stand_ins():  # the wrapper moves what it exchanges to CUDA and synchronises it
        loaded = dist_checkpointing.load(wanted, root, loader)
    dist.barrier()
    right = state_of(rank, ranks, objects=objects)
    wrong = [k for k, v in right.items() if k != "object" and not torch.equal(loaded[k], v.data)]
    return wrong + ["object"] * (objects and loaded["object"] != {"rank": rank})


@pytest.mark.parametrize("objects", [False, True], ids=["tensors alone", "with objects"])
@pytest.mark.parametrize("grouping", list(GROUPINGS.values()), ids=list(GROUPINGS))
def test_the_wrappers_save_and_load_with_groups_of_one_size(
    grouping: list[list[int]],
    objects: bool,
    tmp_path: Path,
) -> None:
    found = run_processes(SIZE, save_and_load, str(tmp_path), grouping, objects)
    assert found == [[]] * SIZE


def test_the_wrappers_save_and_load_format_2(tmp_path: Path) -> None:
    arguments = (str(tmp_path), GROUPINGS["pairs"], True, 2)
    assert run_processes(SIZE, save_and_load, *arguments) == [[]] * SIZE


def load_damaged(rank: int, root: str, grouping: list[list[int]]) -> str:
    prepare(60)
    group, ranks = group_of(rank, grouping)
    dist_checkpointing.save(state_of(rank, ranks, objects=True), root, ZarrSaveShardedStrategy())
    if rank == 0:
        (Path(root) / "rows" / "2.0").unlink()
    dist.barrier()
    loader = FullyParallelLoadStrategyWrapper(ZarrLoadShardedStrategy(), group)
    wanted = state_of(rank, ranks, objects=True, data=False)
    try:
        with cpu_stand_ins():
            dist_checkpointing.load(wanted, root, loader)
    except dist_checkpointing.core.CheckpointingException as error:
        return str(error)
    return "loaded"


@pytest.mark.parametrize("grouping", list(GROUPINGS.values()), ids=list(GROUPINGS))
def test_a_missing_chunk_reaches_every_rank_through_the_wrapper(
    grouping: list[list[int]], tmp_path: Path
) -> None:
    texts = run_processes(SIZE, load_damaged, str(tmp_path), grouping)

    assert len(set(texts)) == 1, texts
    assert "rank" in texts[0]
    assert "rows" in texts[0]
    assert str(tmp_path / "rows" / "2.0") in texts[0]
