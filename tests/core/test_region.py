"""Regions and chunk grids, checked against counting elements one by one."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dist_ckpt_strategies.core.array import ArraySpec, DType, Region
from tests.support.regions import regions_in, shapes, times_covered


@given(st.data())
def test_two_regions_are_compared_as_counting_elements_would(data: st.DataObject) -> None:
    shape = data.draw(shapes(max_ndim=3, max_size=6))
    one, other = data.draw(regions_in(shape)), data.draw(regions_in(shape))
    in_one, in_other = times_covered(shape, [one]), times_covered(shape, [other])

    common = one.intersect(other)
    assert common == other.intersect(one)
    assert np.array_equal(times_covered(shape, [common] if common else []), in_one & in_other)
    is_outside = bool((in_other > in_one).any())
    assert not is_outside if one.contains(other) else is_outside or other.numel == 0


@given(st.data())
def test_chunks_cover_the_array_once_and_those_of_a_region_share_an_element_with_it(
    data: st.DataObject,
) -> None:
    shape = data.draw(shapes(max_ndim=3, max_size=7))
    chunk = tuple(data.draw(st.integers(1, max(1, n) + 1)) for n in shape)
    array = ArraySpec("w", shape, DType.INT16, chunk)
    whole = Region.whole(shape)
    regions = [array.chunk_region(index).intersect(whole) for index in array.chunk_indices()]

    assert all(regions)
    assert (times_covered(shape, [region for region in regions if region]) == 1).all()
    assert len(regions) == array.num_chunks
    region = data.draw(regions_in(shape))
    touched = [i for i in array.chunk_indices() if array.chunk_region(i).intersect(region)]

    assert list(region.cells(array.chunk_shape)) == touched
