"""Sharded objects and common state of the sets, read with the allow-list."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies import base
from megatron.core.dist_checkpointing.strategies.base import StrategyAction

import dist_ckpt_strategies
from dist_ckpt_strategies.core.array import ObjectId
from dist_ckpt_strategies.strategies.common import TorchCommonLoadStrategy
from tests.golden.sets import GoldenSet, has_same_bits


def is_same(found: Any, expected: Any) -> bool:
    """Whether two nested objects are equal, arrays and tensors by their bits."""
    if type(found) is not type(expected):
        return False
    if isinstance(expected, torch.Tensor):
        return has_same_bits(found, expected)
    if isinstance(expected, np.ndarray):
        return bool(found.dtype == expected.dtype) and found.tobytes() == expected.tobytes()
    if isinstance(expected, Mapping):
        same_keys = list(found) == list(expected)
        return same_keys and all(is_same(found[key], expected[key]) for key in expected)
    if isinstance(expected, (list, tuple)):
        pairs = zip(found, expected, strict=False)
        return len(found) == len(expected) and all(is_same(*pair) for pair in pairs)
    return bool(found == expected)


def objects_of(golden: GoldenSet) -> dict[str, Any]:
    names = {key: ObjectId.parse(key) for key in golden.objects}
    return {
        key: ShardedObject(name.key, None, name.shape, name.offset)
        for key, name in names.items()
        if name is not None
    }


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("load", [dist_checkpointing.load, dist_ckpt_strategies.load])
def test_every_object_is_what_was_saved(golden: GoldenSet, load: Any) -> None:
    asked = {"objects": objects_of(golden)}
    found = load(asked, golden.checkpoint, validate_access_integrity=False)["objects"]

    assert len(found) == len(golden.objects)
    assert [k for k, v in golden.objects.items() if not is_same(found[k], v)] == []


def test_the_generators_states_need_numpys_rebuilders(golden: GoldenSet) -> None:
    """If this fails, the sets no longer show that the allow-list is needed."""
    states = [value for key, value in golden.objects.items() if key.startswith("rng_state")]

    assert states
    for (state,) in states:
        assert isinstance(state["np_rng_state"][1], np.ndarray)


@pytest.mark.usefixtures("registries")
def test_the_common_state_reads_the_same_with_our_strategy_as_with_megatron_cores(
    golden: GoldenSet,
) -> None:
    dist_ckpt_strategies.register(replace=True)
    theirs = dist_checkpointing.load_common_state_dict(golden.checkpoint)

    ours = TorchCommonLoadStrategy().load_common(golden.checkpoint)

    assert is_same(ours, theirs)
    assert ours["iteration"] == golden.info["steps"]
    assert ours["args"]["note"] == "été"


@pytest.mark.usefixtures("registries")
def test_the_common_state_reads_the_same_once_megatron_cores_strategy_is_replaced(
    golden: GoldenSet,
) -> None:
    dist_ckpt_strategies.register(replace=True)
    before = dist_checkpointing.load_common_state_dict(golden.checkpoint)

    dist_ckpt_strategies.register(replace_common=True, replace=True)

    loader = base.get_default_strategy(StrategyAction.LOAD_COMMON, "torch", 1)
    assert isinstance(loader, TorchCommonLoadStrategy)
    assert is_same(dist_checkpointing.load_common_state_dict(golden.checkpoint), before)


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("load", [dist_checkpointing.load, dist_ckpt_strategies.load])
def test_the_common_state_is_part_of_what_is_loaded(golden: GoldenSet, load: Any) -> None:
    key = "decoder.final_layernorm.weight"
    asked = ShardedTensor.from_rank_offsets(key, torch.zeros_like(golden.tensors[key]))

    found = load({"w": asked}, golden.checkpoint, validate_access_integrity=False)

    common = TorchCommonLoadStrategy().load_common(golden.checkpoint)
    assert found.keys() == common.keys() | {"w"}
    assert is_same({name: found[name] for name in common}, dict(common))


@pytest.mark.usefixtures("engine")
def test_the_content_metadata_is_what_the_writer_noted(reshardable: GoldenSet) -> None:
    found = dist_checkpointing.load_content_metadata(reshardable.checkpoint)

    assert found["distrib_optim_sharding_type"] == "fully_reshardable"


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("load", [dist_checkpointing.load, dist_ckpt_strategies.load])
def test_loading_takes_nothing_off_the_list_of_classes_that_others_allowed(
    golden: GoldenSet, load: Any
) -> None:
    before = set(torch.serialization.get_safe_globals())
    assert Namespace in before

    load(objects_of(golden), golden.checkpoint, validate_access_integrity=False)

    assert set(torch.serialization.get_safe_globals()) == before
