"""The registry of strategies: ours, the default one, and Megatron-Core's own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.strategies import base

import dist_ckpt_strategies
from dist_ckpt_strategies import StrategyAction, StrategyKey, StrategyRegistry, register
from dist_ckpt_strategies.comm.base import Communicator
from dist_ckpt_strategies.config import LocalOptions, Options
from dist_ckpt_strategies.errors import (
    IncompatibleVersionError,
    StrategyError,
    StrategyExistsError,
    StrategyNotFoundError,
)
from dist_ckpt_strategies.sharded.save import SaveInputs
from dist_ckpt_strategies.strategies import registry as registry_module
from dist_ckpt_strategies.strategies.common import TorchCommonLoadStrategy
from dist_ckpt_strategies.strategies.registry import (
    get_default_strategy,
    register_default_strategy,
)
from dist_ckpt_strategies.strategies.tensorstore import (
    TensorStoreLoadShardedStrategy,
    register_default_tensorstore_strategies,
)
from dist_ckpt_strategies.strategies.zarr import (
    ZarrLoadShardedStrategy,
    ZarrSaveShardedStrategy,
    register_default_zarr_strategies,
)
from tests.support.ranks import run_processes
from tests.support.registries import fresh_registries

KEY = StrategyKey(StrategyAction.SAVE_SHARDED, "mine", 1)


class Plain:
    """Stands for a strategy."""


class Foreign(base.LoadShardedStrategy):  # type: ignore[misc]
    """A strategy that another package put into Megatron's registry."""

    def load(self, sharded_state_dict: Any, checkpoint_dir: Any) -> Any:
        return sharded_state_dict

    def load_tensors_metadata(self, checkpoint_dir: Any) -> Any:
        return {}

    def check_backend_compatibility(self, loaded_backend: Any) -> None:
        return

    def check_version_compatibility(self, loaded_version: Any) -> None:
        return


@pytest.fixture(autouse=True)
def _registries() -> Iterator[None]:
    with fresh_registries():
        yield


class Recording(ZarrSaveShardedStrategy):
    """Notes where it saves."""

    def __init__(self) -> None:
        super().__init__()
        self.saved: list[Path] = []

    def inputs(
        self,
        comm: Communicator,
        sharded_state_dict: dict[Any, Any],
        checkpoint_dir: Any,
        *,
        overwrite: bool | None = None,
    ) -> SaveInputs:
        self.saved.append(checkpoint_dir)
        return super().inputs(comm, sharded_state_dict, checkpoint_dir, overwrite=overwrite)


# A registry


def test_every_look_up_returns_the_same_strategy() -> None:
    registry = StrategyRegistry()
    registry.register(KEY, Plain)
    first = registry.get(KEY)

    assert isinstance(first, Plain)
    assert registry.get(KEY) is first
    registry.register(KEY, partial(Plain), replace=True)
    assert registry.get(KEY) is not first


def test_an_unknown_key_is_an_error_that_lists_the_registered_ones() -> None:
    registry = StrategyRegistry()
    with pytest.raises(StrategyNotFoundError, match="registered: none"):
        registry.get(KEY)
    registry.register(StrategyKey(StrategyAction.LOAD_COMMON, "b", 2), Plain)
    registry.register(StrategyKey(StrategyAction.LOAD_COMMON, "a", 1), Plain)

    with pytest.raises(StrategyNotFoundError) as caught:
        registry.get(KEY)
    assert str(caught.value) == (
        "no strategy for (save_sharded, 'mine', 1); registered: "
        "(load_common, 'a', 1), (load_common, 'b', 2)"
    )
    assert isinstance(caught.value, LookupError)


def test_a_taken_key_is_refused_without_replace() -> None:
    registry = StrategyRegistry()
    registry.register(KEY, Plain)
    with pytest.raises(StrategyExistsError, match="replace=True"):
        registry.register(KEY, dict)

    assert isinstance(registry.get(KEY), Plain)
    registry.register(KEY, dict, replace=True)
    assert registry.get(KEY) == {}


def test_registering_the_same_factory_again_changes_nothing() -> None:
    registry = StrategyRegistry()
    registry.register(KEY, Plain)
    registry.register(KEY, Plain)

    assert registry.keys() == (KEY,)


@pytest.mark.parametrize(
    "other",
    [
        StrategyKey(StrategyAction.LOAD_SHARDED, "mine", 1),
        StrategyKey(StrategyAction.SAVE_SHARDED, "other", 1),
        StrategyKey(StrategyAction.SAVE_SHARDED, "mine", 2),
    ],
    ids=str,
)
def test_action_backend_and_version_each_make_another_key(other: StrategyKey) -> None:
    registry = StrategyRegistry()
    registry.register(KEY, Plain)

    assert KEY in registry
    assert other not in registry
    registry.register(other, dict)
    assert set(registry.keys()) == {KEY, other}


