"""Conversions as planned: every element once, in bounded blocks, on the source's own grid."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_ckpt_strategies.core.array import ArraySpec, DType, Region
from dist_ckpt_strategies.errors import PlanError
from dist_ckpt_strategies.tools.plan_convert import Format, blocks, build_convert_plan

LENGTHS = st.lists(st.integers(1, 9), min_size=0, max_size=4).map(tuple)


@given(LENGTHS, st.integers(16, 600), st.data())
def test_blocks_are_bounded_and_follow_each_other_in_c_order(
    shape: tuple[int, ...], max_nbytes: int, data: st.DataObject
) -> None:
    offset = tuple(data.draw(st.integers(0, 5)) for _ in shape)
    region = Region(offset, shape)
    numbers = np.arange(math.prod(shape)).reshape(shape)

    found = list(blocks(region, 4, max_nbytes))

    seen = np.concatenate([numbers[block.within(region).slices()].reshape(-1) for block in found])
    assert seen.tolist() == list(range(region.numel))
    assert all(block.numel * 4 <= max_nbytes for block in found)


def test_keys_that_would_become_one_are_refused() -> None:
    sources = [ArraySpec(key, (40, 30), DType.FLOAT32, (10, 15)) for key in ("a", "b")]
    with pytest.raises(PlanError, match="b: two arrays of the source would have this key"):
        build_convert_plan(sources, Format.ZARR1, {"a": "b"}, file_nbytes=3000)
