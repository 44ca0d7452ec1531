"""The contract of every array store, over each engine, and one engine reading the other's files."""

from __future__ import annotations

import itertools
import math
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
from dist_ckpt_strategies.core.array import ArraySpec, DType
from dist_ckpt_strategies.core.region import Region, Shape
from dist_ckpt_strategies.errors import (
    CheckpointError,
    CorruptCheckpointError,
    IncompleteCheckpointError,
    StorageError,
)
from dist_ckpt_strategies.formats.zarr2 import Zarr2Layout
from dist_ckpt_strategies.storage.base import ArrayRead, ArrayWrite
from tests.support.boxes import regions_in, shapes
from tests.support.disks import fill_disk, read_only
from tests.support.leaks import threads_left
from tests.support.samples import (
    Values,
    array_of,
    nan_payloads,
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

WITH_NAN_PAYLOADS = [
    d for d in DType if ("float" in d.value and "float8" not in d.value) or "complex" in d.value
]
FRESH = itertools.count()
FEWER = settings(max_examples=25)


def new_root(tmp_path: Path) -> Path:
    root = tmp_path / f"example{next(FRESH)}"
    root.mkdir()
    return root


# What is written is what is read


@pytest.mark.parametrize("dtype", DType, ids=lambda dtype: dtype.value)
def test_every_type_comes_back_with_every_bit(
    dtype: DType, writer: Engine, reader: Engine, tmp_path: Path
) -> None:
    values = random_values((7, 5), dtype)
    write_array(tmp_path, writer, values, chunk=(3, 5))

    assert same_bytes(read_array(tmp_path, reader), values)


@pytest.mark.parametrize("dtype", WITH_NAN_PAYLOADS, ids=lambda dtype: dtype.value)
def test_nans_keep_sign_and_payload(
    dtype: DType, writer: Engine, reader: Engine, tmp_path: Path
) -> None:
    values = nan_payloads(dtype)
    with np.errstate(invalid="ignore"):
        assert np.isnan(values).all()
    write_array(tmp_path, writer, values, chunk=(3,))

    assert same_bytes(read_array(tmp_path, reader), values)


@pytest.mark.parametrize("dtype", DType, ids=lambda dtype: dtype.value)
def test_a_strided_target_receives_every_bit_and_nothing_beside_it_changes(
    dtype: DType, engine: Engine, tmp_path: Path
) -> None:
    values = random_values((6, 4), dtype)
    array = write_array(tmp_path, engine, values, chunk=(4, 3))
    frame = random_values((12, 9), dtype, seed=1)
    expected = frame.copy()
    expected[1::2, 1::2] = values
    read_into(tmp_path, engine, array, whole_of(array), frame[1::2, 1::2])

    assert same_bytes(frame, expected)


@FEWER
@given(data=st.data())
def test_any_box_of_any_array_in_any_chunks_is_read_right(
    data: st.DataObject, writer: Engine, reader: Engine, tmp_path: Path
) -> None:
    root = new_root(tmp_path)
    shape = data.draw(shapes(max_ndim=4, max_size=6))
    chunk = tuple(data.draw(st.integers(1, max(1, n) + 2)) for n in shape)
    values = random_values(shape, DType.INT32)
    array = write_array(root, writer, values, chunk=chunk)
    box = data.draw(regions_in(shape))

    assert same_bytes(read_array(root, reader, region=box), values[box.slices()])
    columns = np.zeros(box.shape[::-1], values.dtype).T
    read_into(root, reader, array, box, columns)
    assert np.array_equal(columns, values[box.slices()])


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16, DType.BOOL, DType.COMPLEX128])
def test_a_scalar_comes_back(dtype: DType, writer: Engine, reader: Engine, tmp_path: Path) -> None:
    values = random_values((), dtype)
    array = write_array(tmp_path, writer, values)

    assert same_bytes(read_array(tmp_path, reader), values)
    assert [path.name for path in chunk_files(tmp_path, array)] == ["0"]
    assert (tmp_path / "w" / "0").stat().st_size == dtype.itemsize


