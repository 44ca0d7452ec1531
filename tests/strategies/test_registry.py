"""The registry: what is found under a key, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dist_ckpt_strategies.errors import StrategyExistsError, StrategyNotFoundError
from dist_ckpt_strategies.strategies.registry import (
    StrategyAction,
    StrategyKey,
    StrategyRegistry,
    get_default_strategy,
    register_default_strategy,
)
from dist_ckpt_strategies.strategies.zarr import ZarrLoadShardedStrategy, ZarrSaveShardedStrategy
from tests.support.ranks import run_processes

SAVE = StrategyKey(StrategyAction.SAVE_SHARDED, "zarr", 1)
LOAD = StrategyKey(StrategyAction.LOAD_SHARDED, "zarr", 1)


def registry_with(**factories: Callable[[], Any]) -> StrategyRegistry:
    registry = StrategyRegistry()
    for name, factory in factories.items():
        registry.register(StrategyKey(StrategyAction[name], "zarr", 1), factory)
    return registry


def test_every_look_up_makes_a_strategy_of_its_own() -> None:
    registry = registry_with(SAVE_SHARDED=ZarrSaveShardedStrategy)

    first, second = registry.get(SAVE), registry.get(SAVE)

    assert type(first) is type(second) is ZarrSaveShardedStrategy
    assert first is not second


def test_a_miss_lists_the_keys_that_are_there() -> None:
    registry = registry_with(SAVE_SHARDED=object, LOAD_SHARDED=object)

    with pytest.raises(StrategyNotFoundError) as caught:
        registry.get(StrategyKey(StrategyAction.LOAD_SHARDED, "zarr", 2))

    assert isinstance(caught.value, LookupError)
    assert str(caught.value) == (
        "no strategy for (load_sharded, 'zarr', 2); registered: (load_sharded, 'zarr', 1), "
        "(save_sharded, 'zarr', 1)"
    )


def test_a_miss_in_an_empty_registry_says_that_there_is_none() -> None:
    with pytest.raises(StrategyNotFoundError, match="registered: none"):
        StrategyRegistry().get(SAVE)


def test_a_taken_key_is_refused_and_keeps_what_it_has() -> None:
    registry = registry_with(SAVE_SHARDED=list)

    with pytest.raises(StrategyExistsError, match=r"\(save_sharded, 'zarr', 1\) is already reg"):
        registry.register(SAVE, dict)

    assert registry.get(SAVE) == []


def test_a_taken_key_can_be_replaced_on_purpose() -> None:
    registry = registry_with(SAVE_SHARDED=list)

    registry.register(SAVE, dict, replace=True)

    assert registry.get(SAVE) == {}


def test_registering_the_same_factory_again_changes_nothing() -> None:
    registry = registry_with(SAVE_SHARDED=list)

    registry.register(SAVE, list)

    assert registry.keys() == (SAVE,)


def test_action_backend_and_version_each_make_another_key() -> None:
    registry = registry_with(SAVE_SHARDED=list)

    others = [LOAD, StrategyKey(SAVE.action, "zarr", 2), StrategyKey(SAVE.action, "other", 1)]

    assert SAVE in registry
    assert not [key for key in others if key in registry]


def register_and_look_up(_rank: int) -> list[bool]:
    """Body of a rank: its own default registry, which no other test sees."""
    instance = ZarrLoadShardedStrategy()
    register_default_strategy(StrategyAction.LOAD_SHARDED, "mine", 1, instance)
    register_default_strategy(StrategyAction.SAVE_SHARDED, "mine", 1, ZarrSaveShardedStrategy)
    register_default_strategy(StrategyAction.LOAD_SHARDED, "made", 1, lambda: instance)
    found = get_default_strategy(StrategyAction.SAVE_SHARDED, "mine", 1)
    try:
        register_default_strategy(StrategyAction.LOAD_SHARDED, "mine", 1, ZarrLoadShardedStrategy)
        is_refused = False
    except StrategyExistsError:
        is_refused = True
    register_default_strategy(
        StrategyAction.LOAD_SHARDED, "made", 1, ZarrLoadShardedStrategy, replace=True
    )
    return [
        get_default_strategy(StrategyAction.LOAD_SHARDED, "mine", 1) is instance,
        isinstance(found, ZarrSaveShardedStrategy),
        is_refused,
        get_default_strategy(StrategyAction.LOAD_SHARDED, "made", 1) is not instance,
    ]


@pytest.mark.multiprocess
def test_what_is_registered_is_found() -> None:
    assert run_processes(1, register_and_look_up) == [[True] * 4]
