"""The layout of format ("zarr", 1): one Zarr v2 array in a directory per key.

TensorStore decodes chunks that are compressed, in Fortran order or big-endian. This package writes
none; other writers do.

Source: the Zarr v2 specification; checkpoints written by Megatron-Core 0.12.3 and 0.15.3.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from dist_ckpt_strategies.core.array import ArraySpec, DType, Region, Shape
from dist_ckpt_strategies.errors import (
    CorruptCheckpointError,
    IncompleteCheckpointError,
    PlanError,
    StorageError,
)
from dist_ckpt_strategies.storage.files import (
    PARTIAL_PREFIX,
    REMOVED_PREFIX,
    file_errors,
    is_elsewhere,
)
from dist_ckpt_strategies.storage.folders import is_directory
from dist_ckpt_strategies.storage.store import HostArray

METADATA_NAME = ".zarray"
LOCKS_SUFFIX = ".sync"
"""Megatron-Core <= 0.15 kept locks of the array ``w`` in ``w.sync``, one empty file each."""


def dtype_name(dtype: DType) -> str:
    """The dtype as ``.zarray`` spells it: ``<f4``, ``|b1``, and plain names for extensions."""
    return dtype.value if dtype.is_extension else dtype.numpy.newbyteorder("<").str


@lru_cache(maxsize=256)
def metadata_content(shape: Shape, chunk_shape: Shape, dtype: DType) -> bytes:
    """The bytes of ``.zarray``: the fields that Megatron-Core <= 0.15 wrote, laid out as by zarr 2.

    The arrays of all layers have few descriptions between them, and indented JSON takes its time.
    """
    fields = {
        "chunks": chunk_shape,
        "compressor": None,
        "dtype": dtype_name(dtype),
        "fill_value": None,
        "filters": None,
        "order": "C",
        "shape": shape,
        "zarr_format": 2,
    }
    return json.dumps(fields, indent=4).encode()


def parse_metadata(key: str, path: Path | str, content: bytes) -> ArraySpec:
    """The array that a ``.zarray`` file describes.

    Raises:
        CorruptCheckpointError: not JSON, or not the description of an array.
        PlanError: a dtype that torch has no counterpart for.
    """
    try:
        return replace(_parsed(content), key=key)
    except PlanError as error:
        found = error.message.removeprefix(": ")
        raise PlanError(f"{key}: {path}: {found}", key=key, path=str(path)) from error
    except (ValueError, LookupError, TypeError, SyntaxError, RecursionError) as error:
        raise CorruptCheckpointError(
            f"{key}: {path} does not describe a Zarr v2 array: {error!r}", key=key, path=str(path)
        ) from error


@lru_cache(maxsize=256)
def _parsed(content: bytes) -> ArraySpec:
    """The array without a key; the arrays of all layers have few descriptions between them."""
    fields = json.loads(content)
    spelled, order = str(fields["dtype"]), fields["order"]
    dtype = next((known for known in DType if dtype_name(known) == spelled), None)
    if dtype is None:
        if spelled[:1] not in set("<>|"):
            raise ValueError(f"dtype {spelled!r}, expected one such as '<f4'")
        dtype = DType.named(np.dtype(spelled).name, key="")
    shape, chunks = _shape(fields["shape"], least=0), _shape(fields["chunks"], least=1)
    separator = str(fields.get("dimension_separator", "."))
    if fields["zarr_format"] != 2:  # noqa: PLR2004 - the format's own number
        raise ValueError(f"zarr_format {fields['zarr_format']}, expected 2")
    if len(shape) != len(chunks):
        raise ValueError(f"shape {shape} with chunks {chunks}")
    if order not in {"C", "F"} or separator not in {".", "/"}:
        raise ValueError(f"order {order!r}, dimension_separator {separator!r}")
    codecs = [c for c in (fields["compressor"], *(fields.get("filters") or ())) if c is not None]
    if not all(isinstance(c, dict) and isinstance(c.get("id"), str) for c in codecs):
        raise ValueError("a compressor or filter that is neither null nor has an id")
    is_raw = not codecs and order == "C" and (spelled[0] in "<|" or dtype.is_extension)
    return ArraySpec("", shape, dtype, chunks, separator, is_raw=is_raw)


def _shape(numbers: Any, *, least: int) -> Shape:
    """Sizes of an array or chunk; JSON could hold anything in their place."""
    if not isinstance(numbers, list) or any(type(n) is not int or n < least for n in numbers):
        raise ValueError(f"{numbers!r}, expected a list of whole numbers, each at least {least}")
    return tuple(numbers)


def lock_directories(root: Path, key: str) -> Iterator[str]:
    """The directory beside an array that Megatron-Core <= 0.15 kept locks in, if there is."""
    if _is_lock_directory(f"{root}/{key}{LOCKS_SUFFIX}"):
        yield key + LOCKS_SUFFIX


def array_keys(root: Path) -> Iterator[str]:
    """Keys of all arrays below a checkpoint directory, at any depth; an array may be a link."""
    for key, entry in entries_below(root):
        if not is_directory(entry) or _is_lock_directory(entry.path):
            continue
        if os.path.exists(os.path.join(entry.path, METADATA_NAME)):  # noqa: PTH110, PTH118 - 10,000 times
            yield key


def entries_below(directory: Path, prefix: str = "") -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Everything below a checkpoint directory, each with its path there, sorted by names.

    Links, and checkpoints further down, are not looked into.
    """
    with file_errors(prefix, directory):
        entries = sorted(os.scandir(directory), key=lambda entry: entry.name)
    for entry in entries:
        if not entry.name.startswith((REMOVED_PREFIX, PARTIAL_PREFIX)):
            yield prefix + entry.name, entry
            if is_directory(entry) and not is_elsewhere(entry):
                yield from entries_below(Path(entry.path), f"{prefix}{entry.name}/")


