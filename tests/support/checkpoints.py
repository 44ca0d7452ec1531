"""A small checkpoint with one of everything, written through the storage layer."""

from __future__ import annotations

import json
import shutil
import tarfile
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from dist_ckpt_strategies.config import Engine
from dist_ckpt_strategies.core.array import DType, ObjectId
from dist_ckpt_strategies.formats.locations import CheckpointMarker
from dist_ckpt_strategies.formats.objects import dump_object
from dist_ckpt_strategies.formats.zarr2 import METADATA_NAME
from dist_ckpt_strategies.storage.files import COMMON_NAME, MARKER_NAME, write_file
from tests.support.objects import write_object
from tests.support.samples import random_values
from tests.support.stores import write_array

WEIGHT = "decoder.weight"
"""float32, 4 x 6 in six chunks of 2 x 2: 16 bytes each."""

NESTED = "model/layers/0/bias"
SCALAR = "scale"
EMPTY = "unused"
RNG = "rng_state"
"""A grid of 2 x 2 objects."""

ARRAYS = sorted((WEIGHT, NESTED, SCALAR, EMPTY))
OBJECTS = sorted((RNG, WEIGHT))


def write_checkpoint(root: Path) -> Path:
    """Write arrays, objects, common state and marker; returns the directory."""
    root.mkdir(parents=True, exist_ok=True)
    write_array(
        root, Engine.TENSORSTORE, random_values((4, 6), DType.FLOAT32), key=WEIGHT, chunk=(2, 2)
    )
    write_array(
        root, Engine.TENSORSTORE, random_values((5,), DType.BFLOAT16), key=NESTED, chunk=(2,)
    )
    write_array(root, Engine.TENSORSTORE, np.array(3.0), key=SCALAR)
    write_array(root, Engine.TENSORSTORE, np.zeros((0, 4), np.int64), key=EMPTY)
    for offset in product(range(2), range(2)):
        write_object(root, ObjectId(RNG, offset, (2, 2)), {"state": list(range(offset[0] + 9))})
    write_object(root, ObjectId(WEIGHT, (0,), (1,)), "an object may share an array's directory")
    write_file(root / COMMON_NAME, dump_object({"iteration": 7}, name="common state"))
    write_marker(root, "zarr")
    return root


def write_foreign_checkpoint(root: Path) -> Path:
    """The files of a checkpoint of Megatron-Core's torch_dist, with contents of no meaning."""
    root.mkdir(parents=True)
    for name in (".metadata", "__0_0.distcp", "__1_0.distcp"):
        (root / name).write_bytes(b"torch_dist")
    write_file(root / COMMON_NAME, dump_object({"iteration": 7}, name="common state"))
    write_marker(root, "torch_dist")
    return root


def write_marker(root: Path, backend: str, version: int = 1) -> None:
    """Make a directory count as a checkpoint of a backend."""
    write_file(root / MARKER_NAME, CheckpointMarker(backend, version).to_json())


def write_metadata(directory: Path, **changes: Any) -> None:
    """Write a ``.zarray`` of a float32 array of 4 elements in one chunk, with changed fields."""
    fields: Mapping[str, Any] = {
        "chunks": [4],
        "compressor": None,
        "dtype": "<f4",
        "fill_value": None,
        "filters": None,
        "order": "C",
        "shape": [4],
        "zarr_format": 2,
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / METADATA_NAME).write_text(json.dumps({**fields, **changes}))


def golden_archives() -> dict[str, Path]:
    """The checkpoints that Megatron-Core itself wrote, packed, by name.

    They are looked up here without importing Megatron-Core, as tests.golden.sets does.
    """
    found = (Path(__file__).parents[1] / "golden" / "data").glob("m*.tar.xz")
    return {path.name.removesuffix(".tar.xz"): path for path in sorted(found)}


def unpack(archive: Path, target: Path) -> Path:
    """Unpack one of them below a directory; returns the checkpoint's directory."""
    with tarfile.open(archive) as tar:
        tar.extractall(target, filter="data")
    return target / archive.name.removesuffix(".tar.xz") / "ckpt"


def flip_bit(path: Path, within: bytes) -> None:
    """Change one bit of a file, in the first place where it holds those bytes."""
    content = bytearray(path.read_bytes())
    content[content.index(within)] ^= 1
    path.write_bytes(content)


def flip_at(path: Path, *byte_offsets: int) -> None:
    """Change the lowest bit of some bytes of a file."""
    content = bytearray(path.read_bytes())
    for offset in byte_offsets:
        content[offset] ^= 1
    path.write_bytes(content)


def copied(source: Path, target: Path) -> Path:
    """A copy of a checkpoint that a test may damage."""
    shutil.copytree(source, target)
    return target