@pytest.mark.parametrize("shape", [(0,), (0, 5), (3, 0, 2)])
def test_an_array_without_elements_is_its_metadata_alone(
    shape: Shape, writer: Engine, reader: Engine, tmp_path: Path
) -> None:
    values = np.zeros(shape, np.float32)
    write_array(tmp_path, writer, values)

    assert same_bytes(read_array(tmp_path, reader), values)
    assert [path.name for path in (tmp_path / "w").iterdir()] == [".zarray"]


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16, DType.FLOAT8_E4M3FN, DType.BOOL])
def test_zeros_are_really_stored(dtype: DType, engine: Engine, tmp_path: Path) -> None:
    array = write_array(tmp_path, engine, np.zeros((5, 4), dtype.numpy), chunk=(2, 4))

    sizes = [path.stat().st_size for path in chunk_files(tmp_path, array)]
    assert sizes == [array.chunk_nbytes] * 3


def test_an_edge_chunk_has_the_bytes_of_a_whole_chunk(engine: Engine, tmp_path: Path) -> None:
    values = np.arange(10, dtype=np.int16).reshape(5, 2)
    array = write_array(tmp_path, engine, values, chunk=(3, 2))

    contents = [path.read_bytes() for path in chunk_files(tmp_path, array)]
    assert contents[0] == values[:3].tobytes()
    assert contents[1][:8] == values[3:].tobytes()
    assert [len(content) for content in contents] == [12, 12]


def test_both_engines_write_the_same_files(tmp_path: Path) -> None:
    values = random_values((5, 3), DType.BFLOAT16)
    found = []
    for engine in Engine:
        root = tmp_path / engine.value
        root.mkdir()
        write_array(root, engine, values, chunk=(2, 3), key="a/b.c")
        files = sorted(path for path in root.rglob("*") if path.is_file())
        found.append({str(path.relative_to(root)): path.read_bytes() for path in files})

    assert found[0] == found[1]
    assert set(found[0]) == {f"a/b.c/{name}" for name in (".zarray", "0.0", "1.0", "2.0")}


def test_chunks_written_by_several_stores_make_up_one_array(
    writer: Engine, reader: Engine, tmp_path: Path
) -> None:
    values = random_values((8, 6), DType.FLOAT64)
    array = array_of(values, (3, 6))
    store_of(tmp_path, writer).begin_creates([array]).wait(TIMEOUT_S)
    for index in array.chunk_indices():
        box = array.chunk_region(index).intersect(whole_of(array))
        assert box is not None
        write = ArrayWrite(array, box, np.ascontiguousarray(values[box.slices()]))
        store_of(tmp_path, writer).begin_writes([write]).wait(TIMEOUT_S)

    assert same_bytes(read_array(tmp_path, reader), values)


def test_chunks_may_be_written_before_the_metadata_of_their_array(
    engine: Engine, tmp_path: Path
) -> None:
    values = random_values((4,), DType.FLOAT32)
    array = array_of(values)
    store = store_of(tmp_path, engine)
    store.begin_writes([ArrayWrite(array, whole_of(array), values)]).wait(TIMEOUT_S)
    store.begin_creates([array]).wait(TIMEOUT_S)

    assert same_bytes(read_array(tmp_path, engine), values)


def test_writing_again_replaces_what_was_there(engine: Engine, tmp_path: Path) -> None:
    write_array(tmp_path, engine, random_values((6,), DType.INT64, seed=1), chunk=(2,))
    values = random_values((6,), DType.INT64, seed=2)
    write_array(tmp_path, engine, values, chunk=(2,))

    assert same_bytes(read_array(tmp_path, engine), values)


def test_the_source_is_left_untouched(engine: Engine, tmp_path: Path) -> None:
    values = random_values((64, 3), DType.BFLOAT16)
    before = values.copy()
    values.flags.writeable = False
    write_array(tmp_path, engine, values, chunk=(10, 3))

    assert same_bytes(values, before)


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
def test_odd_keys_are_stored_under_their_own_name(
    key: str, writer: Engine, reader: Engine, tmp_path: Path
) -> None:
    values = random_values((4, 3), DType.FLOAT32)
    write_array(tmp_path, writer, values, key=key, chunk=(2, 3))

    assert same_bytes(read_array(tmp_path, reader, key), values)
    assert (tmp_path / key / ".zarray").is_file()
    assert list(Zarr2Layout(tmp_path).keys()) == [key]


