"""A manifest that makes no sense is an error that names its file, though its digests are right."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dist_ckpt_strategies.errors import CorruptCheckpointError
from dist_ckpt_strategies.formats.manifest import INDEX_NAME, Manifest, digest_of
from dist_ckpt_strategies.formats.scan import scan, verify
from dist_ckpt_strategies.storage.store import Directory
from tests.support.format2_checkpoints import LARGE, RNG, write_format2

PART = "manifest/part-00000.json"
Fields = dict[str, Any]


def rewritten(
    root: Path, change_part: Callable[[Fields], None], change_index: Callable[[Fields], None]
) -> None:
    """Change the part and the index, and make their digests fit."""
    part = json.loads((root / PART).read_bytes())
    change_part(part)
    content = json.dumps(part).encode()
    (root / PART).write_bytes(content)
    index = json.loads((root / INDEX_NAME).read_bytes())
    index["parts"][0] |= {"digest": digest_of(content), "nbytes": len(content)}
    change_index(index)
    del index["digest"]
    rest = b'",' + json.dumps(index).encode()[1:]
    (root / INDEX_NAME).write_bytes(b'{"digest":"' + digest_of(rest).encode() + rest)


def unchanged(_: Fields) -> None:
    """Change nothing."""


def array_with(**fields: Any) -> Callable[[Fields], None]:
    def change(part: Fields) -> None:
        next(found for found in part["arrays"] if found["key"] == LARGE).update(fields)

    return change


def span_with(at: int, value: Any) -> Callable[[Fields], None]:
    def change(part: Fields) -> None:
        next(found for found in part["objects"] if found["key"] == RNG)["span"][at] = value

    return change


def read_all(root: Path) -> None:
    manifest = Manifest(Directory(root))
    assert LARGE in {record.array.key for record in manifest.arrays()}
    list(manifest.objects())


@pytest.mark.parametrize(
    "change",
    [
        array_with(chunk_shape=[0, 0]),
        array_with(dtype="float31"),
        lambda part: part["arrays"].append(part["arrays"][0]),
        lambda part: part["objects"].append(part["objects"][0]),
        span_with(0, "objects/../../elsewhere"),
        span_with(0, 7),
        span_with(1, -1),
        span_with(2, "many"),
    ],
    ids=["no chunk", "dtype", "array twice", "object twice", "elsewhere", "name", "begin", "size"],
)
def test_a_part_that_makes_no_sense_is_named(
    change: Callable[[Fields], None], tmp_path: Path
) -> None:
    root = write_format2(tmp_path / "c")
    rewritten(root, change, unchanged)
    with pytest.raises(CorruptCheckpointError) as caught:
        read_all(root)
    assert caught.value.path == f"{root}/{PART}"
    assert PART in {issue.path for issue in verify(scan(root))}


@pytest.mark.parametrize(
    "change",
    [
        lambda index: index.update(parts={}),
        lambda index: index["parts"][0].update(name="../other/part-00000.json"),
        lambda index: index["parts"].append(index["parts"][0]),
    ],
    ids=["no list", "elsewhere", "twice"],
)
def test_an_index_that_makes_no_sense_is_named(
    change: Callable[[Fields], None], tmp_path: Path
) -> None:
    root = write_format2(tmp_path / "c")
    rewritten(root, unchanged, change)
    with pytest.raises(CorruptCheckpointError) as caught:
        read_all(root)
    assert caught.value.path == f"{root}/{INDEX_NAME}"


@pytest.mark.parametrize("content", [b"", b"{}", b"null", b'{"digest":"12'])
def test_an_index_without_a_digest_is_said_to_be_that(content: bytes, tmp_path: Path) -> None:
    root = write_format2(tmp_path / "c")
    (root / INDEX_NAME).write_bytes(content)

    with pytest.raises(
        CorruptCheckpointError, match=r"index\.json is damaged: its \d+ bytes do not"
    ):
        read_all(root)


def test_more_bytes_are_read_than_one_call_of_the_system_gives(tmp_path: Path) -> None:
    """A ShardedObject of more than 2 GiB came back cut, and was called damaged."""
    nbytes = (2 << 30) + 4096
    with (tmp_path / "large").open("wb") as file:
        file.truncate(nbytes)
    assert len(Directory(tmp_path).read("large", 8, nbytes)) == nbytes - 8


def test_no_more_memory_is_taken_than_the_file_has_bytes(tmp_path: Path) -> None:
    (tmp_path / "small").write_bytes(b"0123456789")
    assert Directory(tmp_path).read("small", 4, 1 << 50) == b"456789"
    assert Directory(tmp_path).read("small", 40, 1 << 50) == b""
