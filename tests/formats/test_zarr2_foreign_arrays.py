"""Zarr v2 arrays as other writers make them: compressed, Fortran order, big-endian, nested."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import numcodecs
import numpy as np
import pytest
import zarr

from dist_ckpt_strategies.config import Engine
from dist_ckpt_strategies.core.array import DType, Region
from dist_ckpt_strategies.errors import (
    CorruptCheckpointError,
    IncompleteCheckpointError,
    StorageError,
)
from dist_ckpt_strategies.formats.zarr2 import find_array
from tests.support.checkpoints import write_metadata
from tests.support.samples import Values, random_values, same_bytes
from tests.support.stores import chunk_files, read_array, read_into, write_array

WAYS: dict[str, dict[str, Any]] = {
    "zlib": {"compressors": numcodecs.Zlib(level=1)},
    "gzip": {"compressors": numcodecs.GZip(level=1)},
    "blosc": {"compressors": numcodecs.Blosc("lz4", shuffle=numcodecs.Blosc.SHUFFLE)},
    "zstd": {"compressors": numcodecs.Zstd(level=1)},
    "fortran": {"compressors": None, "order": "F"},
    "big-endian": {"compressors": None, "dtype": ">f4"},
    "big-endian, fortran, zlib": {
        "compressors": numcodecs.Zlib(level=1),
        "order": "F",
        "dtype": ">f4",
    },
    "nested": {
        "compressors": None,
        "chunk_key_encoding": {"name": "v2", "separator": "/"},
    },
    "fill value": {"compressors": None, "fill_value": 7.0},
}


@pytest.fixture(params=list(Engine), ids=lambda engine: f"read-by-{engine.value}")
def reader(request: pytest.FixtureRequest) -> Engine:
    """The engine that reads."""
    found: Engine = request.param
    return found


EVERY_WAY = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


IN_BYTES = {"raw": None, "zlib": {"id": "zlib", "level": 1}}


@pytest.mark.parametrize("compressor", IN_BYTES.values(), ids=IN_BYTES)
@pytest.mark.parametrize("engine", Engine)
def test_chunks_that_no_memory_could_hold_are_an_error_and_not_the_end_of_the_process(
    engine: Engine, compressor: Any, tmp_path: Path
) -> None:
    write_metadata(tmp_path / "w", chunks=[10**13], compressor=compressor)
    (tmp_path / "w" / "0").write_bytes(zlib.compress(bytes(16)) if compressor else bytes(16))

    with pytest.raises(StorageError, match="w: ") as caught:
        read_array(tmp_path, engine)
    assert caught.value.key == "w"


@pytest.mark.parametrize(
    "fields",
    [
        {"compressor": {"id": "lz4", "acceleration": 1}},
        {"filters": [{"id": "delta", "dtype": "<f4"}]},
    ],
    ids=["lz4", "a filter"],
)
def test_what_tensorstore_has_no_decoder_for_is_not_called_damaged(
    fields: dict[str, Any], tmp_path: Path
) -> None:
    write_metadata(tmp_path / "w", **fields)
    (tmp_path / "w" / "0").write_bytes(bytes(16))

    with pytest.raises(StorageError, match=r"^w: .*engine='zarr'") as caught:
        read_array(tmp_path, Engine.TENSORSTORE)
    assert not isinstance(caught.value, CorruptCheckpointError)


def test_a_key_that_tensorstore_refuses_is_an_error_that_names_it(tmp_path: Path) -> None:
    write_metadata(tmp_path / "w.__lock", order="F")
    (tmp_path / "w.__lock" / "0").write_bytes(bytes(16))

    with pytest.raises(StorageError, match=r"w\.__lock: ") as caught:
        read_array(tmp_path, Engine.TENSORSTORE, "w.__lock")
    assert caught.value.key == "w.__lock"


def write_foreign(root: Path, values: Values, way: dict[str, Any], key: str = "layer.w") -> None:
    options: dict[str, Any] = {"dtype": values.dtype, "fill_value": None} | way
    array = zarr.create_array(
        str(root / key),
        shape=values.shape,
        chunks=tuple(max(1, -(-n // 2)) for n in values.shape),
        zarr_format=2,
        config={"write_empty_chunks": True},
        **options,
    )
    array[...] = values


@EVERY_WAY
def test_arrays_of_other_writers_are_read_bit_for_bit(
    way: dict[str, Any], reader: Engine, tmp_path: Path
) -> None:
    values = random_values((7, 5), DType.FLOAT32)
    values[np.isnan(values)] = 1.5  # numcodecs and numpy may touch payloads of swapped NaNs
    write_foreign(tmp_path, values, way)

    assert same_bytes(read_array(tmp_path, reader, "layer.w"), values)
    target = np.zeros((5, 7), np.float32).T
    read_into(tmp_path, reader, find_array(tmp_path, "layer.w"), Region.whole((7, 5)), target)
    assert np.array_equal(target, values)
    box = Region((2, 1), (4, 3))
    assert same_bytes(read_array(tmp_path, reader, "layer.w", box), values[box.slices()])


@pytest.mark.parametrize("dtype", ["i2", "u8", "c16", "f8", "b1"])
def test_a_compressed_array_of_any_type_is_read(dtype: str, reader: Engine, tmp_path: Path) -> None:
    values = (np.arange(12).reshape(3, 4) % 5).astype(dtype)
    write_foreign(tmp_path, values, WAYS["zlib"])

    assert same_bytes(read_array(tmp_path, reader, "layer.w"), values)


@EVERY_WAY
def test_a_missing_chunk_of_them_is_an_error_as_well(
    way: dict[str, Any], reader: Engine, tmp_path: Path
) -> None:
    write_foreign(tmp_path, np.ones((4, 4), np.float32), way)
    array = find_array(tmp_path, "layer.w")
    lost = chunk_files(tmp_path, array)[1]
    lost.unlink()

    with pytest.raises(IncompleteCheckpointError, match=r"^layer\.w: ") as caught:
        read_array(tmp_path, reader, "layer.w")
    assert (caught.value.key, caught.value.path) == ("layer.w", str(lost))


@pytest.mark.parametrize("codec", ["zlib", "gzip", "blosc", "zstd"])
@pytest.mark.parametrize("damage", ["cut short", "emptied", "other bytes"])
def test_a_damaged_compressed_chunk_is_an_error_that_names_key_and_file(
    codec: str, damage: str, reader: Engine, tmp_path: Path
) -> None:
    write_foreign(tmp_path, random_values((8, 8), DType.INT32), WAYS[codec])
    array = find_array(tmp_path, "layer.w")
    bad = chunk_files(tmp_path, array)[0]
    content = bad.read_bytes()
    bad.write_bytes(
        {"cut short": content[:-9], "emptied": b"", "other bytes": b"\x01" * len(content)}[damage]
    )

    with pytest.raises(StorageError, match=r"^layer\.w: ") as caught:
        read_array(tmp_path, reader, "layer.w")
    assert caught.value.key == "layer.w"
    assert str(tmp_path / "layer.w") in str(caught.value)
    assert isinstance(caught.value, CorruptCheckpointError)


def test_an_unknown_compressor_is_an_error_that_names_key_and_compressor(
    reader: Engine, tmp_path: Path
) -> None:
    write_foreign(tmp_path, np.zeros((4, 4)), WAYS["zlib"])
    path = tmp_path / "layer.w" / ".zarray"
    path.write_text(path.read_text().replace("zlib", "homemade"))

    with pytest.raises(StorageError, match=r"^layer\.w: .*homemade") as caught:
        read_array(tmp_path, reader, "layer.w")
    assert caught.value.key == "layer.w"


def test_what_we_write_opens_with_plain_zarr_python(tmp_path: Path) -> None:
    values = random_values((5, 3), DType.INT64)
    write_array(tmp_path, Engine.ZARR, values, chunk=(2, 3))
    found = zarr.open_array(str(tmp_path / "w"), mode="r")[...]

    assert np.array_equal(np.asarray(found), values)
