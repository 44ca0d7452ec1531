"""Small checkpoints with one of everything, whole or to be damaged."""

import io
import json
import shutil
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor

import dist_ckpt_strategies
from dist_ckpt_strategies.core.array import DType, Shape
from dist_ckpt_strategies.storage.files import LOCK_NAME
from tests.support.tensors import noise

Values = npt.NDArray[Any]
WEIGHT = "decoder.weight"  # float32, 4 x 6 in six chunks of 2 x 2: 16 bytes each
NESTED = "model/layers/0/bias"
SCALAR = "scale"
EMPTY = "unused"
RNG = "rng_state"  # a grid of 2 x 2 objects
ARRAYS = sorted((WEIGHT, NESTED, SCALAR, EMPTY))


def write_checkpoint(root: Path) -> Path:
    """Write one of format 1, as Megatron-Core up to 0.15 did; returns the directory."""
    root.mkdir(parents=True, exist_ok=True)
    write_array(root, random_values((4, 6), DType.FLOAT32), key=WEIGHT, chunk=(2, 2))
    write_array(root, random_values((5,), DType.BFLOAT16), key=NESTED, chunk=(2,))
    write_array(root, np.array(3.0), key=SCALAR)
    write_array(root, np.zeros((0, 4), np.int64), key=EMPTY)
    for row, column in product(range(2), range(2)):
        write_object(root / RNG / f"shard_{row}.{column}_2.2.pt", {"state": list(range(row + 9))})
    write_object(root / WEIGHT / "shard_0_1.pt", "an object may share an array's directory")
    write_object(root / "common.pt", {"iteration": 7})
    write_marker(root, "zarr")
    return root


def write_packs(root: Path, *, is_finished: bool = True) -> Path:
    """Save one of packs, or what a save leaves that is killed just before its end."""
    large = torch.arange(512 * 512, dtype=torch.float32).reshape(512, 512)
    tensors = {WEIGHT: large, "bias": torch.arange(7, dtype=torch.bfloat16)}
    objects = {"rng": {"state": torch.arange(50)}, "rerun": {"seen": 7}}
    state: dict[str, Any] = {"iteration": 7}
    state |= {key: ShardedTensor.from_rank_offsets(key, value) for key, value in tensors.items()}
    state |= {key: ShardedObject(key, value, (1,), (0,)) for key, value in objects.items()}
    dist_ckpt_strategies.save(state, root)
    if not is_finished:
        (root / "index").unlink()
        (root / "metadata.json").unlink()
    return root


def header_of(pack: Path) -> tuple[dict[str, Any], int]:
    """The header of a file of safetensors, and where its tensors begin."""
    with pack.open("rb") as file:
        nbytes = int.from_bytes(file.read(8), "little")
        return json.loads(file.read(nbytes)), 8 + nbytes


def pack_of(root: Path, rank: int) -> Path:
    """The one pack that a rank has written."""
    packs = [*root.glob("packs/*/*.safetensors")]
    (pack,) = [p for p in packs if header_of(p)[0]["__metadata__"]["rank"] == str(rank)]
    return pack


def tensor_end(pack: Path, name: str) -> int:
    """The first byte of a pack after a tensor."""
    header, start = header_of(pack)
    return start + int(header[name]["data_offsets"][1])


def write_foreign_checkpoint(root: Path) -> Path:
    """The files of a checkpoint of Megatron-Core's torch_dist, with contents of no meaning."""
    root.mkdir(parents=True)
    for name in (".metadata", "__0_0.distcp", "__1_0.distcp"):
        (root / name).write_bytes(b"torch_dist")
    write_object(root / "common.pt", {"iteration": 7})
    write_marker(root, "torch_dist")
    return root


def random_values(shape: Shape, dtype: DType) -> Values:
    """An array of any bits."""
    tensor = noise(shape, getattr(torch, dtype.value), 0)
    return tensor.view(torch.uint8).numpy().view(dtype.numpy)


def write_marker(root: Path, backend: str) -> None:
    """Make a directory count as a checkpoint of a backend."""
    common = {"common_backend": "torch", "common_backend_version": 1}
    sharded = {"sharded_backend": backend, "sharded_backend_version": 1}
    (root / "metadata.json").write_text(json.dumps(sharded | common))


def write_object(path: Path, obj: Any) -> None:
    """Write a file of an object, as Megatron-Core does."""
    buffer = io.BytesIO()
    torch.save(obj, buffer)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(buffer.getvalue())


def write_array(
    root: Path, values: Values, *, key: str = "w", chunk: tuple[int, ...] | None = None
) -> None:
    """Write a Zarr v2 array of raw chunks, the last ones padded, by numpy alone."""
    chunk = chunk or tuple(max(1, n) for n in values.shape)
    # Types of ml_dtypes go by their names.
    dtype = values.dtype.str if values.dtype.isbuiltin == 1 else values.dtype.name
    write_metadata(root / key, shape=[*values.shape], chunks=[*chunk], dtype=dtype)
    for index in np.ndindex(*(-(-n // c) for n, c in zip(values.shape, chunk, strict=True))):
        starts = [i * c for i, c in zip(index, chunk, strict=True)]
        piece = values[tuple(slice(a, a + c) for a, c in zip(starts, chunk, strict=True))]
        content = np.zeros(chunk, values.dtype)
        content[tuple(slice(n) for n in piece.shape)] = piece
        (root / key / (".".join(map(str, index)) or "0")).write_bytes(content.tobytes())


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
    (directory / ".zarray").write_text(json.dumps({**fields, **changes}))


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


def names_in(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def contents(root: Path) -> dict[str, bytes]:
    """Every file below a directory, by its name there, but for that of the lock."""
    paths = (p for p in root.rglob("*") if p.is_file() and p.name != LOCK_NAME)
    return {str(path.relative_to(root)): path.read_bytes() for path in paths}
