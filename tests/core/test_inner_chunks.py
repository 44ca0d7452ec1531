"""Inner chunks divide, are small and make up the file; runs of bytes are what slicing gives."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dist_ckpt_strategies.core import inner_grid as spans
from dist_ckpt_strategies.core.array import ArraySpec, DType, Region, Shape
from dist_ckpt_strategies.core.chunk_grids import MAX_NBYTES, cut_chunk
from dist_ckpt_strategies.core.inner_grid import ChunkSpans, InnerGrid, raw_spans
from tests.support.boxes import regions_in, shapes
from tests.support.samples import Values

extents = st.one_of(st.integers(1, 40), st.sampled_from([97, 128, 1009, 4096, 12288, 25129, 50257]))


@st.composite
def chunked(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A shape and a chunk shape that is not larger."""
    shape = tuple(draw(st.lists(extents, min_size=0, max_size=3)))
    num = [draw(st.sampled_from([1, 1, 2, 3, 8])) for _ in shape]
    return shape, tuple(-(-n // k) for n, k in zip(shape, num, strict=True))


@given(chunked(), st.sampled_from([1, 2, 4, 16]), st.booleans())
def test_inner_chunks_divide_the_chunk_and_are_small(
    sizes: tuple[tuple[int, ...], tuple[int, ...]], itemsize: int, is_movable: bool
) -> None:
    shape, chunk = sizes
    cut = cut_chunk(chunk, shape, itemsize, is_movable=is_movable)

    if cut is None:
        assert not is_movable
        return
    assert all(c % i == 0 for c, i in zip(cut.chunk_shape, cut.inner_shape, strict=True))
    assert math.prod(cut.inner_shape) * itemsize <= MAX_NBYTES
    for now, before, extent, inner in zip(
        cut.chunk_shape, chunk, shape, cut.inner_shape, strict=True
    ):
        assert before <= now < before + inner
        assert is_movable or now == before or before >= extent


@settings(max_examples=100)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 4), st.integers(1, 3)), max_size=3),
    st.integers(1, 7),
    st.data(),
)
def test_runs_are_contiguous_and_make_up_the_box(
    dims: list[tuple[int, int, int]], max_chunks: int, data: st.DataObject
) -> None:
    shape = tuple(n for n, _, _ in dims)
    inner = tuple(i for _, i, _ in dims)
    chunk = tuple(i * k for _, i, k in dims)
    array = ArraySpec("a", shape, DType.INT16, chunk, inner_shape=inner)
    index = data.draw(st.sampled_from(list(array.chunk_indices())))
    grid = InnerGrid.of(array, index)
    region = _some_box(data, shape)

    runs = list(grid.runs(region, max_chunks * grid.stored_nbytes))

    offsets = [tuple(n) for n in _offsets(grid.counts)]
    seen = []
    for run in runs:
        assert run.num_chunks <= max(1, max_chunks)
        numbers = [
            offsets.index(tuple(a + b for a, b in zip(run.offset, o, strict=True)))
            for o in _offsets(run.shape)
        ]
        assert numbers == list(range(run.first, run.first + run.num_chunks))
        seen += numbers
    wanted = [n for n, o in enumerate(offsets) if grid.region_of(o).intersect(region)]
    assert seen == wanted
    assert [n for run in grid.runs() for n in range(run.first, run.first + run.num_chunks)] == list(
        range(grid.num_chunks)
    )


def _some_box(data: st.DataObject, shape: tuple[int, ...]) -> Region:
    low = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    high = tuple(data.draw(st.integers(a + 1, n)) for a, n in zip(low, shape, strict=True))
    return Region(low, tuple(b - a for a, b in zip(low, high, strict=True)))


def _offsets(counts: tuple[int, ...]) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = [()]
    for count in counts:
        found = [(*one, n) for one in found for n in range(count)]
    return found


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
        box = Region((0, 0), divided(shape, wanted_axis, wanted_parts))
        needed += box.numel * array.dtype.itemsize
        for index in box.cells(array.chunk_shape):
            grid = InnerGrid.of(array, index)
            runs = grid.runs(box, 8 * grid.stored_nbytes)
            read += sum(run.num_chunks * grid.stored_nbytes for run in runs)

    is_change_of_axis = saved_parts > 1 and saved_axis != wanted_axis
    assert read <= (wanted_parts if is_change_of_axis else 1.1) * needed


def divided(shape: tuple[int, ...], axis: int, parts: int) -> tuple[int, ...]:
    return tuple(n // parts if dim == axis else n for dim, n in enumerate(shape))


def chunk_files(array: ArraySpec, values: Values) -> dict[Shape, bytes]:
    """What each chunk's file holds; the part past the array's edge is filled with 0xEE."""
    files = {}
    for index in array.chunk_indices():
        box = array.chunk_region(index)
        inside = box.intersect(Region.whole(array.shape))
        assert inside is not None
        chunk = np.full(array.chunk_nbytes, 0xEE, np.uint8).view(values.dtype)
        chunk = chunk.reshape(array.chunk_shape)
        chunk[inside.within(box).slices()] = values[inside.slices()]
        files[index] = chunk.tobytes()
    return files


def fill(
    region: Region, found: tuple[ChunkSpans, ...], files: dict[Shape, bytes], itemsize: int
) -> bytes:
    target = bytearray(b"\xdd" * (region.numel * itemsize))
    written = np.zeros(len(target), int)
    for chunk in found:
        for in_file, in_target in chunk.offsets:
            run = files[chunk.index][in_file : in_file + chunk.span_nbytes]
            assert len(run) == chunk.span_nbytes
            target[in_target : in_target + chunk.span_nbytes] = run
            written[in_target : in_target + chunk.span_nbytes] += 1
    assert (written == 1).all()
    return bytes(target)


@given(st.data())
def test_the_bytes_equal_numpy_slicing(data: st.DataObject) -> None:
    shape = data.draw(shapes(max_size=6))
    chunk = tuple(data.draw(st.integers(1, max(1, n) + 1)) for n in shape)
    region = data.draw(regions_in(shape))
    dtype = data.draw(st.sampled_from([DType.UINT8, DType.INT32, DType.COMPLEX128]))
    array = ArraySpec("w", shape, dtype, chunk)
    values = np.arange(np.prod(shape, dtype=int)).astype(dtype.numpy).reshape(shape)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spans, "MIN_SPAN_NBYTES", 0)  # small arrays, all kinds of runs
        found = raw_spans(array, region)

    assert found is not None
    read = fill(region, found, chunk_files(array, values), dtype.itemsize)
    assert read == values[region.slices()].tobytes()
