"""Box arithmetic, checked against counting elements one by one."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dist_ckpt_strategies.core.region import Region
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


def test_boxes_are_written_as_python_indexes_them() -> None:
    assert str(Region((0, 8), (4, 8))) == "[0:4, 8:16]"
    assert str(Region.whole(())) == "[]"


@given(two_boxes())
def test_what_is_left_without_a_box_is_the_rest_in_boxes_that_share_nothing(
    case: tuple[tuple[int, ...], Region, Region],
) -> None:
    shape, one, other = case
    rest = (times_covered(shape, [one]) == 1) & (times_covered(shape, [other]) == 0)

    assert np.array_equal(times_covered(shape, list(one.without(other))), rest.astype(int))