@pytest.mark.parametrize("action", ["save_sharded", None])
def test_a_wrong_action_is_refused(action: Any) -> None:
    with pytest.raises(StrategyError, match=r"expected one of .*StrategyAction.SAVE_SHARDED"):
        register_default_strategy(action, "mine", 1, Plain)
    with pytest.raises(StrategyError, match=f"found {action!r}"):
        get_default_strategy(action, "mine", 1)


def test_registries_are_independent() -> None:
    one, other = StrategyRegistry(), StrategyRegistry()
    one.register(KEY, Plain)

    assert KEY not in other


# The default registry


def test_a_registered_instance_is_returned() -> None:
    strategy = Foreign()
    register_default_strategy(StrategyAction.LOAD_SHARDED, "mine", 1, strategy)

    assert get_default_strategy(StrategyAction.LOAD_SHARDED, "mine", 1) is strategy


def test_a_class_or_callable_is_a_factory() -> None:
    register_default_strategy(StrategyAction.LOAD_SHARDED, "mine", 1, Foreign)
    register_default_strategy(StrategyAction.LOAD_SHARDED, "mine", 2, partial(Foreign))

    for version in (1, 2):
        found = get_default_strategy(StrategyAction.LOAD_SHARDED, "mine", version)
        assert isinstance(found, Foreign)


def test_the_default_registry_refuses_a_taken_key_too() -> None:
    register_default_strategy(StrategyAction.LOAD_SHARDED, "mine", 1, Plain)
    with pytest.raises(StrategyExistsError):
        register_default_strategy(StrategyAction.LOAD_SHARDED, "mine", 1, dict)
    register_default_strategy(StrategyAction.LOAD_SHARDED, "mine", 1, dict, replace=True)

    assert get_default_strategy(StrategyAction.LOAD_SHARDED, "mine", 1) == {}


def test_the_names_of_the_package_are_those_of_the_registry() -> None:
    for name in ("StrategyKey", "StrategyRegistry", "get_default_strategy"):
        assert getattr(dist_ckpt_strategies, name) is getattr(registry_module, name)
    assert StrategyAction is base.StrategyAction


# What register() does


def test_register_puts_our_strategies_into_megatrons_registry() -> None:
    register()

    for action, kind in (
        (StrategyAction.SAVE_SHARDED, ZarrSaveShardedStrategy),
        (StrategyAction.LOAD_SHARDED, ZarrLoadShardedStrategy),
    ):
        assert isinstance(base.get_default_strategy(action, "zarr", 1), kind)
        assert isinstance(get_default_strategy(action, "zarr", 1), kind)


def test_the_same_registration_again_changes_nothing() -> None:
    options = Options(timeout_s=77.0)
    register(options=options, local=LocalOptions(replication_jump=2), allow=[Plain])
    key = (StrategyAction.SAVE_SHARDED, "zarr", 1)
    before = get_default_strategy(*key)
    register(options=replace(options), local=LocalOptions(replication_jump=2), allow=[Plain])

    assert get_default_strategy(*key) is before
    assert base.get_default_strategy(*key) is before


@pytest.mark.parametrize(
    "other",
    [
        {},
        {"options": Options(timeout_s=60.0)},
        {"options": Options(timeout_s=77.0), "allow": [Plain]},
        {"options": Options(timeout_s=77.0), "local": LocalOptions(replication_jump=2)},
    ],
    ids=["none", "options", "allow", "local"],
)
def test_a_registration_with_other_arguments_needs_replace(other: dict[str, Any]) -> None:
    register(options=Options(timeout_s=77.0))
    key = (StrategyAction.SAVE_SHARDED, "zarr", 1)
    before = get_default_strategy(*key)
    with pytest.raises(StrategyExistsError, match="replace=True"):
        register(**other)
    assert get_default_strategy(*key) is before
    assert before.options.timeout_s == 77.0

    register(**other, replace=True)
    timeout_s = other.get("options", Options()).timeout_s
    assert get_default_strategy(*key).options.timeout_s == timeout_s
    assert base.get_default_strategy(*key) is get_default_strategy(*key)


@pytest.mark.multiprocess
@pytest.mark.parametrize("comes_first", ["save", "registration"])
def test_an_own_registration_works_before_and_after_a_save(
    comes_first: str, tmp_path: Path
) -> None:
    assert run_processes(1, register_own, tmp_path, comes_first) == [None]


