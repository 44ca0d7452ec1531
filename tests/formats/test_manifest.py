"""A manifest that makes no sense is an error that names its file, though its digests are right."""

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


def rewritten(root: Path, path: str, change: Callable[[Fields], None]) -> None:
    """Change the part or the index, and make the digests of both fit."""
    part = json.loads((root / PART).read_bytes())
    index = json.loads((root / INDEX).read_bytes())
    change({PART: part, INDEX: index}[path])
    if path == PART:
        content = json.dumps(part).encode()
        (root / PART).write_bytes(content)
        index["parts"][0] |= {"digest": digest(content), "nbytes": len(content)}
    del index["digest"]
    rest = b'",' + json.dumps(index).encode()[1:]
    (root / INDEX).write_bytes(b'{"digest":"' + digest(rest).encode() + rest)


def array_with(**fields: Any) -> Callable[[Fields], None]:
    def change(part: Fields) -> None:
        next(found for found in part["arrays"] if found["key"] == LARGE).update(fields)

    return change


def span_with(at: int, value: Any) -> Callable[[Fields], None]:
    def change(part: Fields) -> None:
        next(found for found in part["objects"] if found["key"] == "rng")["span"][at] = value

    return change


def more_digests(part: Fields) -> None:
    chunk = next(found for found in part["arrays"] if found["key"] == LARGE)["chunks"][0]
    chunk["digests"] += chunk["digests"]


def load(root: Path) -> None:
    state = {
        "w": ShardedTensor.from_rank_offsets(LARGE, torch.zeros(512, 512)),
        "o": ShardedObject("rng", None, (1,), (0,)),
    }
    dist_ckpt_strategies.load(state, root)


NO_SENSE: dict[str, tuple[str, Callable[[Fields], None]]] = {
    "equal, but no whole number": (PART, array_with(shape=[512.0, 512])),
    "no chunk": (PART, array_with(chunk_shape=[0, 0])),
    "fewer dims": (PART, array_with(inner_shape=[512])),
    "fewer chunks": (PART, array_with(chunks=[])),
    "more digests than inner chunks": (PART, more_digests),
    "dtype": (PART, array_with(dtype="float31")),
    "array twice": (PART, lambda part: part["arrays"].append(part["arrays"][0])),
    "object twice": (PART, lambda part: part["objects"].append(part["objects"][0])),
    "elsewhere": (PART, span_with(0, "objects/../../elsewhere")),
    "name": (PART, span_with(0, 7)),
    "begin": (PART, span_with(1, -1)),
    "size": (PART, span_with(2, "many")),
    "no list of parts": (INDEX, lambda index: index.update(parts={})),
    "a part elsewhere": (
        INDEX,
        lambda index: index["parts"][0].update(name="../other/part-00000.json"),
    ),
    "a part twice": (INDEX, lambda index: index["parts"].append(index["parts"][0])),
}


@pytest.mark.parametrize(("path", "change"), NO_SENSE.values(), ids=NO_SENSE)
def test_a_manifest_that_makes_no_sense_is_named(
    path: str, change: Callable[[Fields], None], tmp_path: Path
) -> None:
    root = write_format2(tmp_path / "c")
    load(root)  # what it has checked is remembered
    rewritten(root, path, change)
    with pytest.raises(CorruptCheckpointError) as caught:
        load(root)
    assert caught.value.path == f"{root}/{path}"
    assert path == INDEX or PART in {issue.path for issue in verify(scan(root))}
