"""Runs of bytes read one by one give what slicing the array gives."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_ckpt_strategies.core import inner_grid as spans
from dist_ckpt_strategies.core.array import ArraySpec, DType, Region, Shape
from dist_ckpt_strategies.core.inner_grid import ChunkSpans, raw_spans
from tests.support.boxes import regions_in, shapes
from tests.support.samples import Values


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
