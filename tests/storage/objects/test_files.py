"""The checksums of ``.pt`` files: what torch cannot read, or reads wrongly, is found before."""

from __future__ import annotations

import io
import struct
from typing import Any

import pytest
import torch

from dist_ckpt_strategies.formats.object_files import archive_damage

STATE: dict[str, Any] = {"a": torch.arange(4), "text": "x"}
DIRECTORY_ATTRIBUTE_OFFSET = 38


@pytest.fixture(scope="module")
def content() -> bytes:
    buffer = io.BytesIO()
    torch.save(STATE, buffer)
    return buffer.getvalue()


def is_read_wrongly(content: bytes) -> bool:
    try:
        found: Any = torch.load(io.BytesIO(content), weights_only=True)
    except Exception:  # noqa: BLE001 - whatever torch makes of a damaged file
        return False
    return not (torch.equal(found["a"], STATE["a"]) and found["text"] == "x")


def flipped(content: bytes, position: int, bit: int) -> bytes:
    changed = bytearray(content)
    changed[position] ^= 1 << bit
    return bytes(changed)


def test_what_torch_saves_is_whole(content: bytes) -> None:
    assert archive_damage(content) is None


def test_many_records_are_whole() -> None:
    buffer = io.BytesIO()
    torch.save([torch.tensor(i) for i in range(300)], buffer)

    assert archive_damage(buffer.getvalue()) is None


def test_every_flipped_bit_that_would_change_a_value_is_found(content: bytes) -> None:
    """Others torch refuses, or they are in padding, dates, version numbers."""
    overlooked = [
        (position, bit)
        for position in range(len(content))
        for bit in range(position % 3, 8, 3)
        if archive_damage(changed := flipped(content, position, bit)) is None
        and is_read_wrongly(changed)
    ]

    assert overlooked == []


def test_a_record_marked_as_a_directory_is_found(content: bytes) -> None:
    """Torch takes it for empty, and returns uninitialised memory without an error."""
    entry = content.index(b"PK\1\2")
    marked = flipped(content, entry + DIRECTORY_ATTRIBUTE_OFFSET, 4)

    assert "is not torch's" in str(archive_damage(marked))


@pytest.mark.parametrize("num_missing", [1, 10, 500, 1000])
def test_a_truncated_archive_is_found(content: bytes, num_missing: int) -> None:
    assert archive_damage(content[:-num_missing]) is not None


@pytest.mark.parametrize(
    "other", [b"", b"P", b"PK", b"PK\3\4", b"not torch's", struct.pack("q", 7)]
)
def test_files_that_torch_did_not_write_are_found(other: bytes) -> None:
    assert archive_damage(other) is not None


def test_the_older_form_without_checksums_passes() -> None:
    buffer = io.BytesIO()
    torch.save(STATE, buffer, _use_new_zipfile_serialization=False)

    assert archive_damage(buffer.getvalue()) is None
