"""A load plan says where every element of a tensor comes from."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_ckpt_strategies.core.array import ArraySpec, DType, Region, Shape
from dist_ckpt_strategies.errors import ShapeMismatchError
from dist_ckpt_strategies.sharded.load import build_read_item
from tests.support.boxes import regions_in, shapes, spec_of


def stored_array(shape: Shape) -> ArraySpec:
    return ArraySpec("w", shape, DType.FLOAT32, tuple(max(1, n) for n in shape))


@given(st.data())
def test_any_box_is_read_whole_from_where_it_lies(data: st.DataObject) -> None:
    shape = data.draw(shapes())
    box = data.draw(regions_in(shape))
    read = build_read_item(spec_of(box, shape), stored_array(shape))

    if box.numel == 0:
        assert (read.source, read.target) == (None, None)
    else:
        assert (read.source, read.target) == (box, Region.whole(box.shape))
    assert not read.is_padded


@given(st.data())
def test_with_another_shape_allowed_the_rest_is_clipped_or_padded_with_zeros(
    data: st.DataObject,
) -> None:
    wanted_shape = data.draw(shapes(max_ndim=3, min_size=1, max_size=6))
    stored_shape = tuple(data.draw(st.integers(0, 8)) for _ in wanted_shape)
    box = data.draw(regions_in(wanted_shape))
    values = 1 + np.arange(np.prod(stored_shape, dtype=int)).reshape(stored_shape)
    expected = np.zeros(np.maximum(stored_shape, wanted_shape), int)
    expected[Region.whole(stored_shape).slices()] = values
    want = spec_of(box, wanted_shape, may_mismatch=True)
    read = build_read_item(want, stored_array(stored_shape))

    tensor = np.zeros(box.shape, int) if read.is_padded else np.full(box.shape, -1)
    if read.source is not None and read.target is not None:
        tensor[read.target.slices()] = values[read.source.slices()]
    assert np.array_equal(tensor, expected[box.slices()])


@pytest.mark.parametrize(
    ("stored", "wanted", "may_mismatch"),
    [((4, 8), (4, 6), False), ((4,), (4, 1), False), ((4,), (4, 1), True), ((), (1,), True)],
)
def test_another_shape_is_refused_naming_key_both_shapes_and_the_remedy(
    stored: Shape, wanted: Shape, may_mismatch: bool
) -> None:
    want = spec_of(Region.whole(wanted), wanted, may_mismatch=may_mismatch)

    with pytest.raises(ShapeMismatchError) as caught:
        build_read_item(want, stored_array(stored))

    message = str(caught.value)
    assert message.startswith(f"w: shape {stored} in the checkpoint, {wanted} requested")
    assert "allow_shape_mismatch" in message
    assert caught.value.key == "w"


def test_a_box_that_reaches_outside_its_own_array_is_refused() -> None:
    want = spec_of(Region((6,), (4,)), (8,))

    with pytest.raises(ShapeMismatchError, match=r"^w: .*\[6:10\]"):
        build_read_item(want, stored_array((8,)))
