"""Loads fill exactly the wanted boxes, with zeros where storage has nothing."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dist_ckpt_strategies.config import Engine, Options
from dist_ckpt_strategies.core.array import ArraySpec, DType, ShardSpec
from dist_ckpt_strategies.core.region import Region
from dist_ckpt_strategies.errors import IncompleteCheckpointError
from dist_ckpt_strategies.sharded.load import run_load
from dist_ckpt_strategies.sharded.plan_load import build_load_plan
from tests.support.boxes import regions_in, shapes, spec_of
from tests.support.memory_store import MemoryArrays
from tests.support.samples import array_of, random_values
from tests.support.stores import chunk_files, store_of, write_array
from tests.support.tensors import LAYOUTS, bits

FRESH = itertools.count()
FEWER = settings(max_examples=25)
OPTIONS = Options(timeout_s=60.0)


def load(
    store_root: Path, engine: Engine, array: ArraySpec, wants: list[ShardSpec], fill: float = 9.0
) -> list[torch.Tensor]:
    targets = [torch.full(want.region.shape, fill) for want in wants]
    plan = build_load_plan(wants, {array.key: array})
    run_load(plan, targets, store_of(store_root, engine), OPTIONS)
    return targets


@pytest.mark.parametrize("engine", Engine)
@FEWER
@given(data=st.data())
def test_any_boxes_of_any_array_are_loaded_with_any_shape_asked_for(
    data: st.DataObject, engine: Engine, tmp_path: Path
) -> None:
    root = tmp_path / f"ckpt{next(FRESH)}"
    root.mkdir()
    stored_shape = data.draw(shapes(max_ndim=3, max_size=6))
    chunk = tuple(data.draw(st.integers(1, max(1, n))) for n in stored_shape)
    values = random_values(stored_shape, DType.FLOAT32)
    array = write_array(root, engine, values, chunk=chunk)
    wanted_shape = tuple(data.draw(st.integers(1, 8)) for _ in stored_shape)
    boxes = data.draw(st.lists(regions_in(wanted_shape), max_size=4))
    padded = torch.zeros([max(s, w) for s, w in zip(stored_shape, wanted_shape, strict=True)])
    padded[Region.whole(stored_shape).slices()] = torch.from_numpy(values.copy())
    wants = [spec_of(box, wanted_shape, may_mismatch=True) for box in boxes]
    found = load(root, engine, array, wants)

    for box, tensor in zip(boxes, found, strict=True):
        assert bits(tensor) == bits(padded[box.slices()])


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_targets_of_any_layout_are_filled_and_padded(layout, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001
    values = random_values((5, 4), DType.FLOAT32)
    array = write_array(tmp_path, Engine.TENSORSTORE, values, chunk=(2, 4))
    target = layout(torch.full((3, 6), 9.0))
    want = spec_of(Region((3, 0), (3, 6)), (6, 6), may_mismatch=True)
    plan = build_load_plan([want], {"w": array})
    run_load(plan, [target], store_of(tmp_path, Engine.TENSORSTORE), OPTIONS)
    expected = torch.zeros(3, 6)
    expected[:2, :4] = torch.from_numpy(values[3:].copy())

    assert bits(target) == bits(expected)


def test_a_shard_beyond_the_stored_rows_becomes_zeros_without_a_read() -> None:
    array = array_of(random_values((4, 2), DType.FLOAT32))
    want = spec_of(Region((6, 0), (2, 2)), (8, 2), may_mismatch=True)
    store, target = MemoryArrays(), torch.full((2, 2), 9.0)
    run_load(build_load_plan([want], {"w": array}), [target], store, OPTIONS)

    assert store.reads == []
    assert target.tolist() == [[0.0, 0.0], [0.0, 0.0]]


@pytest.mark.parametrize("engine", Engine)
def test_a_missing_chunk_is_never_zeros(engine: Engine, tmp_path: Path) -> None:
    array = write_array(tmp_path, engine, random_values((6, 2), DType.FLOAT32), chunk=(2, 2))
    chunk_files(tmp_path, array)[1].unlink()

    with pytest.raises(IncompleteCheckpointError, match=r"^w: "):
        load(tmp_path, engine, array, [spec_of(Region.whole((6, 2)), (6, 2))])


def test_a_parameter_is_filled_in_place(tmp_path: Path) -> None:
    values = random_values((4,), DType.INT32).astype("float32")
    array = write_array(tmp_path, Engine.TENSORSTORE, values)
    target = torch.nn.Parameter(torch.zeros(4))
    want = spec_of(Region.whole((4,)), (4,))
    run_load(
        build_load_plan([want], {"w": array}),
        [target],
        store_of(tmp_path, Engine.TENSORSTORE),
        OPTIONS,
    )

    assert bits(target) == values.tobytes()
    assert target.grad_fn is None
