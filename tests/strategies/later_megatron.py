"""A script: this package beside a Megatron-Core that lacks what 0.17 removed.

What stands for it is 0.16.1 without the names that went: the registry and its enum, the classes of
common strategies, one of the checks; or without the module that held most of them. Its ``load``
and ``save`` call the strategy in the way of later releases: with a third argument, and from 0.19
on with the common state as one more ShardedObject.

    python later_megatron.py DIRECTORY names
    python later_megatron.py DIRECTORY module
"""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor, strategies, validation
from megatron.core.dist_checkpointing import utils as megatron_utils
from megatron.core.dist_checkpointing.dict_utils import merge
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess, save_preprocess
from megatron.core.dist_checkpointing.strategies import base, fully_parallel
from megatron.core.dist_checkpointing.strategies import torch as torch_dist

extract_sharded_base = megatron_utils.extract_sharded_base
assert torch_dist  # it imports names that go
assert fully_parallel

GONE = {
    base: (
        *("default_strategies", "register_default_strategy", "get_default_strategy"),
        *("StrategyAction", "SaveCommonStrategy", "LoadCommonStrategy"),
    ),
    validation: ("validate_sharded_objects_handling",),
    megatron_utils: ("_clean_metadata_for_serialization",),
}


for module, names in GONE.items():
    for name in names:
        delattr(module, name)
if sys.argv[2] == "module":
    delattr(strategies, "base")
    vars(sys)["modules"][base.__name__] = None

import dist_ckpt_strategies  # noqa: E402 - after the names have gone
from dist_ckpt_strategies.strategies.two_stage import (  # noqa: E402
    TwoStageDataParallelLoadShardedStrategy,
)
from dist_ckpt_strategies.strategies.zarr import (  # noqa: E402  # noqa: E402
    Format2LoadShardedStrategy,
    Format2SaveShardedStrategy,
    ZarrLoadShardedStrategy,
    ZarrSaveShardedStrategy,
)

SAVERS = {1: ZarrSaveShardedStrategy, 2: Format2SaveShardedStrategy}
LOADERS: dict[int, Any] = {1: ZarrLoadShardedStrategy, 2: Format2LoadShardedStrategy}


def load_of_0_17(state: dict[str, Any], directory: str, strategy: Any) -> dict[str, Any]:
    """What ``dist_checkpointing.load`` of 0.17 does with a strategy."""
    common: dict[str, Any] = torch.load(f"{directory}/common.pt", weights_only=True)
    return merged_with(common, state, directory, strategy)


def merged_with(
    common: dict[str, Any], state: dict[str, Any], directory: str, strategy: Any
) -> dict[str, Any]:
    sharded, *_ = load_preprocess(state)
    sharded, _ = extract_sharded_base(sharded)
    merge(common, strategy.load(sharded, directory, "nvrx"))
    return common


def save_of_0_19(state: dict[str, Any], directory: Path, strategy: Any) -> None:
    """What ``dist_checkpointing.save`` of 0.19 would do with a strategy, did it take one."""
    sharded, common = save_preprocess(state, validate_access_integrity=False)
    rank = dist.get_rank()
    sharded["common_state"] = ShardedObject("common_state", common, (1,), (0,), replica_id=rank)
    directory.mkdir()
    strategy.async_save(sharded, str(directory), "nvrx").execute_sync()
    marker = {"sharded_backend": strategy.backend, "sharded_backend_version": strategy.version}
    marker |= {"common_backend": "torch", "common_backend_version": 1}
    (directory / "metadata.json").write_text(json.dumps(marker))


def load_of_0_19(state: dict[str, Any], directory: str, strategy: Any) -> dict[str, Any]:
    """What its ``load`` does: the common state first, from the strategy too."""
    wanted = {"common_state": ShardedObject("common_state", None, (1,), (0,))}
    common = strategy.load(wanted, directory, "nvrx")["common_state"]
    return merged_with(common, state, directory, strategy)


def state(value: float) -> dict[str, Any]:
    return {
        "w": ShardedTensor.from_rank_offsets("w", torch.full((5, 3), value)),
        "o": ShardedObject("o", {"t": torch.full((2,), value)} if value else None, (1,), (0,)),
    }


def saved_state(*, has_args: bool) -> dict[str, Any]:
    common: dict[str, Any] = {"iteration": 3}
    return state(7.0) | common | ({"args": Namespace(tp=2)} if has_args else {})


def is_right(loaded: Any) -> bool:
    return (
        torch.equal(loaded["w"], torch.full((5, 3), 7.0))
        and torch.equal(loaded["o"]["t"], torch.full((2,), 7.0))
        and loaded["iteration"] == 3
    )


def use_own_entries(directory: Path, version: int) -> list[bool]:
    """Our save and load, and 0.17's load of what they saved."""
    root, later = directory / f"zarr{version}", directory / f"later{version}"
    content = {"form": "x", "dp_cp_group": dist.group.WORLD}
    dist_ckpt_strategies.save(
        saved_state(has_args=False), root, ("zarr", version), content_metadata=content
    )
    handle = dist_ckpt_strategies.save_async(saved_state(has_args=False), later, ("zarr", version))
    handle.wait()
    loaded: Any = dist_ckpt_strategies.load(state(0.0), root)
    two_stage = TwoStageDataParallelLoadShardedStrategy(None)
    return [
        is_right(loaded) and loaded["content_metadata"] == {"form": "x"},
        is_right(dist_ckpt_strategies.load(state(0.0), later, strict="log_all")),
        is_right(load_of_0_17(state(0.0), str(root), LOADERS[version]())),
        is_right(load_of_0_17(state(0.0), str(root), two_stage)),
    ]


def use_common_object(directory: Path, version: int, *, has_args: bool) -> list[bool]:
    """0.19's save over a strategy of ours, its load and ours; the object pickled or plain."""
    root = directory / f"object{version}{has_args}"
    save_of_0_19(saved_state(has_args=has_args), root, SAVERS[version]())
    loaded: Any = dist_ckpt_strategies.load(state(0.0), root, strict="raise_all")
    return [
        is_right(load_of_0_19(state(0.0), str(root), LOADERS[version]())),
        is_right(
            load_of_0_19(state(0.0), str(root), TwoStageDataParallelLoadShardedStrategy(None))
        ),
        is_right(loaded) and "common_state" not in loaded,
    ]


def main(directory: Path) -> None:
    """Save and load in every way that is left."""
    store = f"file://{directory}/store"
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    dist_ckpt_strategies.register()
    dist_ckpt_strategies.get_default_strategy(
        dist_ckpt_strategies.StrategyAction("save_sharded"), "zarr", 2
    )
    for version in (1, 2):
        found = use_own_entries(directory, version)
        for has_args in (False, True):
            found += use_common_object(directory, version, has_args=has_args)
        sys.stdout.write(f"zarr {version}: {found}\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
