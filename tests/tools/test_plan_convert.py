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
from dist_ckpt_strategies.errors import CoverageError, PlanError
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


def test_chunks_are_those_of_the_source() -> None:
    assert plan_of(source(), to=Format.ZARR1).arrays[0].chunk_shape == (10, 15)
    format2 = plan_of(source(), to=Format.ZARR2).arrays[0]
    assert format2.grid == (4, 2)
    assert format2.inner_shape is not None
    torch_dist = plan_of(source(), to=Format.TORCH_DIST)
    regions = {item.region.shape for task in torch_dist.tasks for item in task.items}
    assert regions == {(10, 15)}


def test_files_are_bounded_unless_one_shard_is_larger() -> None:
    large = source("l", (1000, 3), (1000, 3))
    plan = plan_of(source(), large, to=Format.TORCH_DIST)

    assert [task.nbytes for task in plan.tasks] == [12_000, 3000, 1800]
    assert [task.name for task in plan.tasks] == [
        f"__0_{number}.distcp" for number in range(len(plan.tasks))
    ]


def test_files_of_safetensors_hold_whole_arrays_without_gaps() -> None:
    sources = [source(f"w{n}", (10, 30), (10, 30)) for n in range(5)] + [source("z", (999,), (9,))]
    plan = plan_of(*sources, to=Format.SAFETENSORS)

    names = {item.array.key: task.name for task in plan.tasks for item in task.items}
    assert names == {
        "w0": "model-00001-of-00004.safetensors",
        "w1": "model-00001-of-00004.safetensors",
        "w2": "model-00002-of-00004.safetensors",
        "w3": "model-00002-of-00004.safetensors",
        "w4": "model-00003-of-00004.safetensors",
        "z": "model-00004-of-00004.safetensors",
    }
    for name in set(names.values()):
        items = [item for task in plan.tasks if task.name == name for item in task.items]
        places = sorted({(item.byte_offset, item.array.nbytes) for item in items})
        ends = [byte_offset + nbytes for byte_offset, nbytes in places]
        assert [byte_offset for byte_offset, _ in places] == [0, *ends[:-1]]


def test_shards_that_leave_a_gap_are_refused() -> None:
    shards = (ShardPlacement(Region((0,), (4,)), 0), ShardPlacement(Region((6,), (4,)), 1))
    with pytest.raises(CoverageError, match="w: main replicas cover 8 of 10 elements"):
        plan_of(SourceArray("w", (10,), DType.FLOAT32, None, shards), to=Format.ZARR2)


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
