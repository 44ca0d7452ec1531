"""A manifest that makes no sense is an error that names its file, though its digests are right."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor

import dist_ckpt_strategies
from dist_ckpt_strategies.errors import CorruptCheckpointError
from dist_ckpt_strategies.formats.scan import scan, verify
from tests.support.checkpoints import LARGE, write_format2

INDEX = "manifest/index.json"
PART = "manifest/part-00000.json"
Fields = dict[str, Any]


def digest(content: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(content)


def rewritten(
    root: Path, change_part: Callable[[Fields], None], change_index: Callable[[Fields], None]
) -> None:
    """Change the part and the index, and make their digests fit."""
    part = json.loads((root / PART).read_bytes())
    change_part(part)
    content = json.dumps(part).encode()
    (root / PART).write_bytes(content)
    index = json.loads((root / INDEX).read_bytes())
    index["parts"][0] |= {"digest": digest(content), "nbytes": len(content)}
    change_index(index)
    del index["digest"]
    rest = b'",' + json.dumps(index).encode()[1:]
    (root / INDEX).write_bytes(b'{"digest":"' + digest(rest).encode() + rest)


def unchanged(_: Fields) -> None:
    """Change nothing."""


def array_with(**fields: Any) -> Callable[[Fields], None]:
    def change(part: Fields) -> None:
        next(found for found in part["arrays"] if found["key"] == LARGE).update(fields)

    return change


def span_with(at: int, value: Any) -> Callable[[Fields], None]:
    def change(part: Fields) -> None:
        next(found for found in part["objects"] if found["key"] == "rng")["span"][at] = value

    return change


def load(root: Path) -> None:
    state = {
        "w": ShardedTensor.from_rank_offsets(LARGE, torch.zeros(512, 512)),
        "o": ShardedObject("rng", None, (1,), (0,)),
    }
    dist_ckpt_strategies.load(state, root)


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
        load(root)
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
        load(root)
    assert caught.value.path == f"{root}/{INDEX}"


@pytest.mark.parametrize("content", [b"", b"{}", b"null", b'{"digest":"12'])
def test_an_index_without_a_digest_is_said_to_be_that(content: bytes, tmp_path: Path) -> None:
    root = write_format2(tmp_path / "c")
    (root / INDEX).write_bytes(content)

    with pytest.raises(
        CorruptCheckpointError, match=r"index\.json is damaged: its \d+ bytes do not"
    ):
        load(root)