def test_arrays_may_lie_below_other_arrays(engine: Engine, tmp_path: Path) -> None:
    keys = ["a", "a/b", "a/b/c"]
    for number, key in enumerate(keys):
        write_array(tmp_path, engine, np.full((3,), number, np.int32), key=key)

    assert sorted(Zarr2Layout(tmp_path).keys()) == keys
    assert [int(read_array(tmp_path, engine, key)[0]) for key in keys] == [0, 1, 2]


def test_a_relative_root_is_the_working_directory_of_the_moment(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    values = random_values((3,), DType.FLOAT32)
    (tmp_path / "ckpt").mkdir()
    write_array(Path("ckpt"), engine, values)

    assert same_bytes(read_array(tmp_path / "ckpt", engine), values)


@pytest.mark.parametrize("root", ["there/../c", "there/./c", "there//c/", "link/../d/c"])
def test_a_root_may_be_written_in_any_way_that_the_system_takes(
    root: str, engine: Engine, tmp_path: Path
) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "elsewhere" / "d").mkdir(parents=True)
    (tmp_path / "elsewhere" / "e").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere" / "e")
    values = random_values((5, 3), DType.FLOAT32)
    for prefix in (str(tmp_path), f"/{tmp_path}"):
        place = Path(f"{prefix}/{root}")
        place.mkdir(exist_ok=True)
        write_array(place, engine, values, chunk=(2, 3))
        assert same_bytes(read_array(place, engine), values)
        assert (place / "w" / ".zarray").exists()


def test_a_root_that_tensorstore_would_misread_is_refused_or_used_as_it_is(
    engine: Engine, tmp_path: Path
) -> None:
    root = tmp_path / "back\\slash"
    root.mkdir()
    values = random_values((3,), DType.FLOAT32)
    try:
        write_array(root, engine, values)
    except StorageError as error:
        assert str(root) in str(error)  # noqa: PT017
    else:
        assert same_bytes(read_array(root, engine), values)
    assert list(tmp_path.iterdir()) == [root]


def test_thousands_of_arrays_are_transferred_at_once(engine: Engine, tmp_path: Path) -> None:
    num = {Engine.TENSORSTORE: 3000, Engine.ZARR: 300}[engine]  # zarr-python is slower
    store = store_of(tmp_path, engine)
    values = [np.full((2, 2), number, np.int32) for number in range(num)]
    arrays = [array_of(v, (1, 2), f"layer.{n}.w") for n, v in enumerate(values)]
    writes = [ArrayWrite(a, whole_of(a), v) for a, v in zip(arrays, values, strict=True)]
    store.begin_creates(arrays).wait(TIMEOUT_S)
    store.begin_writes(writes).wait(TIMEOUT_S)
    targets = [np.zeros((2, 2), np.int32) for _ in range(num)]
    reads = [ArrayRead(a, whole_of(a), t) for a, t in zip(arrays, targets, strict=True)]
    store.begin_reads(reads).wait(TIMEOUT_S)

    assert all(np.array_equal(v, t) for v, t in zip(values, targets, strict=True))


@pytest.mark.parametrize("strided", [False, True], ids=["dense", "strided"])
def test_many_boxes_of_one_array_are_read_at_once(
    strided: bool, engine: Engine, tmp_path: Path
) -> None:
    values = random_values((64, 64), DType.FLOAT32)
    array = write_array(tmp_path, engine, values, chunk=(16, 16))
    boxes = [Region((r, c), (9, 7)) for r in range(0, 50, 5) for c in range(0, 50, 7)]
    frames = [np.zeros((9, 14 if strided else 7), np.float32) for _ in boxes]
    targets = [frame[:, ::2] if strided else frame for frame in frames]
    reads = [ArrayRead(array, box, t) for box, t in zip(boxes, targets, strict=True)]
    store_of(tmp_path, engine).begin_reads(reads).wait(TIMEOUT_S)

    for box, target in zip(boxes, targets, strict=True):
        assert target.tobytes() == values[box.slices()].tobytes()


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
def test_large_chunks_of_any_size_come_back(
    size: int, cached: bool, engine: Engine, large_root: Path
) -> None:
    values = random_values((size + 1,), DType.UINT8)[1:]  # at an odd address
    array = write_array(large_root, engine, values)
    (path,) = chunk_files(large_root, array)
    assert path.stat().st_size == size
    if not cached:
        forget_cached(path)
    target = np.zeros(size + 1, np.uint8)[1:]
    read_into(large_root, engine, array, whole_of(array), target)

    assert same_bytes(target, values)


