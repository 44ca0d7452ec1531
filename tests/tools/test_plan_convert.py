"""Conversions as planned: every element once, in bounded blocks, on the source's own grid."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dist_ckpt_strategies.core.array import DType
from dist_ckpt_strategies.core.chunk_grids import ShardPlacement
from dist_ckpt_strategies.core.region import Region
from dist_ckpt_strategies.errors import PlanError
from dist_ckpt_strategies.tools.plan_convert import (
    ConvertPlan,
    Format,
    SourceArray,
    blocks,
    build_convert_plan,
)
from dist_ckpt_strategies.tools.upgrade import upgraded_keys

EXTENTS = st.lists(st.integers(1, 9), min_size=0, max_size=4).map(tuple)


@settings(max_examples=200, deadline=None)
@given(EXTENTS, st.integers(16, 600), st.data())
def test_blocks_are_bounded_and_follow_each_other_in_c_order(
    shape: tuple[int, ...], max_nbytes: int, data: st.DataObject
) -> None:
    offset = tuple(data.draw(st.integers(0, 5)) for _ in shape)
    granularity = data.draw(st.none() | st.tuples(*(st.integers(1, 4) for _ in shape)))
    region = Region(offset, shape)
    numbers = np.arange(math.prod(shape)).reshape(shape)

    found = list(blocks(region, 4, max_nbytes, granularity))

    seen = np.concatenate([numbers[block.within(region).slices()].reshape(-1) for block in found])
    assert seen.tolist() == list(range(region.numel))
    assert all(block.numel * 4 <= max_nbytes for block in found)


def test_blocks_end_where_the_source_has_a_boundary() -> None:
    found = list(blocks(Region((0, 0), (100, 10)), 1, 330, (16, 5)))

    assert [block.shape[0] for block in found] == [32, 32, 32, 4]


def test_an_empty_region_is_one_block() -> None:
    assert list(blocks(Region((0, 0), (0, 4)), 4, 1)) == [Region((0, 0), (0, 4))]


def source(
    key: str = "w", shape: tuple[int, ...] = (40, 30), chunk: tuple[int, ...] = (10, 15)
) -> SourceArray:
    return SourceArray(key, shape, DType.FLOAT32, chunk)


def plan_of(*sources: SourceArray, to: Format, **renames: str) -> ConvertPlan:
    return build_convert_plan(sources, to, renames, file_nbytes=3000)


def covered(plan: ConvertPlan, key: str) -> bool:
    """Whether the items of an array hold each element once."""
    (array,) = (array for array in plan.arrays if array.key == key)
    times = np.zeros(array.shape, int)
    for task in plan.tasks:
        for item in task.items:
            if item.array == array:
                times[item.region.slices()] += 1
    return bool((times == 1).all())


@pytest.mark.parametrize("to", Format)
def test_every_element_has_one_place(to: Format) -> None:
    shards = tuple(ShardPlacement(Region((n, 0), (5 + n, 30)), n) for n in (0, 5))
    irregular = SourceArray("i", (15, 30), DType.FLOAT32, None, shards)
    plan = plan_of(source(), irregular, source("s", (), ()), source("e", (0, 3), (1, 3)), to=to)

    assert [array.key for array in plan.arrays] == ["e", "i", "s", "w"]
    assert all(covered(plan, key) for key in ("e", "i", "s", "w"))
    assert plan == plan_of(
        source("e", (0, 3), (1, 3)), source(), source("s", (), ()), irregular, to=to
    )


def test_keys_that_would_become_one_are_refused() -> None:
    with pytest.raises(PlanError, match="b: two arrays of the source would have this key"):
        plan_of(source("a"), source("b"), to=Format.ZARR2, a="b")


def test_keys_that_no_directory_can_have_are_refused_for_format_1_alone() -> None:
    plan_of(source("a/../b"), to=Format.ZARR2)
    with pytest.raises(PlanError, match="cannot be stored"):
        plan_of(source("a/../b"), to=Format.ZARR1)


def test_master_parameters_get_their_new_names() -> None:
    keys = [
        "optimizer.state.fp32_param.decoder.w",
        "chained_0.optimizer.state.fp32_param.w",
        "optimizer.state.exp_avg.decoder.w",
        "model.optimizer.state.fp32_param.w",
    ]
    assert upgraded_keys(keys) == {
        keys[0]: "optimizer.state.param.decoder.w",
        keys[1]: "chained_0.optimizer.state.param.w",
    }