def _is_lock_directory(path: str) -> bool:
    """Whether it holds an array's locks: a file for each of the array's, ``.zarray`` included."""
    if not path.endswith(LOCKS_SUFFIX):
        return False
    try:
        return os.stat(os.path.join(path, METADATA_NAME)).st_size == 0  # noqa: PTH116, PTH118
    except OSError:  # also where the longer name is too long
        return False


def decode_chunk(root: Path, array: ArraySpec, index: Shape, region: Region) -> HostArray:
    """The elements of a region, of the array, in one chunk.

    Raises:
        CorruptCheckpointError: the chunk cannot be decoded.
        StorageError: TensorStore has no decoder for it, or cannot read it.
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
        import tensorstore as ts  # noqa: PLC0415 - takes a while, and few arrays need it

        opened = ts.open(array_store_spec(directory), read=True).result()
        return np.asarray(opened[region.slices()].read().result())
    except OSError:
        raise
    except Exception as error:
        path, text = f"{root}/{array.chunk_file(index)}", str(error)
        kind: type[StorageError] = StorageError
        if "is not registered" in text or "filters are not supported" in text:
            text = f"TensorStore has no decoder; rewrite the array with zarr-python ({text})"
        elif text.startswith("NOT_FOUND"):
            kind = IncompleteCheckpointError
        elif text.startswith(("DATA_LOSS", "INVALID_ARGUMENT", "FAILED_PRECONDITION")):
            kind = CorruptCheckpointError
        raise kind(f"{array.key}: {path}: {text}", key=array.key, path=path) from error


def array_store_spec(path: Path) -> dict[str, Any]:
    """The TensorStore spec of a format 1 array; a missing chunk does not read as zeros."""
    plain = Path("/", *path.resolve().parts[1:])  # with one leading slash
    return {
        "driver": "zarr",
        "kvstore": {"driver": "file", "path": str(plain)},
        "metadata_key": METADATA_NAME,
        "fill_missing_data_reads": False,
    }
