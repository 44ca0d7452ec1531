"""The contract of every array store, over each ENGINE, and one engine reading the other's files."""

from __future__ import annotations

import itertools
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dist_ckpt_strategies.config import Engine
from dist_ckpt_strategies.core.array import ArraySpec, DType, Region, Shape
from dist_ckpt_strategies.errors import (
    CorruptCheckpointError,
    IncompleteCheckpointError,
    StorageError,
)
from dist_ckpt_strategies.formats.zarr2 import array_keys
from dist_ckpt_strategies.storage.store import ArrayRead, ArrayWrite
from tests.support.boxes import regions_in, shapes
from tests.support.leaks import threads_left
from tests.support.samples import (
    array_of,
    random_values,
    same_bytes,
    whole_of,
)
from tests.support.stores import (
    TIMEOUT_S,
    chunk_files,
    read_array,
    read_into,
    store_of,
    write_array,
)

ENGINE = Engine.TENSORSTORE
FRESH = itertools.count()
FEWER = settings(max_examples=25)


def new_root(tmp_path: Path) -> Path:
    root = tmp_path / f"example{next(FRESH)}"
    root.mkdir()
    return root


# What is written is what is read


@pytest.mark.parametrize("dtype", DType, ids=lambda dtype: dtype.value)
def test_a_strided_target_receives_every_bit_and_nothing_beside_it_changes(
    dtype: DType, tmp_path: Path
) -> None:
    values = random_values((6, 4), dtype)
    array = write_array(tmp_path, ENGINE, values, chunk=(4, 3))
    frame = random_values((12, 9), dtype, seed=1)
    expected = frame.copy()
    expected[1::2, 1::2] = values
    read_into(tmp_path, ENGINE, array, whole_of(array), frame[1::2, 1::2])

    assert same_bytes(frame, expected)
    assert same_bytes(read_array(tmp_path, ENGINE), values)


@FEWER
@given(data=st.data())
def test_any_box_of_any_array_in_any_chunks_is_read_right(
    data: st.DataObject, tmp_path: Path
) -> None:
    root = new_root(tmp_path)
    shape = data.draw(shapes(max_ndim=4, max_size=6))
    chunk = tuple(data.draw(st.integers(1, max(1, n) + 2)) for n in shape)
    values = random_values(shape, DType.INT32)
    array = write_array(root, ENGINE, values, chunk=chunk)
    box = data.draw(regions_in(shape))

    assert same_bytes(read_array(root, ENGINE, region=box), values[box.slices()])
    columns = np.zeros(box.shape[::-1], values.dtype).T
    read_into(root, ENGINE, array, box, columns)
    assert np.array_equal(columns, values[box.slices()])


@pytest.mark.parametrize("shape", [(0,), (0, 5), (3, 0, 2)])
def test_an_array_without_elements_is_its_metadata_alone(shape: Shape, tmp_path: Path) -> None:
    values = np.zeros(shape, np.float32)
    write_array(tmp_path, ENGINE, values)

    assert same_bytes(read_array(tmp_path, ENGINE), values)
    assert [path.name for path in (tmp_path / "w").iterdir()] == [".zarray"]


def test_an_edge_chunk_has_the_bytes_of_a_whole_chunk(tmp_path: Path) -> None:
    values = np.arange(10, dtype=np.int16).reshape(5, 2)
    array = write_array(tmp_path, ENGINE, values, chunk=(3, 2))

    contents = [path.read_bytes() for path in chunk_files(tmp_path, array)]
    assert contents[0] == values[:3].tobytes()
    assert contents[1][:8] == values[3:].tobytes()
    assert [len(content) for content in contents] == [12, 12]


# Keys


@pytest.mark.parametrize(
    "key",
    [
        "decoder.layers.0.mlp.linear_fc1.weight",
        "optimizer/state/exp_avg.w",
        "a/b/c/d/e/f",
        "0",
        "0.0",
        "key with spaces",
        "ü✓.重み",
        "100%25 ?#&=;:'\"*[]{}$(x)|<y>~",
        "line\nbreak\ttab",
        "NOT_FOUND.RESOURCE_EXHAUSTED",
        "-rf",
        "x" * 255,
        "/".join(["y" * 255] * 8),
    ],
    ids=lambda key: key[:24],
)
def test_odd_keys_are_stored_under_their_own_name(key: str, tmp_path: Path) -> None:
    values = random_values((4, 3), DType.FLOAT32)
    write_array(tmp_path, ENGINE, values, key=key, chunk=(2, 3))

    assert same_bytes(read_array(tmp_path, ENGINE, key), values)
    assert (tmp_path / key / ".zarray").is_file()
    assert list(array_keys(tmp_path)) == [key]


BLOCK = 4096
LARGE = [
    (64 << 10) - 1,
    64 << 10,
    (64 << 10) + 1,
    (256 << 10) + BLOCK,
    (256 << 10) + BLOCK - 7,
    (4 << 20) + 3 * BLOCK + 5,
    (16 << 20) + 12345,
]
"""Around the sizes at which files are cut, and go past the page cache."""

DISKS = pytest.mark.parametrize("place", ["disk", "memory"])