@DISKS
@pytest.mark.parametrize("start", [0, 1, BLOCK - 1, BLOCK, (256 << 10) + 3])
@pytest.mark.parametrize("length", [1, BLOCK + 1, (300 << 10) - 5, (4 << 20) + BLOCK])
def test_any_stretch_of_a_cold_file_is_read_right(
    start: int, length: int, engine: Engine, large_root: Path
) -> None:
    values = random_values(((5 << 20) + 77,), DType.UINT8)
    array = write_array(large_root, engine, values)
    forget_cached(*chunk_files(large_root, array))
    region = Region((start,), (length,))

    assert same_bytes(read_array(large_root, engine, region=region), values[region.slices()])


@pytest.mark.parametrize("size", [300_000, 5_000_000])
@pytest.mark.parametrize("cut_to", [0.0, 0.3, 0.9999])
def test_a_large_file_cut_short_is_damaged_also_when_it_is_cold(
    cut_to: float, size: int, engine: Engine, tmp_path: Path
) -> None:
    array = write_array(tmp_path, engine, random_values((size,), DType.UINT8))
    (path,) = chunk_files(tmp_path, array)
    os.truncate(path, int(size * cut_to))
    forget_cached(path)

    with pytest.raises(CorruptCheckpointError, match=f"^w: .*{path}"):
        read_array(tmp_path, engine)


def test_long_rows_of_a_large_chunk_are_read_in_shares(engine: Engine, tmp_path: Path) -> None:
    values = random_values((5, 1 << 20), DType.FLOAT64)
    array = write_array(tmp_path, engine, values, chunk=(5, 1 << 20))
    forget_cached(*chunk_files(tmp_path, array))
    half = Region((0, 1 << 19), (5, 1 << 19))

    assert same_bytes(read_array(tmp_path, engine, region=half), values[half.slices()])
    assert same_bytes(read_array(tmp_path, engine), values)


def test_nothing_to_transfer_is_done_at_once(engine: Engine, tmp_path: Path) -> None:
    store = store_of(tmp_path, engine)

    store.begin_creates([]).wait(TIMEOUT_S)
    store.begin_writes([]).wait(TIMEOUT_S)
    store.begin_reads([]).wait(TIMEOUT_S)


# What is wrong on disk


def four_chunks(root: Path, engine: Engine) -> ArraySpec:
    values = random_values((8, 4), DType.FLOAT32)
    return write_array(root, engine, values, chunk=(2, 4), key="layer.w")


TARGETS = pytest.mark.parametrize(
    "target",
    [np.zeros((8, 4), np.float32), np.zeros((8, 8), np.float32)[:, ::2]],
    ids=["dense", "strided"],
)


@TARGETS
def test_a_missing_chunk_is_an_error_that_names_key_and_file(
    target: Values, engine: Engine, tmp_path: Path
) -> None:
    array = four_chunks(tmp_path, engine)
    lost = chunk_files(tmp_path, array)[2]
    lost.unlink()

    with pytest.raises(IncompleteCheckpointError) as caught:
        read_into(tmp_path, engine, array, whole_of(array), target)
    assert str(caught.value).startswith("layer.w: ")
    assert str(lost) in str(caught.value)
    assert (caught.value.key, caught.value.path) == ("layer.w", str(lost))


@TARGETS
@pytest.mark.parametrize("size", [0, 1, 31, 33, 64, 4096])
def test_a_chunk_of_the_wrong_size_is_an_error_that_names_key_and_file(
    size: int, target: Values, engine: Engine, tmp_path: Path
) -> None:
    array = four_chunks(tmp_path, engine)
    bad = chunk_files(tmp_path, array)[1]
    bad.write_bytes((bad.read_bytes() * 200)[:size])

    with pytest.raises(CorruptCheckpointError) as caught:
        read_into(tmp_path, engine, array, whole_of(array), target)
    assert str(caught.value).startswith("layer.w: ")
    assert str(bad) in str(caught.value)
    assert (caught.value.key, caught.value.path) == ("layer.w", str(bad))


