"""What is written as an archive of torch is one: for torch, for zip readers, and for our own."""

from __future__ import annotations

import io
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from dist_ckpt_strategies.device import host_view
from dist_ckpt_strategies.spec.dtype import DType
from dist_ckpt_strategies.spec.region import Region
from dist_ckpt_strategies.storage.conversion.tensor_archive import write_tensor_archive
from dist_ckpt_strategies.storage.conversion.torch_archives import TensorArchive
from tests.support.sharding import ALL_DTYPES, Cut, same_bits, whole

SHAPES = [(), (1,), (5, 7), (0, 3), (2, 3, 1, 4)]
LARGE = (3, 400_000)
"""More than is summed and written at a time."""


def tensor_of(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return whole(Cut(f"{dtype} {shape}", shape, dtype, ()))


def written(path: Path, tensors: list[torch.Tensor], start: int = 0) -> list[int]:
    """Where each archive of a file ends; the file begins with some other bytes."""
    ends = [start]
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        os.write(handle, b"x" * start)
        for tensor in tensors:
            dtype = DType.named(str(tensor.dtype), key="w")
            ends.append(write_tensor_archive(handle, ends[-1], host_view(tensor), dtype))
        assert os.fstat(handle).st_size == ends[-1]
    finally:
        os.close(handle)
    return ends


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_torch_loads_what_was_written(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = [tensor_of(dtype, shape) for shape in SHAPES]
    ends = written(tmp_path / "file", tensors, start=777)

    content = (tmp_path / "file").read_bytes()
    for tensor, start, end in zip(tensors, ends[:-1], ends[1:], strict=True):
        loaded = torch.load(io.BytesIO(content[start:end]), weights_only=True)
        assert same_bits(loaded, tensor)
        assert loaded.stride() == tensor.stride()


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_the_description_is_the_one_that_torch_writes(dtype: torch.dtype, tmp_path: Path) -> None:
    tensor = tensor_of(dtype, (5, 7))
    written(tmp_path / "ours", [tensor])
    torch.save(tensor, tmp_path / "archive")

    found = [zipfile.ZipFile(tmp_path / name) for name in ("ours", "archive")]
    for name in ("data.pkl", "data/0", "byteorder", "version"):
        ours, theirs = (archive.read(f"archive/{name}") for archive in found)
        assert ours == theirs, name


def test_zip_readers_and_our_own_find_every_byte(tmp_path: Path) -> None:
    tensor = tensor_of(torch.float32, LARGE)
    _, end = written(tmp_path / "file", [tensor])

    with zipfile.ZipFile(tmp_path / "file") as archive:
        assert archive.testzip() is None
    mapped = torch.load(tmp_path / "file", weights_only=True, mmap=True)
    assert same_bits(mapped, tensor)
    assert mapped.data_ptr() % 64 == 0
    found = TensorArchive.open(str(tmp_path / "file"), "w", 0, end)
    target = np.empty((2, 11), np.float32)
    found.read(Region((1, 399_000), (2, 11)), target)
    assert target.tobytes() == host_view(tensor)[1:3, 399_000:399_011].tobytes()