@pytest.fixture
def large_root(place: str, tmp_path: Path) -> Iterator[Path]:
    if place == "disk":
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        yield Path(directory)


def forget_cached(path: Path) -> None:
    """Have the next read of a file come from the disk."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@DISKS
@pytest.mark.parametrize("cached", [True, False], ids=["cached", "cold"])
@pytest.mark.parametrize("size", LARGE)
def test_large_chunks_of_any_size_come_back(size: int, cached: bool, large_root: Path) -> None:
    values = random_values((size + 1,), DType.UINT8)[1:]  # at an odd address
    array = write_array(large_root, ENGINE, values)
    (path,) = chunk_files(large_root, array)
    assert path.stat().st_size == size
    if not cached:
        forget_cached(path)
    target = np.zeros(size + 1, np.uint8)[1:]
    read_into(large_root, ENGINE, array, whole_of(array), target)

    assert same_bytes(target, values)


@DISKS
@pytest.mark.parametrize("start", [0, 1, BLOCK - 1, BLOCK, (256 << 10) + 3])
@pytest.mark.parametrize("length", [1, BLOCK + 1, (300 << 10) - 5, (4 << 20) + BLOCK])
def test_any_stretch_of_a_cold_file_is_read_right(
    start: int, length: int, large_root: Path
) -> None:
    values = random_values(((5 << 20) + 77,), DType.UINT8)
    array = write_array(large_root, ENGINE, values)
    forget_cached(*chunk_files(large_root, array))
    region = Region((start,), (length,))

    assert same_bytes(read_array(large_root, ENGINE, region=region), values[region.slices()])


@pytest.mark.parametrize("size", [300_000, 5_000_000])
@pytest.mark.parametrize("cut_to", [0.0, 0.3, 0.9999])
def test_a_large_file_cut_short_is_damaged_also_when_it_is_cold(
    cut_to: float, size: int, tmp_path: Path
) -> None:
    array = write_array(tmp_path, ENGINE, random_values((size,), DType.UINT8))
    (path,) = chunk_files(tmp_path, array)
    os.truncate(path, int(size * cut_to))
    forget_cached(path)

    with pytest.raises(CorruptCheckpointError, match=f"^w: .*{path}"):
        read_array(tmp_path, ENGINE)


# What is wrong on disk


def four_chunks(root: Path, engine: Engine) -> ArraySpec:
    values = random_values((8, 4), DType.FLOAT32)
    return write_array(root, ENGINE, values, chunk=(2, 4), key="layer.w")


def test_a_pipe_in_the_place_of_a_chunk_is_an_error_and_not_waited_for(tmp_path: Path) -> None:
    bad = chunk_files(tmp_path, four_chunks(tmp_path, ENGINE))[1]
    bad.unlink()
    os.mkfifo(bad)

    with pytest.raises(CorruptCheckpointError, match="has 0 bytes, expected 32"):
        read_array(tmp_path, ENGINE, "layer.w")


def test_chunks_that_are_not_asked_for_may_be_missing(tmp_path: Path) -> None:
    array = four_chunks(tmp_path, ENGINE)
    chunk_files(tmp_path, array)[3].unlink()

    assert read_array(tmp_path, ENGINE, "layer.w", Region((0, 0), (6, 4))).shape == (6, 4)


def test_no_read_touches_its_target_once_the_failure_of_one_is_reported(tmp_path: Path) -> None:
    values = random_values((512, 256), DType.FLOAT32)
    fine = [write_array(tmp_path, ENGINE, values, key=f"fine{n}") for n in range(4)]
    bad = four_chunks(tmp_path, ENGINE)
    chunk_files(tmp_path, bad)[0].unlink()
    targets = [np.zeros((512, 256), np.float32) for _ in fine]
    reads = [ArrayRead(bad, whole_of(bad), np.zeros((8, 4), np.float32))] + [
        ArrayRead(a, whole_of(a), t) for a, t in zip(fine, targets, strict=True)
    ]

    before = threading.enumerate()
    with pytest.raises(IncompleteCheckpointError, match=r"layer\.w"):
        store_of(tmp_path, ENGINE).begin_reads(reads).wait(TIMEOUT_S)
    left = [target.copy() for target in targets]
    time.sleep(0.1)
    assert all(same_bytes(t, copy) for t, copy in zip(targets, left, strict=True))
    assert threads_left(before, prefix="dist-ckpt-io") == []


# Disks that do not take what is written


@pytest.mark.parametrize("chunk", [4, 5], ids=["whole chunk", "padded chunk"])
def test_a_path_too_long_for_the_file_system_is_an_error_that_says_so(
    chunk: int, tmp_path: Path
) -> None:
    key = "/".join(["y" * 250] * 20)
    values = np.zeros((4,), np.float32)
    array = array_of(values, (chunk,), key)
    store = store_of(tmp_path, ENGINE)

    with pytest.raises(StorageError) as caught:
        store.begin_writes([ArrayWrite(array, whole_of(array), values)]).wait(TIMEOUT_S)
    assert caught.value.key == key
    assert "too long" in str(caught.value).lower()
