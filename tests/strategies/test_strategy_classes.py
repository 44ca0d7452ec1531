"""The strategy classes on their own: what they refuse, and what they do without a registry."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies import base

from dist_ckpt_strategies.errors import IncompatibleVersionError
from dist_ckpt_strategies.strategies.common import (
    TorchCommonLoadStrategy,
    TorchCommonSaveStrategy,
)
from dist_ckpt_strategies.strategies.tensorstore import TensorStoreLoadShardedStrategy
from dist_ckpt_strategies.strategies.zarr import ZarrLoadShardedStrategy, ZarrSaveShardedStrategy
from tests.support.ranks import run_processes

ZARR = ("zarr", 1)
TORCH = ("torch", 1)


@pytest.mark.parametrize("make", [ZarrLoadShardedStrategy, TensorStoreLoadShardedStrategy])
def test_another_format_is_refused_by_name(make: Any) -> None:
    loader, common = make(), TorchCommonLoadStrategy()
    loader.check_backend_compatibility("zarr")
    loader.check_version_compatibility(1)
    common.check_backend_compatibility("torch")
    common.check_version_compatibility(1)

    for check, argument, named in [
        (loader.check_backend_compatibility, "torch_dist", "'torch_dist'"),
        (loader.check_version_compatibility, 2, "2"),
        (common.check_backend_compatibility, "zarr", "'zarr'"),
        (common.check_version_compatibility, 2, "2"),
    ]:
        with pytest.raises(IncompatibleVersionError, match=named) as caught:
            check(argument)
        assert isinstance(caught.value, CheckpointingException)


@pytest.mark.parametrize("make", [ZarrSaveShardedStrategy, TorchCommonSaveStrategy])
def test_a_save_strategy_cannot_be_made_for_another_format(make: Any) -> None:
    with pytest.raises(IncompatibleVersionError, match=r"found \('other', 1\)"):
        make("other", 1)


def save_objects(_rank: int, root: Path) -> None:
    root.mkdir()
    saver = TorchCommonSaveStrategy(*TORCH)
    loader = TorchCommonLoadStrategy()
    mine = ShardedObject("rng", {"seed": 3}, (1, 2), (0, 1))
    replica = ShardedObject("rng", {"seed": 4}, (1, 2), (0, 0), replica_id=1)
    assert saver.can_handle_sharded_objects is loader.can_handle_sharded_objects is True

    saver.save_sharded_objects({"a": mine, "b": [replica]}, root)

    assert [path.name for path in root.rglob("*.pt")] == ["shard_0.1_1.2.pt"]
    assert loader.load_sharded_objects({"a": mine.without_data()}, root) == {"a": {"seed": 3}}
    (found,) = loader.load_sharded_metadata(root).values()
    assert (found.key, found.global_shape, found.global_offset) == ("rng", (1, 2), (0, 1))


@pytest.mark.multiprocess
def test_objects_take_the_common_strategys_way_too(tmp_path: Path) -> None:
    assert run_processes(1, save_objects, tmp_path / "ckpt") == [None]


def save_and_load_by_instance(_rank: int, root: Path) -> None:
    root.mkdir()
    weight = torch.arange(6.0)
    target = torch.zeros(6)
    dist_checkpointing.save(
        {"w": ShardedTensor.from_rank_offsets("w", weight)}, str(root), ZarrSaveShardedStrategy()
    )
    dist_checkpointing.load(
        {"w": ShardedTensor.from_rank_offsets("w", target)},
        str(root),
        ZarrLoadShardedStrategy(engine="zarr"),
    )
    assert torch.equal(target, weight)
    assert ZARR not in base.default_strategies["load_sharded"]


@pytest.mark.multiprocess
def test_instances_work_without_any_registration(tmp_path: Path) -> None:
    assert run_processes(1, save_and_load_by_instance, tmp_path / "ckpt") == [None]
