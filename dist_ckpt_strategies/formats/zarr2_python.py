"""Chunks through zarr-python, and bfloat16 and float8 for it: it knows numpy's own dtypes only.

The spelling is TensorStore's and Megatron's: the plain name. Registered on first use, not at
import; a type that somebody else has registered under the name is left alone.
"""

from __future__ import annotations

import gzip
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
from dist_ckpt_strategies.formats.zarr2 import array_metadata
from dist_ckpt_strategies.formats.zarr2_arrays import ArrayLibrary
from dist_ckpt_strategies.storage.base import HostArray
from dist_ckpt_strategies.storage.file_systems import FileAccess
from dist_ckpt_strategies.storage.files import storage_error, sync_path
from dist_ckpt_strategies.storage.io_pool import Job
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


_MAX_THREADS = 8
"""zarr-python runs all its work on one event loop; more callers only queue there."""


def access_of_zarr_python(io_threads: int) -> FileAccess:
    """What suits zarr-python on any file system."""
    num_threads = min(io_threads, _MAX_THREADS)
    return FileAccess(
        num_read_threads=num_threads,
        num_write_threads=num_threads,
        num_metadata_threads=num_threads,
        is_direct=False,
        is_flushed_whole=False,
    )


class ZarrPython(ArrayLibrary):
    """See ArrayLibrary. zarr-python neither flushes nor minds missing chunks."""

    takes_raw = True

    def __init__(self) -> None:
        register_extension_dtypes()

    def open(self, array: ArraySpec, path: Path, *, writes: bool) -> Any:
        """See ArrayLibrary."""
        if not array.is_raw:
            return zarr.open_array(str(path), mode="r", zarr_format=2)
        metadata = array_metadata(array) | {"dimension_separator": array.separator}
        store = StorePath(LocalStore(path, read_only=not writes))
        config: Any = {"write_empty_chunks": True}
        return zarr.Array(zarr.AsyncArray(ArrayV2Metadata.from_dict(metadata), store, config))

    def read(self, opened: Any, box: Region, memory: HostArray) -> None:
        """See ArrayLibrary."""
        found = opened[box.slices()]
        raise_if_cancelled()
        memory[...] = found

    def write(self, opened: Any, box: Region, memory: HostArray, path: str) -> None:
        """See ArrayLibrary."""
        opened[box.slices()] = memory
        sync_path(path)

    def translated(self, job: Job, error: Exception) -> CheckpointError:
        """See ArrayLibrary. Codecs say what bytes they cannot decode."""
        if isinstance(error, OSError) and not isinstance(error, gzip.BadGzipFile):
            return storage_error(job.key, job.path, error)
        kind = StorageError if isinstance(error, UnknownCodecError) else CorruptCheckpointError
        text = f"{job.key}: {job.path}: zarr-python failed: {error!r}"
        return kind(text, key=job.key, path=str(job.path))
