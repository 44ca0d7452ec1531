"""Chunk files of format 2: every element bit for bit, and TensorStore reads them too."""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
import pytest
import tensorstore as ts
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

from dist_ckpt_strategies.config import Options
from dist_ckpt_strategies.core.array import ArraySpec, DType, Region
from dist_ckpt_strategies.core.chunk_grids import cut_chunk
from dist_ckpt_strategies.formats.arrays import DirectoryReader, DirectoryWriter
from dist_ckpt_strategies.formats.chunks import chunk_name
from dist_ckpt_strategies.formats.manifest import ArrayRecord, array_fields, array_record
from dist_ckpt_strategies.formats.zarr2_python import register_extension_dtypes
from dist_ckpt_strategies.formats.zarr3 import array_directory
from dist_ckpt_strategies.storage.store import ArrayRead, ArrayWrite
from tests.support.samples import Values, random_values, same_bytes

OPTIONS = Options()
TIMEOUT_S = 60.0


@st.composite
def cut_arrays(draw: st.DrawFn) -> ArraySpec:
    """An array of few dims with chunks and inner chunks, cut at the array's edge or not."""
    dims = draw(st.lists(st.tuples(*[st.integers(1, 4)] * 3), max_size=3))
    inner = tuple(i for i, _, _ in dims)
    chunk = tuple(i * k for i, k, _ in dims)
    shape = tuple(
        max(1, c * n - draw(st.integers(0, c - 1)))
        for c, (_, _, n) in zip(chunk, dims, strict=True)
    )
    dtype = draw(st.sampled_from(list(DType)))
    return ArraySpec("some.key", shape, dtype, chunk, inner_shape=inner)


def write(root: Path, array: ArraySpec, values: Values, options: Options = OPTIONS) -> ArrayRecord:
    """Write all of an array; what the manifest would say about it."""
    writer = DirectoryWriter(root, options)
    writer.begin_creates([array]).wait(TIMEOUT_S)
    whole = Region.whole(array.shape)
    regions = [r for i in array.chunk_indices() if (r := array.chunk_region(i).intersect(whole))]
    writes = [ArrayWrite(array, region, values[region.slices()]) for region in regions]
    writer.begin_writes(writes).wait(TIMEOUT_S)
    writer.begin_syncs([array]).wait(TIMEOUT_S)
    digests = {index: found for (_, index), found in writer.digests.items()}
    return array_record(array_fields(array, 3, digests))


def read(
    root: Path,
    record: ArrayRecord,
    region: Region,
    target: Values,
    options: Options = OPTIONS,
) -> None:
    """Read a box and verify it."""
    reader = DirectoryReader(root, options, lambda key: {record.array.key: record}[key])
    reader.begin_reads([ArrayRead(record.array, region, target)]).wait(TIMEOUT_S)


def some_box(data: st.DataObject, shape: tuple[int, ...]) -> Region:
    low = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    high = tuple(data.draw(st.integers(a + 1, n)) for a, n in zip(low, shape, strict=True))
    return Region(low, tuple(b - a for a, b in zip(low, high, strict=True)))


def reversed_in_memory(values: Values) -> Values:
    """The same elements, with the memory order of the dims reversed."""
    return values.T.copy(order="C").T


@settings(max_examples=150)
@given(cut_arrays(), st.booleans(), st.data())
def test_every_box_comes_back_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory, array: ArraySpec, strided: bool, data: st.DataObject
) -> None:
    root = tmp_path_factory.mktemp("arrays")
    values = random_values(array.shape, array.dtype)
    record = write(root, array, reversed_in_memory(values) if strided else values)
    box = some_box(data, array.shape)

    target = random_values(box.shape, array.dtype, seed=1)
    target = reversed_in_memory(target) if data.draw(st.booleans()) else target
    read(root, record, box, target)

    assert target.tobytes() == values[box.slices()].tobytes()
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{root}/arrays/some.key"}}
    stored = ts.open(spec | {"fill_missing_data_reads": False}, open=True).result()
    assert stored.read().result().tobytes() == values.tobytes()


@pytest.mark.parametrize("dtype", DType)
def test_zarr_python_reads_every_dtype(dtype: DType, tmp_path: Path) -> None:
    """Of a grid of chunks whose last ones reach past the array's edge."""
    register_extension_dtypes()
    array = ArraySpec("w", (7, 10), dtype, (4, 6), inner_shape=(2, 3))
    values = random_values(array.shape, dtype)
    write(tmp_path, array, values)

    found = zarr.open_array(str(tmp_path / "arrays" / "w"), mode="r", zarr_format=3)[...]

    assert same_bytes(np.asarray(found), values)


@pytest.mark.parametrize("is_direct", [False, True], ids=["buffered", "direct"])
@pytest.mark.parametrize("shape", [(3_000_017,), (2500, 1300), (5, 700, 400)])
def test_large_chunks_come_back_on_every_path(
    shape: tuple[int, ...], is_direct: bool, tmp_path: Path
) -> None:
    cut = cut_chunk(shape, shape, 4, is_movable=False)
    assert cut is not None
    array = ArraySpec("w", shape, DType.FLOAT32, cut.chunk_shape, inner_shape=cut.inner_shape)
    values = random_values(shape, DType.FLOAT32)
    options = OPTIONS.with_changes(direct_io=is_direct)
    record = write(tmp_path, array, values, options)
    drop_from_cache(tmp_path / chunk_name(array, (0,) * len(shape)))

    target = np.zeros(shape, np.float32)
    read(tmp_path, record, Region.whole(shape), target, options)
    box = Region(tuple(n // 3 for n in shape), tuple(n // 2 for n in shape))
    part = np.zeros(box.shape, np.float32)
    read(tmp_path, record, box, part, options)

    assert target.tobytes() == values.tobytes()
    assert part.tobytes() == values[box.slices()].tobytes()


def drop_from_cache(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(handle)


@given(st.text(max_size=40), st.text(max_size=40))
def test_no_two_keys_share_a_directory(one: str, other: str) -> None:
    names = {array_directory(one), array_directory(other)}

    assert len(names) == len({one, other})
    assert all(re.fullmatch(r"arrays/[A-Za-z0-9_%-][A-Za-z0-9._%-]{0,199}", name) for name in names)


def test_a_plain_key_is_its_own_directory() -> None:
    key = "decoder.layers.0.mlp.linear_fc1.weight"
    assert array_directory(key) == f"arrays/{key}"
    assert array_directory("a/b") == "arrays/a%2Fb"
    assert array_directory(".hidden") == "arrays/%2Ehidden"
    assert len(array_directory("k" * 5000)) < 200


def test_a_rank_without_arrays_flushes_what_is_there_file_by_file(tmp_path: Path) -> None:
    options = OPTIONS.with_changes(whole_flush=False)
    array = ArraySpec("w", (4,), DType.INT8, (4,), inner_shape=(2,))

    DirectoryWriter(tmp_path, options).begin_syncs([]).wait(TIMEOUT_S)
    record = write(tmp_path, array, random_values((4,), DType.INT8), options)

    target = np.zeros(4, np.int8)
    read(tmp_path, record, Region((0,), (4,)), target)
    assert target.tobytes() == random_values((4,), DType.INT8).tobytes()
