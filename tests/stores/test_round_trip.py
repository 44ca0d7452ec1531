"""Checkpoints in object stores: whatever is saved comes back bit for bit in any layout."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedObject
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelSaveStrategyWrapper,
)

import dist_ckpt_strategies
from dist_ckpt_strategies.strategies.two_stage import TwoStageDataParallelLoadShardedStrategy
from dist_ckpt_strategies.strategies.zarr import Format2SaveShardedStrategy
from tests.support.layouts import (
    irregular,
    irregular_otherwise,
    random_layouts,
    scattered,
    scattered_otherwise,
)
from tests.support.object_stores import ObjectStore
from tests.support.ranks import run_processes
from tests.support.sharding import ALL_DTYPES, Cut, differences, no_data, on_grid, state_of, zeros

pytestmark = pytest.mark.multiprocess

SIZE = 4
FORMAT2 = ("zarr", 2)


def dtypes(grid: tuple[int, ...]) -> list[Cut]:
    """Every third; which go byte for byte does not depend on where they go."""
    return [on_grid(f"x.{d}", (12, 8), grid, dtype=d) for d in ALL_DTYPES[::3]]


def odd_keys(grid: tuple[int, ...]) -> list[Cut]:
    keys = ["a/b", ".hidden", "..", "manifest", "k" * 300, "metadata.json", "ключ", "a b+c&d=%41"]
    return [on_grid(key, (8, 4), grid) for key in keys]


def layouts() -> list[tuple[str, list[Cut], list[Cut]]]:
    """Name, what is saved, and what is loaded."""
    found = [
        ("dtypes", dtypes((2, 4)), dtypes((4, 1))),
        ("odd keys", odd_keys((4, 1)), odd_keys((1, 4))),
        ("scattered", scattered(), scattered_otherwise()),
        ("irregular", irregular(), irregular_otherwise()),
    ]
    return found + [(f"random {seed}", *random_layouts(seed)) for seed in range(2)]


def savers() -> list[Any]:
    return [
        FORMAT2,
        Format2SaveShardedStrategy(),
        FullyParallelSaveStrategyWrapper(Format2SaveShardedStrategy()),
    ]


def save_and_load_all(rank: int, variables: dict[str, str], url: str) -> list[str]:
    os.environ.update(variables)
    wrong = []
    two_stage = TwoStageDataParallelLoadShardedStrategy(dist.group.WORLD)
    for number, (name, saved, wanted) in enumerate(layouts()):
        place = f"{url}/run {number}/iter_1"
        objects = {"o": ShardedObject("o", {"t": torch.arange(3) + rank}, (SIZE,), (rank,))}
        state = state_of(rank, saved) | objects | {"iteration": number}
        saver = savers()[number % 3]
        if number % 4 == 3:
            dist_ckpt_strategies.save_async(state, place, saver).wait(60)
        else:
            dist_ckpt_strategies.save(state, place, saver)
        for how in ({}, {"sharded_strategy": two_stage}):
            target = (zeros, no_data)[number % 2]
            asked = {"o": ShardedObject("o", None, (SIZE,), ((rank + 1) % SIZE,))}
            loaded: Any = dist_ckpt_strategies.load(
                state_of(rank, wanted, target) | asked, place, **how
            )
            wrong += [f"{name} {how}: {key}" for key in differences(rank, wanted, loaded)]
            if loaded["iteration"] != number or loaded["o"]["t"][0] != (rank + 1) % SIZE:
                wrong.append(f"{name} {how}: {loaded['iteration']}, {loaded['o']}")
    return wrong


def test_every_layout_and_dtype_comes_back_in_another(store: ObjectStore, bucket: str) -> None:
    variables = store.variables
    results = run_processes(
        SIZE, save_and_load_all, variables, f"s3://{bucket}/deep", timeout_s=150
    )
    assert results == [[]] * SIZE