def test_what_is_wrong_is_not_told_from_words_in_the_key(engine: Engine, tmp_path: Path) -> None:
    values = random_values((8, 4), DType.FLOAT32)
    array = write_array(tmp_path, engine, values, chunk=(2, 4), key="NOT_FOUND.No space left")
    chunk_files(tmp_path, array)[1].write_bytes(b"short")

    target = np.zeros((8, 8), np.float32)[:, ::2]
    with pytest.raises(CorruptCheckpointError):
        read_into(tmp_path, engine, array, whole_of(array), target)


@TARGETS
def test_a_directory_in_the_place_of_a_chunk_is_an_error(
    target: Values, engine: Engine, tmp_path: Path
) -> None:
    array = four_chunks(tmp_path, engine)
    bad = chunk_files(tmp_path, array)[1]
    bad.unlink()
    bad.mkdir()

    with pytest.raises(StorageError, match=r"^layer\.w: ") as caught:
        read_into(tmp_path, engine, array, whole_of(array), target)
    assert caught.value.key == "layer.w"


def test_a_pipe_in_the_place_of_a_chunk_is_an_error_and_not_waited_for(
    engine: Engine, tmp_path: Path
) -> None:
    bad = chunk_files(tmp_path, four_chunks(tmp_path, engine))[1]
    bad.unlink()
    os.mkfifo(bad)

    with pytest.raises(CorruptCheckpointError, match="has 0 bytes, expected 32"):
        read_array(tmp_path, engine, "layer.w")


def test_chunks_that_are_not_asked_for_may_be_missing(engine: Engine, tmp_path: Path) -> None:
    array = four_chunks(tmp_path, engine)
    chunk_files(tmp_path, array)[3].unlink()

    assert read_array(tmp_path, engine, "layer.w", Region((0, 0), (6, 4))).shape == (6, 4)


def test_no_read_touches_its_target_once_the_failure_of_one_is_reported(
    engine: Engine, tmp_path: Path
) -> None:
    values = random_values((512, 256), DType.FLOAT32)
    fine = [write_array(tmp_path, engine, values, key=f"fine{n}") for n in range(4)]
    bad = four_chunks(tmp_path, engine)
    chunk_files(tmp_path, bad)[0].unlink()
    targets = [np.zeros((512, 256), np.float32) for _ in fine]
    reads = [ArrayRead(bad, whole_of(bad), np.zeros((8, 4), np.float32))] + [
        ArrayRead(a, whole_of(a), t) for a, t in zip(fine, targets, strict=True)
    ]

    before = threading.enumerate()
    with pytest.raises(IncompleteCheckpointError, match=r"layer\.w"):
        store_of(tmp_path, engine).begin_reads(reads).wait(TIMEOUT_S)
    left = [target.copy() for target in targets]
    time.sleep(0.1)
    assert all(same_bytes(t, copy) for t, copy in zip(targets, left, strict=True))
    assert threads_left(before, prefix="dist-ckpt-io") == []


def test_an_array_that_is_gone_altogether_is_an_error(engine: Engine, tmp_path: Path) -> None:
    array = array_of(np.zeros((4,), np.float32), key="gone")

    with pytest.raises(IncompleteCheckpointError, match=r"^gone: "):
        read_into(tmp_path, engine, array, whole_of(array), np.zeros((4,), np.float32))


# Disks that do not take what is written


def failing_write(
    root: Path, engine: Engine, num: int = 1, chunk_rows: int = 16
) -> CheckpointError:
    values = random_values((64, 512), DType.FLOAT32)
    arrays = [array_of(values, (chunk_rows, 512), f"layer.{n}") for n in range(num)]
    store = store_of(root, engine)
    with pytest.raises(StorageError) as caught:
        store.begin_writes([ArrayWrite(a, whole_of(a), values) for a in arrays]).wait(TIMEOUT_S)
    return caught.value


