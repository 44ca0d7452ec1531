"""The layout of format 1, as Megatron-Core up to 0.15 wrote it."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_ckpt_strategies.config import Engine
from dist_ckpt_strategies.core.array import ArraySpec, DType
from dist_ckpt_strategies.errors import (
    ArrayNotFoundError,
    CorruptCheckpointError,
    PlanError,
)
from dist_ckpt_strategies.formats.objects import object_ids
from dist_ckpt_strategies.formats.zarr2 import (
    array_keys,
    find_array,
    metadata_content,
    parse_metadata,
    remove_array,
)
from tests.support.boxes import shapes
from tests.support.samples import random_values
from tests.support.stores import write_array

LEGACY = Path(__file__).parents[1] / "golden" / "data" / "m0123_tp4_modelonly.tar.xz"
SOME_PATH = Path("w/.zarray")


def legacy_metadata() -> Iterator[tuple[str, bytes]]:
    """Key and bytes of every ``.zarray`` of a checkpoint that Megatron-Core 0.12.3 wrote."""
    with tarfile.open(LEGACY) as archive:
        for member in archive:
            if member.name.endswith("/.zarray"):
                file = archive.extractfile(member)
                assert file is not None
                yield Path(member.name).parent.name, file.read()


def fields(**changes: Any) -> bytes:
    array = ArraySpec("w", (4, 6), DType.FLOAT32, (2, 6))
    return json.dumps(json.loads(metadata_content(array)) | changes).encode()


def test_metadata_has_the_bytes_that_megatron_wrote() -> None:
    found = list(legacy_metadata())

    assert len(found) == 17
    for key, content in found:
        array = parse_metadata(key, SOME_PATH, content)
        assert metadata_content(array) == content


@pytest.mark.parametrize(
    ("dtype", "spelled"),
    [
        (DType.BOOL, "|b1"),
        (DType.UINT8, "|u1"),
        (DType.INT8, "|i1"),
        (DType.INT64, "<i8"),
        (DType.UINT16, "<u2"),
        (DType.FLOAT16, "<f2"),
        (DType.FLOAT32, "<f4"),
        (DType.FLOAT64, "<f8"),
        (DType.COMPLEX64, "<c8"),
        (DType.COMPLEX128, "<c16"),
        (DType.BFLOAT16, "bfloat16"),
        (DType.FLOAT8_E4M3FN, "float8_e4m3fn"),
    ],
)
def test_types_are_spelled_as_megatron_did(dtype: DType, spelled: str) -> None:
    assert json.loads(metadata_content(ArraySpec("w", (1,), dtype, (1,))))["dtype"] == spelled


@st.composite
def arrays(draw: st.DrawFn) -> ArraySpec:
    shape = draw(shapes(max_size=1 << 40))
    chunk = tuple(draw(st.integers(1, max(1, n))) for n in shape)
    return ArraySpec(draw(st.text(min_size=1)), shape, draw(st.sampled_from(DType)), chunk)


@given(arrays())
def test_metadata_is_read_back(array: ArraySpec) -> None:
    assert parse_metadata(array.key, SOME_PATH, metadata_content(array)) == array


@pytest.mark.parametrize(
    "changes",
    [
        {"compressor": {"id": "zlib", "level": 1}},
        {"filters": [{"id": "delta", "dtype": "<f4"}]},
        {"order": "F"},
        {"dtype": ">f4"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_an_encoded_array_is_not_taken_for_raw_bytes(changes: dict[str, Any]) -> None:
    assert not parse_metadata("w", SOME_PATH, fields(**changes)).is_raw
    assert parse_metadata("w", SOME_PATH, fields()).is_raw


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"\xff",
        fields(zarr_format=3),
        fields(shape=[4]),
        fields(shape=[4, -1]),
        fields(shape=[4, float("inf")]),
        fields(chunks=[2, 0]),
        fields(chunks=[2, 6, 1]),
        fields(dtype="<f5"),
        fields(dtype="f4"),
        fields(dtype="float32"),
        fields(order="X"),
        fields(compressor={}),
        fields(filters=[[]]),
        fields(dimension_separator="x"),
    ],
)
def test_what_describes_no_array_is_an_error_that_names_key_and_file(content: bytes) -> None:
    with pytest.raises(CorruptCheckpointError, match=r"^w: w/\.zarray ") as caught:
        parse_metadata("w", SOME_PATH, content)

    assert (caught.value.key, caught.value.path) == ("w", "w/.zarray")


@pytest.mark.parametrize("dtype", ["<U4", "|S3", "<M8[ns]", "|O", "<f16", [["a", "<f4"]]])
def test_a_type_that_torch_has_no_counterpart_for_is_refused(dtype: Any) -> None:
    with pytest.raises((PlanError, CorruptCheckpointError), match=r"^w: w/\.zarray") as caught:
        parse_metadata("w", SOME_PATH, fields(dtype=dtype))

    assert (caught.value.key, caught.value.path) == ("w", "w/.zarray")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)


@given(st.sampled_from(sorted(json.loads(fields()))), json_values)
def test_any_value_of_any_field_is_an_array_or_one_of_our_errors(name: str, value: Any) -> None:
    try:
        array = parse_metadata("w", SOME_PATH, fields(**{name: value}))
    except (CorruptCheckpointError, PlanError):
        return
    assert all(chunk >= 1 for chunk in array.chunk_shape)
    assert len(array.shape) == len(array.chunk_shape)


# Finding and removing


def make_array(root: Path, key: str) -> None:
    write_array(root, Engine.TENSORSTORE, random_values((4, 2), DType.FLOAT32), key=key)


def test_a_key_that_is_not_there_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(ArrayNotFoundError, match=r"^layer\.w: ") as caught:
        find_array(tmp_path, "layer.w")

    assert caught.value.key == "layer.w"
    assert isinstance(caught.value, FileNotFoundError)


def test_keys_are_found_at_any_depth_and_nothing_else_is(tmp_path: Path) -> None:
    for key in ("b", "a/x", "a/x/y", "c.d"):
        make_array(tmp_path, key)
    (tmp_path / "notes" / "deep").mkdir(parents=True)
    (tmp_path / "notes" / "deep" / "0.0").write_text("not a chunk")
    (tmp_path / "common.pt").write_bytes(b"")
    (tmp_path / ".removed-z").mkdir()
    (tmp_path / ".removed-z" / ".zarray").write_bytes(b"")

    assert list(array_keys(tmp_path)) == ["a/x", "a/x/y", "b", "c.d"]


def test_a_link_in_a_circle_is_passed_over(tmp_path: Path) -> None:
    make_array(tmp_path, "w")
    for directory in (tmp_path, tmp_path / "w"):
        (directory / "circle").symlink_to("circle")

    assert list(array_keys(tmp_path)) == ["w"]
    assert list(object_ids(tmp_path)) == []


@pytest.mark.parametrize("key", ["w", "a/b.c", "x" * 255])
def test_a_removed_array_is_gone_without_a_trace(key: str, tmp_path: Path) -> None:
    make_array(tmp_path, key)
    make_array(tmp_path, "other")
    remove_array(tmp_path, key)

    assert list(array_keys(tmp_path)) == ["other"]
    assert not (tmp_path / key).exists()
    assert not [path for path in tmp_path.rglob("*") if path.name.startswith(".removed-")]


def test_removing_what_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ArrayNotFoundError, match=r"^w: "):
        remove_array(tmp_path, "w")
