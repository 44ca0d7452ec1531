"""Regions and chunk grids, checked against counting elements one by one."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dist_ckpt_strategies.core.array import ArraySpec, DType, Region
from tests.support.boxes import regions_in, shapes, times_covered


@st.composite
def two_boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], Region, Region]:
    shape = draw(shapes(max_ndim=3, max_size=6))
    return shape, draw(regions_in(shape)), draw(regions_in(shape))


@given(two_boxes())
def test_the_intersection_holds_exactly_the_common_elements(
    case: tuple[tuple[int, ...], Region, Region],
) -> None:
    shape, one, other = case
    both = times_covered(shape, [one, other]) == 2
    common = one.intersect(other)

    assert common == other.intersect(one)
    assert np.array_equal(both, times_covered(shape, [common] if common else []) == 1)


@given(two_boxes())
def test_containing_means_that_no_element_is_outside(
    case: tuple[tuple[int, ...], Region, Region],
) -> None:
    shape, outer, inner = case
    outside = times_covered(shape, [inner]) > times_covered(shape, [outer])

    if outer.contains(inner):
        assert not outside.any()
    else:
        assert outside.any() or inner.numel == 0


@given(two_boxes())
def test_what_is_left_without_a_box_is_the_rest_in_boxes_that_share_nothing(
    case: tuple[tuple[int, ...], Region, Region],
) -> None:
    shape, one, other = case
    rest = (times_covered(shape, [one]) == 1) & (times_covered(shape, [other]) == 0)

    assert np.array_equal(times_covered(shape, list(one.without(other))), rest.astype(int))


@st.composite
def arrays(draw: st.DrawFn) -> ArraySpec:
    shape = draw(shapes(max_ndim=3, max_size=7))
    chunk = tuple(draw(st.integers(1, max(1, n) + 1)) for n in shape)
    return ArraySpec("w", shape, DType.INT16, chunk)


@given(arrays())
def test_the_chunks_cover_the_array_exactly_once(array: ArraySpec) -> None:
    whole = Region.whole(array.shape)
    boxes = [array.chunk_region(index).intersect(whole) for index in array.chunk_indices()]

    assert all(boxes)
    assert (times_covered(array.shape, [box for box in boxes if box]) == 1).all()
    assert len(boxes) == array.num_chunks


@given(st.data())
def test_the_chunks_of_a_box_are_those_that_share_an_element_with_it(data: st.DataObject) -> None:
    array = data.draw(arrays())
    box = data.draw(regions_in(array.shape))
    touched = [i for i in array.chunk_indices() if array.chunk_region(i).intersect(box)]

    assert list(box.cells(array.chunk_shape)) == touched
