"""Checkpoints in object stores: whatever is saved comes back bit for bit in any layout."""

import os
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedObject
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelSaveStrategyWrapper,
)

import dist_ckpt_strategies
from dist_ckpt_strategies.strategies.safetensors import PackSaveShardedStrategy
from dist_ckpt_strategies.strategies.two_stage import TwoStageDataParallelLoadShardedStrategy
from tests.stores.commands import ONE_SERVER
from tests.support.entries import PACKS
from tests.support.layouts import (
    irregular,
    irregular_otherwise,
    random_layouts,
    scattered,
    scattered_otherwise,
)
from tests.support.object_stores import ObjectStore
from tests.support.ranks import run_processes
from tests.support.sharding import Cut, differences, no_data, on_grid, state_of, zeros

SIZE = 4
ODD_KEYS = ("a/b", ".hidden", "..", "manifest", "k" * 300, "metadata.json", "ключ", "a b+c&d=%41")


def odd_keys(grid: tuple[int, ...]) -> list[Cut]:
    return [on_grid(key, (8, 4), grid) for key in ODD_KEYS]


def layouts() -> list[tuple[list[Cut], list[Cut]]]:
    """What is saved, and what is loaded; the random ones have several dtypes."""
    return [
        (odd_keys((4, 1)), odd_keys((1, 4))),
        (scattered(), scattered_otherwise()),
        (irregular(), irregular_otherwise()),
        *(random_layouts(seed) for seed in range(2)),
    ]


def save_and_load_all(rank: int, variables: dict[str, str], url: str) -> None:
    os.environ.update(variables)
    plain = PackSaveShardedStrategy()
    savers: list[Any] = [PACKS, plain, FullyParallelSaveStrategyWrapper(plain)]
    two_stage = TwoStageDataParallelLoadShardedStrategy(dist.group.WORLD)
    for number, (saved, wanted) in enumerate(layouts()):
        place, saver = f"{url}/run {number}/iter_1", savers[number % 3]
        own = ShardedObject("o", {"t": torch.arange(3) + rank}, (SIZE,), (rank,))
        state = state_of(rank, saved) | {"o": own, "iteration": number}
        if number % 4 == 3:
            dist_ckpt_strategies.save_async(state, place, saver).wait(60)
        else:
            dist_ckpt_strategies.save(state, place, saver)
        for strategy in (None, two_stage):
            asked = {"o": ShardedObject("o", None, (SIZE,), ((rank + 1) % SIZE,))}
            target = state_of(rank, wanted, (zeros, no_data)[number % 2]) | asked
            loaded: Any = dist_ckpt_strategies.load(target, place, strategy)
            assert differences(rank, wanted, loaded) == [], (place, strategy)
            assert loaded["iteration"] == number, (place, strategy)
            assert loaded["o"]["t"][0] == (rank + 1) % SIZE, (place, strategy)


@ONE_SERVER
def test_every_layout_and_key_comes_back_in_another(store: ObjectStore, bucket: str) -> None:
    args = (store.variables, f"s3://{bucket}/deep")
    assert run_processes(SIZE, save_and_load_all, *args, timeout_s=300) == [None] * SIZE