def register_own(_rank: int, root: Path, comes_first: str) -> None:
    """A tuple leads to the own strategy from the registration on."""
    own, key = Recording(), (StrategyAction.SAVE_SHARDED, "zarr", 1)
    state = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(4))}
    if comes_first == "save":
        dist_ckpt_strategies.save(dict(state), root / "before", key[1:])
    register_default_strategy(*key, own)
    dist_ckpt_strategies.save(dict(state), root / "after", key[1:])
    assert own.saved == [root / "after"]
    with pytest.raises(StrategyExistsError, match="replace=True"):
        register_default_strategy(*key, Recording())
    with pytest.raises(StrategyExistsError, match="Recording"):
        register()
    register_default_strategy(*key, own)
    assert get_default_strategy(*key) is own


def test_megatrons_common_strategies_are_replaced_only_with_replace_common() -> None:
    before = base.get_default_strategy(StrategyAction.LOAD_COMMON, "torch", 1)
    register()
    assert base.get_default_strategy(StrategyAction.LOAD_COMMON, "torch", 1) is before

    register(replace_common=True)
    found = base.get_default_strategy(StrategyAction.LOAD_COMMON, "torch", 1)
    assert isinstance(found, TorchCommonLoadStrategy)


def test_a_foreign_strategy_is_replaced_only_with_replace() -> None:
    theirs = Foreign()
    base.register_default_strategy(StrategyAction.LOAD_SHARDED, "zarr", 1, theirs)

    with pytest.raises(StrategyExistsError, match="Foreign"):
        register()
    assert base.get_default_strategy(StrategyAction.LOAD_SHARDED, "zarr", 1) is theirs
    assert ("zarr", 1) not in base.default_strategies[StrategyAction.SAVE_SHARDED.value]

    register(replace=True)
    found = base.get_default_strategy(StrategyAction.LOAD_SHARDED, "zarr", 1)
    assert isinstance(found, ZarrLoadShardedStrategy)


def test_the_functions_of_megatron_core_0_15_register_one_strategy_each() -> None:
    register_default_zarr_strategies()
    found = base.get_default_strategy(StrategyAction.SAVE_SHARDED, "zarr", 1)
    assert isinstance(found, ZarrSaveShardedStrategy)

    register_default_tensorstore_strategies()
    found = base.get_default_strategy(StrategyAction.LOAD_SHARDED, "zarr", 1)
    assert isinstance(found, TensorStoreLoadShardedStrategy)


def test_register_keeps_the_strategy_of_register_default_zarr_strategies() -> None:
    register_default_zarr_strategies()
    key = (StrategyAction.SAVE_SHARDED, "zarr", 1)
    before = get_default_strategy(*key)
    register()

    assert get_default_strategy(*key) is before


def test_an_unknown_backend_is_an_error_that_lists_the_registered_ones() -> None:
    register()

    with pytest.raises(StrategyNotFoundError, match=r"registered: .*'zarr', 1"):
        get_default_strategy(StrategyAction.LOAD_SHARDED, "hdf5", 1)


@pytest.mark.parametrize(("backend", "version"), [("mine", "1"), ("mine", 1.0), (None, 1)])
def test_a_key_of_wrong_types_is_refused(backend: Any, version: Any) -> None:
    with pytest.raises(StrategyError, match=r"str as backend and an int as version, found \("):
        get_default_strategy(StrategyAction.SAVE_SHARDED, backend, version)


def test_a_value_that_is_no_strategy_is_refused(tmp_path: Path) -> None:
    wrong: Any = 5
    with pytest.raises(StrategyError, match="expected a StrategyKey and a callable, found"):
        register_default_strategy(StrategyAction.SAVE_SHARDED, "a number", 1, wrong)
    with pytest.raises(StrategyError, match="expected a StrategyKey and a callable, found"):
        StrategyRegistry().register(wrong, Plain)

    loader = ZarrLoadShardedStrategy()
    register_default_strategy(StrategyAction.SAVE_SHARDED, "a loader", 1, loader)
    with pytest.raises(StrategyError, match=r"'a loader', 1\): expected a SaveShardedStrategy"):
        dist_ckpt_strategies.save({}, tmp_path / "c", ("a loader", 1))


def test_a_version_of_another_type_is_incompatible() -> None:
    wrong: Any = "1"
    with pytest.raises(IncompatibleVersionError, match=r"found \('zarr', '1'\)"):
        ZarrLoadShardedStrategy().check_version_compatibility(wrong)
