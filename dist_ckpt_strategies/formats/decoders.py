"""Chunks of format 1 that are compressed, in Fortran order or big-endian, decoded by a library.

This package writes none; other writers do. TensorStore is the default. numcodecs, which
zarr-python decodes with, knows codecs that TensorStore does not.
"""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from dist_ckpt_strategies.config import Engine
from dist_ckpt_strategies.core.array import ArraySpec, Region, Shape
from dist_ckpt_strategies.errors import (
    CorruptCheckpointError,
    IncompleteCheckpointError,
    StorageError,
)
from dist_ckpt_strategies.formats.zarr2 import METADATA_NAME
from dist_ckpt_strategies.storage.files import MAX_JSON_NBYTES, read_file
from dist_ckpt_strategies.storage.store import HostArray

_BLOSC_NBYTES = slice(12, 16)
"""Where a Blosc header has the size of the whole chunk, which numcodecs does not compare."""


def decode_chunk(
    root: Path, array: ArraySpec, index: Shape, region: Region, handle: int, engine: Engine
) -> HostArray:
    """The elements of a region, of the array, in one chunk, whose file is open for reading.

    Raises:
        CorruptCheckpointError: the chunk cannot be decoded.
        StorageError: the library has no decoder for it, or cannot read it.
    """
    directory = root / array.key
    if array.chunk_nbytes > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
        raise StorageError(  # TensorStore would end the process
            f"{array.key}: {directory / METADATA_NAME} states chunks of {array.chunk_nbytes} "
            "bytes, more than this machine has memory to decode",
            key=array.key,
            path=str(directory / METADATA_NAME),
        )
    try:
        if engine is Engine.TENSORSTORE:
            import tensorstore as ts  # noqa: PLC0415 - takes a while, and few arrays need it

            opened = ts.open(array_store_spec(directory), read=True).result()
            return np.asarray(opened[region.slices()].read().result())
        chunk = _by_numcodecs(directory, array, handle)
        return chunk[region.within(array.chunk_region(index)).slices()]
    except (OSError, StorageError):
        raise
    except Exception as error:
        path = f"{root}/{array.chunk_file(index)}"
        kind, text = _meaning(error, engine)
        raise kind(f"{array.key}: {path}: {text}", key=array.key, path=path) from error


def _by_numcodecs(directory: Path, array: ArraySpec, handle: int) -> HostArray:
    import numcodecs  # noqa: PLC0415 - as above

    fields = json.loads(read_file(directory / METADATA_NAME, MAX_JSON_NBYTES))
    codecs = [codec for codec in (*(fields.get("filters") or ()), fields["compressor"]) if codec]
    with os.fdopen(os.dup(handle), "rb") as file:
        content: Any = file.read()
    stored = int.from_bytes(content[_BLOSC_NBYTES], "little")
    if codecs and codecs[-1]["id"] == "blosc" and stored != len(content):
        raise ValueError(f"{len(content)} bytes, expected {stored}")
    try:
        for codec in reversed(codecs):
            content = numcodecs.get_codec(codec).decode(content)
    except gzip.BadGzipFile as error:  # which is an OSError, and no failure of the storage
        raise ValueError(str(error)) from error
    dtype = array.dtype.numpy
    stored_dtype = dtype.newbyteorder(">") if fields["dtype"][0] == ">" else dtype
    elements = np.frombuffer(memoryview(content).cast("B"), stored_dtype)
    return elements.reshape(array.chunk_shape, order=fields["order"]).astype(dtype, copy=False)


def _meaning(error: Exception, engine: Engine) -> tuple[type[StorageError], str]:
    """The error for what a library raised, and its text."""
    text = str(error)
    if engine is Engine.ZARR:
        is_unknown = type(error).__name__ == "UnknownCodecError"
        kind = StorageError if is_unknown else CorruptCheckpointError
        return kind, f"numcodecs cannot decode it: {error!r}"
    if "is not registered" in text or "filters are not supported" in text:
        return StorageError, f"TensorStore has no decoder; engine='zarr' may have one ({text})"
    if text.startswith("NOT_FOUND"):
        return IncompleteCheckpointError, text
    is_damage = text.startswith(("DATA_LOSS", "INVALID_ARGUMENT", "FAILED_PRECONDITION"))
    return CorruptCheckpointError if is_damage else StorageError, text


def array_store_spec(path: Path) -> dict[str, Any]:
    """The TensorStore spec of a format 1 array; a missing chunk does not read as zeros."""
    plain = Path("/", *path.resolve().parts[1:])  # with one leading slash
    return {
        "driver": "zarr",
        "kvstore": {"driver": "file", "path": str(plain)},
        "metadata_key": METADATA_NAME,
        "fill_missing_data_reads": False,
    }
