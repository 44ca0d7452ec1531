"""Conversions as planned: every element once, in bounded blocks, on the source's own grid."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_ckpt_strategies.core.array import DType, Region
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


def source(
    key: str = "w", shape: tuple[int, ...] = (40, 30), chunk: tuple[int, ...] = (10, 15)
) -> SourceArray:
    return SourceArray(key, shape, DType.FLOAT32, chunk)


def plan_of(*sources: SourceArray, to: Format, **renames: str) -> ConvertPlan:
    return build_convert_plan(sources, to, renames, file_nbytes=3000)


def test_keys_that_would_become_one_are_refused() -> None:
    with pytest.raises(PlanError, match="b: two arrays of the source would have this key"):
        plan_of(source("a"), source("b"), to=Format.ZARR2, a="b")


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
