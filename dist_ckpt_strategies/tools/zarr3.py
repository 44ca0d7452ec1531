"""Plain Zarr v3: the files of format ("zarr", 1), but that ``zarr.json`` describes each array.

Chunks that are not compressed are the bytes of their elements, and read like those of format 1.
TensorStore decodes all others, of this package or of any other writer.

Source: the Zarr v3 specification.
"""

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from dist_ckpt_strategies.core.array import ArraySpec, DType, Shape
from dist_ckpt_strategies.errors import (
    ArrayNotFoundError,
    CorruptCheckpointError,
    IncompleteCheckpointError,
    StorageError,
    similar_text,
)
from dist_ckpt_strategies.formats.checkpoints import Format1Checkpoint
from dist_ckpt_strategies.storage.files import (
    MAX_JSON_NBYTES,
    PARTIAL_PREFIX,
    REMOVED_PREFIX,
    file_errors,
    read_file,
)
from dist_ckpt_strategies.storage.io_pool import Job, Transfer
from dist_ckpt_strategies.storage.store import ArrayRead

METADATA_NAME = "zarr.json"

_TENSORSTORE_KINDS = {
    "NOT_FOUND": IncompleteCheckpointError,
    "DATA_LOSS": CorruptCheckpointError,
    "INVALID_ARGUMENT": CorruptCheckpointError,
    "FAILED_PRECONDITION": CorruptCheckpointError,
}


@lru_cache(maxsize=256)
def metadata_content(shape: Shape, chunk_shape: Shape, dtype: DType) -> bytes:
    """The bytes of ``zarr.json`` of an array of raw chunks, in files named as in Zarr v2."""
    is_complex, is_float = dtype.value.startswith("complex"), "float" in dtype.value
    fill = [0.0, 0.0] if is_complex else 0.0 if is_float else False if dtype is DType.BOOL else 0
    order = {"configuration": {"endian": "little"}} if dtype.itemsize > 1 else {}
    fields = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": shape,
        "data_type": dtype.value,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk_shape}},
        "chunk_key_encoding": {"name": "v2", "configuration": {"separator": "."}},
        "fill_value": fill,
        "codecs": [{"name": "bytes", **order}],
        "attributes": {},
    }
    return json.dumps(fields, indent=2).encode()


class Zarr3Checkpoint(Format1Checkpoint):
    """A checkpoint of format ("zarr", 3); see Format1Checkpoint."""

    def keys(self) -> Iterator[str]:
        """See Format1Checkpoint."""
        for folder, below, names in os.walk(self._root):
            below[:] = [n for n in below if not n.startswith((REMOVED_PREFIX, PARTIAL_PREFIX))]
            if METADATA_NAME in names and Path(folder) != self._root:
                yield Path(folder).relative_to(self._root).as_posix()

    def find(self, keys: Iterable[str]) -> dict[str, ArraySpec]:
        """See Format1Checkpoint."""
        specs = {}
        for key in sorted(keys):
            path = self._root / key / METADATA_NAME
            try:
                with file_errors(key, path):
                    content = read_file(path, MAX_JSON_NBYTES)
            except IncompleteCheckpointError as error:
                raise ArrayNotFoundError(
                    f"{key}: no such array in {self._root}{similar_text(key, [*self.keys()])}",
                    key=key,
                    path=str(path),
                ) from error
            specs[key] = _parsed(key, path, content)
        return specs

    def begin_reads(self, reads: Sequence[ArrayRead]) -> Transfer:
        """See Format1Checkpoint. Arrays of other codecs are read by TensorStore."""
        if all(read.array.is_raw for read in reads):
            return super().begin_reads(reads)
        jobs = [Job(r.array.key, self._root / r.array.key, partial(self._read, r)) for r in reads]
        return Transfer(jobs, self._options.io_threads)

    def _read(self, read: ArrayRead) -> None:
        import tensorstore as ts  # noqa: PLC0415 - takes a while, and few checkpoints need it

        key, target = read.array.key, read.target
        path = self._root / key
        spec = {
            "driver": "zarr3",
            "kvstore": {"driver": "file", "path": str(path)},
            "fill_missing_data_reads": False,
        }
        bits = np.dtype((np.void, target.dtype.itemsize))
        try:
            elements = ts.open(spec, read=True).result()[read.region.slices()].read().result()
            np.copyto(target.view(bits), np.asarray(elements).view(bits))
        except ValueError as error:
            kind = _TENSORSTORE_KINDS.get(str(error).partition(":")[0], StorageError)
            raise kind(f"{key}: {path}: {error}", key=key, path=str(path)) from error


def _parsed(key: str, path: Path, content: bytes) -> ArraySpec:
    """The array that a ``zarr.json`` describes."""
    try:
        fields = json.loads(content)
        grid = fields["chunk_grid"]["configuration"]["chunk_shape"]
        shape, chunk = tuple(map(_size, fields["shape"])), tuple(map(_size, grid))
        _require_grid(str(fields["node_type"]), shape, chunk)
        dtype = DType.named(str(fields["data_type"]), key=key)
        expected = json.loads(metadata_content(shape, chunk, dtype))
        is_raw = all(fields[n] == expected[n] for n in ("chunk_key_encoding", "codecs"))
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise CorruptCheckpointError(
            f"{key}: {path} does not describe a Zarr v3 array: {error!r}", key=key, path=str(path)
        ) from error
    return ArraySpec(key, shape, dtype, chunk, is_raw=is_raw)


def _require_grid(kind: str, shape: Shape, chunk: Shape) -> None:
    if kind != "array" or len(shape) != len(chunk) or 0 in chunk:
        raise ValueError(f"{kind} of shape {shape} with chunks {chunk}")


def _size(number: Any) -> int:
    if type(number) is not int or number < 0:
        raise ValueError(f"expected a size, found {number!r}")
    return number
