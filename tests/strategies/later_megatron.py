"""A script: this package beside a Megatron-Core that lacks what 0.17 removed.

What stands for it is 0.16.1 without the names that went: the registry and its enum, the classes of
common strategies, one of the checks. Its ``load`` calls the strategy in the way of later releases.

    python later_megatron.py DIRECTORY
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor, validation
from megatron.core.dist_checkpointing.dict_utils import merge
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from megatron.core.dist_checkpointing.strategies import base
from megatron.core.dist_checkpointing.strategies import torch as torch_dist
from megatron.core.dist_checkpointing.utils import extract_sharded_base

assert torch_dist  # it imports names that go

GONE = {
    base: (
        *("default_strategies", "register_default_strategy", "get_default_strategy"),
        *("StrategyAction", "SaveCommonStrategy", "LoadCommonStrategy"),
    ),
    validation: ("validate_sharded_objects_handling",),
}


for module, names in GONE.items():
    for name in names:
        delattr(module, name)

import dist_ckpt_strategies  # noqa: E402 - after the names have gone
from dist_ckpt_strategies.strategies.two_stage import (  # noqa: E402
    TwoStageDataParallelLoadShardedStrategy,
)
from dist_ckpt_strategies.strategies.zarr import ZarrLoadShardedStrategy  # noqa: E402
from dist_ckpt_strategies.strategies.zarr_format2 import (  # noqa: E402
    Format2LoadShardedStrategy,
)


def later_load(state: dict[str, Any], directory: str, strategy: Any) -> dict[str, Any]:
    """What ``dist_checkpointing.load`` of later releases does with a strategy."""
    common: dict[str, Any] = torch.load(f"{directory}/common.pt", weights_only=True)
    sharded, *_ = load_preprocess(state)
    sharded, _ = extract_sharded_base(sharded)
    merge(common, strategy.load(sharded, directory, "nvrx"))
    return common


def state(value: float) -> dict[str, Any]:
    return {
        "w": ShardedTensor.from_rank_offsets("w", torch.full((5, 3), value)),
        "o": ShardedObject("o", {"t": torch.full((2,), value)} if value else None, (1,), (0,)),
    }


def is_right(loaded: Any) -> bool:
    return (
        torch.equal(loaded["w"], torch.full((5, 3), 7.0))
        and torch.equal(loaded["o"]["t"], torch.full((2,), 7.0))
        and loaded["iteration"] == 3
    )


def main(directory: Path) -> None:
    """Save and load in every way that is left."""
    store = f"file://{directory}/store"
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    dist_ckpt_strategies.register()
    dist_ckpt_strategies.get_default_strategy(
        dist_ckpt_strategies.StrategyAction("save_sharded"), "zarr", 2
    )
    loaders = {1: ZarrLoadShardedStrategy(), 2: Format2LoadShardedStrategy()}
    for version, loader in loaders.items():
        root = directory / f"zarr{version}"
        dist_ckpt_strategies.save(state(7.0) | {"iteration": 3}, root, ("zarr", version))
        later = directory / f"later{version}"
        dist_ckpt_strategies.save_async(
            state(7.0) | {"iteration": 3}, later, ("zarr", version)
        ).wait()
        two_stage = TwoStageDataParallelLoadShardedStrategy(None)
        found = [
            is_right(dist_ckpt_strategies.load(state(0.0), root)),
            is_right(dist_ckpt_strategies.load(state(0.0), later, strict="log_all")),
            is_right(later_load(state(0.0), str(root), loader)),
            is_right(later_load(state(0.0), str(root), two_stage)),
        ]
        sys.stdout.write(f"zarr {version}: {found}\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
