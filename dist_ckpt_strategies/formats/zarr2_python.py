"""bfloat16 and float8 for zarr-python, which knows only numpy's own dtypes.

The spelling is TensorStore's and Megatron's: the plain name. Registered on first use, not at
import; a type that somebody else has registered under the name is left alone.
"""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self, TypeGuard

import numpy as np
import zarr
from numcodecs.errors import UnknownCodecError
from zarr.core.dtype import data_type_registry
from zarr.core.dtype.common import DataTypeValidationError, HasItemSize, check_dtype_spec_v2
from zarr.core.dtype.wrapper import ZDType
from zarr.core.metadata.v2 import ArrayV2Metadata
from zarr.storage import LocalStore, StorePath

from dist_ckpt_strategies.core.array import ArraySpec, DType
from dist_ckpt_strategies.core.region import Region
from dist_ckpt_strategies.errors import CheckpointError, CorruptCheckpointError, StorageError
from dist_ckpt_strategies.formats.raw_chunks import require_chunk
from dist_ckpt_strategies.formats.zarr2 import (
    Zarr2Layout,
    array_metadata,
    begin_creates,
    begin_syncs,
    by_chunk,
    library_nbytes,
)
from dist_ckpt_strategies.storage.base import ArrayRead, ArrayWrite, Transfer
from dist_ckpt_strategies.storage.files import (
    file_errors,
    storage_error,
    sync_path,
)
from dist_ckpt_strategies.storage.io_pool import ByteBudget, Job, run_pooled
from dist_ckpt_strategies.storage.time_limit import raise_if_cancelled


@dataclass(frozen=True, kw_only=True, slots=True)
class ExtensionDType(ZDType[Any, Any], HasItemSize):
    """A zarr data type for an ml_dtypes element; one subclass for each."""

    _zarr_v3_name: ClassVar[str] = ""
    element: ClassVar[DType]

    @classmethod
    def from_native_dtype(cls, dtype: Any) -> Self:
        """The zarr type of a numpy dtype."""
        if dtype == cls.element.numpy:
            return cls()
        raise DataTypeValidationError(f"expected {cls.element.value}, found {dtype}")

    @classmethod
    def _check_native_dtype(cls, dtype: Any) -> TypeGuard[Any]:
        return bool(dtype == cls.element.numpy)

    def to_native_dtype(self) -> Any:
        """The numpy dtype."""
        return self.element.numpy

    @classmethod
    def _from_json_v2(cls, data: Any) -> Self:
        if check_dtype_spec_v2(data) and data["name"] == cls.element.value:
            return cls()
        raise DataTypeValidationError(f"expected {cls.element.value!r}, found {data!r}")

    @classmethod
    def _from_json_v3(cls, data: Any) -> Self:
        if data == cls.element.value:
            return cls()
        raise DataTypeValidationError(f"expected {cls.element.value!r}, found {data!r}")

    def to_json(self, zarr_format: Any) -> Any:
        """The spelling in ``.zarray`` (2) or ``zarr.json`` (3)."""
        name = self.element.value
        return {"name": name, "object_codec_id": None} if zarr_format == 2 else name  # noqa: PLR2004

    def _check_scalar(self, data: object) -> Any:
        return isinstance(data, (int, float, np.generic))

    def cast_scalar(self, data: object) -> Any:
        """The value as an element."""
        return self.element.numpy.type(data)

    def default_scalar(self) -> Any:
        """Zero."""
        return self.element.numpy.type(0)

    def to_json_scalar(self, data: object, *, zarr_format: Any) -> Any:  # noqa: ARG002
        """The value as a JSON number, or its name where JSON has none."""
        value = float(data)  # type: ignore[arg-type]
        return value if np.isfinite(value) else str(value)

    def from_json_scalar(self, data: Any, *, zarr_format: Any) -> Any:  # noqa: ARG002
        """The element that a JSON number or name stands for."""
        return self.element.numpy.type(float(data))

    @property
    def item_size(self) -> int:
        """Bytes of one element."""
        return self.element.itemsize


def register_extension_dtypes() -> None:
    """Teach zarr-python every DType that it does not know. Idempotent."""
    for element in DType:
        if element.is_extension and element.value not in data_type_registry.contents:
            namespace = {
                "element": element,
                "dtype_cls": type(element.numpy),
                "_zarr_v3_name": element.value,
                "__slots__": (),
            }
            data_type_registry.register(
                element.value, type(f"Zarr_{element.value}", (ExtensionDType,), namespace)
            )


_NUM_COPIES = 2
"""That zarr-python has of a chunk: its bytes, and the elements asked for."""

_MAX_THREADS = 8
"""zarr-python runs all its work on one event loop; more callers only queue there."""


