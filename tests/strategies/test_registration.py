"""What ``register`` and its like put into Megatron-Core's registry, and what they leave alone.

Each test runs in a process of its own: registries are shared by everything in a process.
"""

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
from megatron.core.dist_checkpointing.strategies.base import StrategyAction

import dist_ckpt_strategies
from dist_ckpt_strategies import Options
from dist_ckpt_strategies.config import Engine
from dist_ckpt_strategies.errors import IncompatibleVersionError, StrategyExistsError
from dist_ckpt_strategies.strategies.common import (
    TorchCommonLoadStrategy,
    TorchCommonSaveStrategy,
)
from dist_ckpt_strategies.strategies.tensorstore import TensorStoreLoadShardedStrategy
from dist_ckpt_strategies.strategies.zarr import ZarrLoadShardedStrategy, ZarrSaveShardedStrategy
from tests.support.ranks import run_processes

pytestmark = pytest.mark.multiprocess

ZARR = ("zarr", 1)
TORCH = ("torch", 1)


def in_megatron() -> dict[tuple[str, str, int], str]:
    """Action, backend and version of each strategy there, with the module it comes from."""
    return {
        (action, *key): type(strategy).__module__.partition(".")[0]
        for action, found in base.default_strategies.items()
        for key, strategy in found.items()
    }


def run_once(body: Any, *args: Any) -> Any:
    (result,) = run_processes(1, body, *args)
    if isinstance(result, Exception):
        raise result
    return result


def register_twice(_rank: int) -> None:
    before = in_megatron()
    dist_ckpt_strategies.register()
    once = in_megatron()
    dist_ckpt_strategies.register()
    ours = {("save_sharded", *ZARR), ("load_sharded", *ZARR)}
    assert in_megatron() == once
    assert {key for key in once if once[key] == "dist_ckpt_strategies"} == ours
    assert {key: once[key] for key in once if key not in ours} == before


def test_registering_adds_save_and_load_and_nothing_else_however_often() -> None:
    run_once(register_twice)


def register_common(_rank: int) -> None:
    dist_ckpt_strategies.register(replace_common=True, options=Options(engine=Engine.ZARR))
    saver = base.get_default_strategy(StrategyAction.SAVE_COMMON, *TORCH)
    loader = base.get_default_strategy(StrategyAction.LOAD_COMMON, *TORCH)
    assert isinstance(saver, TorchCommonSaveStrategy)
    assert isinstance(loader, TorchCommonLoadStrategy)


def test_the_common_strategies_are_replaced_on_request() -> None:
    run_once(register_common)


def register_by_action(_rank: int) -> None:
    dist_ckpt_strategies.register_default_zarr_strategies()
    saver = base.get_default_strategy(StrategyAction.SAVE_SHARDED, *ZARR)
    assert isinstance(saver, ZarrSaveShardedStrategy)
    with pytest.raises(CheckpointingException, match="Cannot find a default strategy"):
        base.get_default_strategy(StrategyAction.LOAD_SHARDED, *ZARR)
    dist_ckpt_strategies.register_default_tensorstore_strategies()
    loader = base.get_default_strategy(StrategyAction.LOAD_SHARDED, *ZARR)
    assert isinstance(loader, TensorStoreLoadShardedStrategy)
    ours = dist_ckpt_strategies.get_default_strategy(StrategyAction.LOAD_SHARDED, *ZARR)
    assert isinstance(ours, TensorStoreLoadShardedStrategy)


def test_each_default_call_registers_its_own_action() -> None:
    run_once(register_by_action)


class Foreign(base.SaveShardedStrategy):  # type: ignore[misc]
    """A strategy of somebody else."""

    def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
        """Nothing."""


def register_beside_a_foreign_one(_rank: int) -> None:
    foreign = Foreign(*ZARR)
    base.register_default_strategy(StrategyAction.SAVE_SHARDED, *ZARR, foreign)
    with pytest.raises(StrategyExistsError, match="Foreign") as caught:
        dist_ckpt_strategies.register()
    assert isinstance(caught.value, CheckpointingException)
    assert base.get_default_strategy(StrategyAction.SAVE_SHARDED, *ZARR) is foreign
    assert ("load_sharded", *ZARR) not in in_megatron()
    dist_ckpt_strategies.register(replace=True)
    assert base.get_default_strategy(StrategyAction.SAVE_SHARDED, *ZARR) is not foreign


def test_somebody_elses_strategy_gives_way_only_when_told_to() -> None:
    run_once(register_beside_a_foreign_one)


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


def test_objects_take_the_common_strategys_way_too(tmp_path: Path) -> None:
    run_once(save_objects, tmp_path / "ckpt")


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
    assert in_megatron().get(("load_sharded", *ZARR)) is None


def test_instances_work_without_any_registration(tmp_path: Path) -> None:
    run_once(save_and_load_by_instance, tmp_path / "ckpt")