@pytest.mark.parametrize("chunk_rows", [16, 65], ids=["whole chunks", "padded chunk"])
def test_a_full_disk_is_an_error_that_names_key_file_and_remedy(
    chunk_rows: int, engine: Engine, small_disk: Path
) -> None:
    fill_disk(small_disk, leaving_nbytes=100_000)
    error = failing_write(small_disk, engine, chunk_rows=chunk_rows)

    assert error.key == "layer.0"
    assert str(error).startswith("layer.0: ")
    assert str(small_disk / "layer.0") in str(error)
    assert error.path is not None
    assert error.path.startswith(str(small_disk / "layer.0"))
    assert "no space left; free some" in str(error)


def test_a_disk_that_fills_up_under_many_writes_leaves_none_of_them_running(
    engine: Engine, small_disk: Path
) -> None:
    fill_disk(small_disk, leaving_nbytes=100_000)
    error = failing_write(small_disk, engine, num=8)
    size_then = sum(path.stat().st_size for path in small_disk.rglob("*") if path.is_file())

    assert "no space left" in str(error)
    size_now = sum(path.stat().st_size for path in small_disk.rglob("*") if path.is_file())
    assert size_then == size_now


def test_a_chunk_of_a_failed_write_is_whole_or_has_another_size(
    engine: Engine, small_disk: Path
) -> None:
    fill_disk(small_disk, leaving_nbytes=100_000)
    values = random_values((64, 512), DType.FLOAT32)
    failing_write(small_disk, engine, num=8)

    for path in small_disk.glob("layer.*/*.0"):
        start = 16 * int(path.name.partition(".")[0])
        if path.stat().st_size == 16 * 512 * 4:
            assert path.read_bytes() == values[start : start + 16].tobytes()


@pytest.mark.parametrize("chunk_rows", [16, 65], ids=["whole chunks", "padded chunk"])
def test_a_read_only_disk_is_an_error_that_names_key_file_and_reason(
    chunk_rows: int, engine: Engine, small_disk: Path
) -> None:
    with read_only(small_disk):
        error = failing_write(small_disk, engine, chunk_rows=chunk_rows)

    assert error.key == "layer.0"
    assert str(small_disk / "layer.0") in str(error)
    assert "read-only" in str(error).lower()


@pytest.mark.parametrize("state", ["full", "read-only"])
def test_metadata_that_cannot_be_written_is_an_error_that_names_key_and_file(
    state: str, engine: Engine, small_disk: Path
) -> None:
    array = array_of(np.zeros((4,), np.float32), key="layer.w")
    store = store_of(small_disk, engine)
    if state == "full":
        (small_disk / "layer.w").mkdir()
        fill_disk(small_disk)
        with pytest.raises(StorageError) as caught:
            store.begin_creates([array]).wait(TIMEOUT_S)
        assert "no space left; free some" in str(caught.value)
    else:
        with read_only(small_disk), pytest.raises(StorageError) as caught:
            store.begin_creates([array]).wait(TIMEOUT_S)
        assert "read-only" in str(caught.value).lower()

    assert caught.value.key == "layer.w"
    assert str(small_disk / "layer.w") in str(caught.value)


def test_a_file_in_the_place_of_a_directory_is_an_error(engine: Engine, tmp_path: Path) -> None:
    (tmp_path / "layer.0").write_text("in the way")
    error = failing_write(tmp_path, engine)

    assert error.key == "layer.0"
    assert (tmp_path / "layer.0").read_text() == "in the way"


@pytest.mark.parametrize("chunk", [4, 5], ids=["whole chunk", "padded chunk"])
def test_a_path_too_long_for_the_file_system_is_an_error_that_says_so(
    chunk: int, engine: Engine, tmp_path: Path
) -> None:
    key = "/".join(["y" * 250] * 20)
    values = np.zeros((4,), np.float32)
    array = array_of(values, (chunk,), key)
    store = store_of(tmp_path, engine)

    with pytest.raises(StorageError) as caught:
        store.begin_writes([ArrayWrite(array, whole_of(array), values)]).wait(TIMEOUT_S)
    assert caught.value.key == key
    assert "too long" in str(caught.value).lower()


def test_nothing_is_left_beside_the_files_of_an_array(engine: Engine, tmp_path: Path) -> None:
    array = four_chunks(tmp_path, engine)

    names = {path.name for path in (tmp_path / "layer.w").iterdir()}
    assert names == {".zarray", *map(array.chunk_name, array.chunk_indices())}
    assert math.prod(array.grid) == 4