class ZarrPythonArrays:
    """Reads and writes the arrays below one directory; see ArrayStore.

    zarr-python neither flushes nor minds missing chunks: both are done here.
    """

    def __init__(self, root: Path, io_threads: int, max_inflight_bytes: int = 512 << 20) -> None:
        register_extension_dtypes()
        self._budget_nbytes = max_inflight_bytes
        self._root = root.absolute()
        self._layout = Zarr2Layout(self._root)
        self._num_threads = min(io_threads, _MAX_THREADS)

    def begin_creates(self, arrays: Sequence[ArraySpec]) -> Transfer:
        """See ArrayStore."""
        return begin_creates(self._layout, arrays, self._num_threads, is_flushed=True)

    def begin_syncs(self, arrays: Sequence[ArraySpec]) -> Transfer:
        """See ArrayStore."""
        return begin_syncs(self._layout, arrays, self._num_threads)

    def begin_writes(self, writes: Sequence[ArrayWrite]) -> Transfer:
        """See ArrayStore."""
        budget = ByteBudget(self._budget_nbytes)
        jobs = [
            Job(w.array.key, self._root / w.array.key, _WriteJob(self._root, w, budget).run)
            for w in writes
        ]
        return run_pooled(jobs, self._num_threads, _translated)

    def begin_reads(self, reads: Sequence[ArrayRead]) -> Transfer:
        """See ArrayStore."""
        budget = ByteBudget(self._budget_nbytes)
        jobs = [
            Job(r.array.key, _at_fault(self._root, r), _ReadJob(self._root, r, budget).run)
            for r in reads
        ]
        return run_pooled(jobs, self._num_threads, _translated)


@dataclass(frozen=True, slots=True)
class _WriteJob:
    root: Path
    write: ArrayWrite
    budget: ByteBudget

    def run(self) -> None:
        """Store the region, then flush every file of it."""
        array = self.write.array
        Zarr2Layout(self.root).ensure(array)
        paths = _chunk_paths(self.root, array, self.write.region)
        with file_errors(array.key, _at_fault(self.root, self.write)):
            target = _opened(self.root, array, read_only=False)
            for box, memory in by_chunk(array, self.write.region, self.write.source):
                with self.budget.held(_NUM_COPIES * library_nbytes(array)):
                    target[box.slices()] = memory
            for path in paths:
                sync_path(path)


@dataclass(frozen=True, slots=True)
class _ReadJob:
    root: Path
    read: ArrayRead
    budget: ByteBudget

    def run(self) -> None:
        """Check that every chunk file is there and whole, then read the region."""
        array = self.read.array
        paths = _chunk_paths(self.root, array, self.read.region)
        with file_errors(array.key, _at_fault(self.root, self.read)):
            for path in paths:
                require_chunk(array, path)
        source = _opened(self.root, array, read_only=True)
        for box, memory in by_chunk(array, self.read.region, self.read.target):
            with self.budget.held(_NUM_COPIES * library_nbytes(array)):
                found = source[box.slices()]
                raise_if_cancelled()
                memory[...] = found


def _opened(root: Path, array: ArraySpec, *, read_only: bool) -> zarr.Array[Any]:
    """The array; of a raw one the metadata is ours and is not read, it may not be there yet."""
    directory = root / array.key
    if not array.is_raw:
        return zarr.open_array(str(directory), mode="r", zarr_format=2)
    metadata = array_metadata(array) | {"dimension_separator": array.separator}
    store = StorePath(LocalStore(directory, read_only=read_only))
    config: Any = {"write_empty_chunks": True}
    return zarr.Array(zarr.AsyncArray(ArrayV2Metadata.from_dict(metadata), store, config))


def _chunk_paths(root: Path, array: ArraySpec, region: Region) -> list[Path]:
    return [root / array.key / array.chunk_name(index) for index in array.chunks_of(region)]


def _at_fault(root: Path, transfer: ArrayRead | ArrayWrite) -> Path:
    """What an error is blamed on, which zarr-python does not tell: the file where there is one."""
    paths = _chunk_paths(root, transfer.array, transfer.region)
    return paths[0] if len(paths) == 1 else root / transfer.array.key


def _translated(job: Job, error: Exception) -> CheckpointError:
    """What an error of zarr-python means: codecs say what bytes they cannot decode."""
    if isinstance(error, OSError) and not isinstance(error, gzip.BadGzipFile):
        return storage_error(job.key, job.path, error)
    kind = StorageError if isinstance(error, UnknownCodecError) else CorruptCheckpointError
    text = f"{job.key}: {job.path}: zarr-python failed: {error!r}"
    return kind(text, key=job.key, path=str(job.path))
