"""Inner chunks are read in runs that make up a region, and few of them beside it."""

from itertools import product
from math import prod
from operator import add

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dist_ckpt_strategies.core.array import ArraySpec, DType, Region
from dist_ckpt_strategies.core.chunk_grids import cut_chunk
from dist_ckpt_strategies.core.inner_grid import InnerGrid
from tests.support.regions import regions_in


@settings(max_examples=1000)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 4), st.integers(1, 3)), max_size=3),
    st.integers(1, 7),
    st.data(),
)
def test_runs_are_contiguous_and_make_up_the_region(
    dims: list[tuple[int, int, int]], max_chunks: int, data: st.DataObject
) -> None:
    shape, inner = tuple(n for n, _, _ in dims), tuple(i for _, i, _ in dims)
    chunk = tuple(i * k for _, i, k in dims)
    array = ArraySpec("a", shape, DType.INT16, chunk, inner_shape=inner)
    grid = InnerGrid.of(array, data.draw(st.sampled_from(list(array.chunk_indices()))))
    region = data.draw(regions_in(shape).filter(lambda region: region.numel))
    offsets = list(product(*map(range, grid.counts)))

    seen: list[int] = []
    for run in grid.runs(region, max_chunks * grid.stored_nbytes):
        assert run.num_chunks <= max_chunks
        numbers = range(run.first, run.first + run.num_chunks)
        moved = (tuple(map(add, run.offset, at)) for at in product(*map(range, run.shape)))
        assert [offsets[n] for n in numbers] == list(moved)
        seen += numbers
    wanted = [n for n, at in enumerate(offsets) if grid.region_of(at).intersect(region)]
    assert seen == wanted
    whole = [n for run in grid.runs() for n in range(run.first, run.first + run.num_chunks)]
    assert whole == list(range(grid.num_chunks))

    if grid.is_flat:  # written out of the array's own memory
        elements = np.arange(grid.region.numel).reshape(grid.region.shape)
        held = [elements[grid.region_of(at).within(grid.region).slices()].ravel() for at in offsets]
        assert np.concatenate(held).tolist() == list(range(elements.size))
        assert all(one.size == prod(inner) for one in held[:-1])


@pytest.mark.parametrize("hidden", [1024, 1536, 4096])
@pytest.mark.parametrize(("saved_axis", "wanted_axis"), [(0, 0), (0, 1), (1, 0), (1, 1)])
@pytest.mark.parametrize(("saved_parts", "wanted_parts"), [(2, 4), (4, 2), (1, 4), (8, 2)])
def test_another_layout_reads_little_more_than_it_needs(
    hidden: int, saved_parts: int, wanted_parts: int, saved_axis: int, wanted_axis: int
) -> None:
    """Over the matrices of a transformer layer; a change of axis, which no layout makes, more."""
    read = needed = 0
    for shape in [(3 * hidden, hidden), (4 * hidden, hidden), (hidden, 4 * hidden)]:
        chunk = divided(shape, saved_axis, saved_parts)
        cut = cut_chunk(chunk, shape, 2, is_movable=False)
        assert cut is not None
        array = ArraySpec("w", shape, DType.BFLOAT16, cut.chunk_shape, inner_shape=cut.inner_shape)
        region = Region((0, 0), divided(shape, wanted_axis, wanted_parts))
        needed += region.numel * array.dtype.itemsize
        for index in region.cells(array.chunk_shape):
            grid = InnerGrid.of(array, index)
            runs = grid.runs(region, 8 * grid.stored_nbytes)
            read += sum(run.num_chunks * grid.stored_nbytes for run in runs)

    is_change_of_axis = saved_parts > 1 and saved_axis != wanted_axis
    assert read <= (wanted_parts if is_change_of_axis else 1.1) * needed


def divided(shape: tuple[int, ...], axis: int, parts: int) -> tuple[int, ...]:
    return tuple(n // parts if dim == axis else n for dim, n in enumerate(shape))
