"""The chunk grid of an array."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from dist_ckpt_strategies.core.array import ArraySpec, DType
from dist_ckpt_strategies.core.region import Region
from tests.support.boxes import regions_in, shapes, times_covered


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

    assert list(array.chunks_of(box)) == touched


def test_a_scalar_is_one_chunk_called_0() -> None:
    scalar = ArraySpec("step", (), DType.INT64, ())

    assert list(scalar.chunk_indices()) == list(scalar.chunks_of(Region.whole(()))) == [()]
    assert (scalar.num_chunks, scalar.nbytes, scalar.chunk_nbytes) == (1, 8, 8)
    assert scalar.chunk_name(()) == "0"


def test_an_edge_chunk_has_the_size_of_a_whole_one_in_its_file() -> None:
    array = ArraySpec("w", (5, 3), DType.FLOAT32, (2, 2))

    assert array.chunk_nbytes == 16
    assert array.nbytes == 60
    assert array.grid == (3, 2)
    assert array.num_chunks == math.prod(array.grid)
