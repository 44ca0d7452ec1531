"""Chunks through TensorStore: the default engine.

Settings and the reason for each: ``file_io_locking`` none, because the default can leave the tail
of an old value after a crash; ``fill_missing_data_reads`` false, because a lost chunk must not read
as zeros; ``fill_value`` null in the metadata, so that all-zero chunks are stored.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import tensorstore as ts

from dist_ckpt_strategies.core.array import ArraySpec
from dist_ckpt_strategies.core.region import Region
from dist_ckpt_strategies.errors import (
    CheckpointError,
    CorruptCheckpointError,
    IncompleteCheckpointError,
    StorageError,
)
from dist_ckpt_strategies.formats.zarr2 import METADATA_NAME, array_metadata
from dist_ckpt_strategies.formats.zarr2_arrays import ArrayLibrary
from dist_ckpt_strategies.storage.base import HostArray
from dist_ckpt_strategies.storage.io_pool import Job, limited

_FILE_IN_MESSAGE = re.compile(r'local file "([^"]+)"')


def array_store_spec(path: Path) -> dict[str, Any]:
    """The TensorStore spec of an existing format 1 array, for readers without our code too."""
    return {
        "driver": "zarr",
        "kvstore": {"driver": "file", "path": str(plain_path(path))},
        "metadata_key": METADATA_NAME,
        "fill_missing_data_reads": False,
    }


@limited
def plain_path(path: Path) -> Path:
    """The path as TensorStore takes it: absolute, without ``..`` and with one leading slash.

    Raises:
        StorageError: TensorStore cannot name it.
    """
    found = path.absolute()
    if ".." in found.parts:
        found = found.resolve()
    if "\\" in str(found):
        raise StorageError(
            f"{found}: TensorStore takes the backslash for '/'; rename the directory, or "
            "choose engine='zarr'",
            path=str(found),
        )
    return Path("/", *found.parts[1:])


class TensorStore(ArrayLibrary):
    """See ArrayLibrary.

    Args:
        io_threads: files that it reads or writes at the same time.
    """

    takes_raw = False

    def __init__(self, io_threads: int) -> None:
        self._context = ts.Context(
            {
                "file_io_concurrency": {"limit": io_threads},
                "file_io_sync": True,
                "file_io_locking": {"mode": "none"},
                "cache_pool": {"total_bytes_limit": 0},
            }
        )

    def open(self, array: ArraySpec, path: Path, *, writes: bool) -> Any:
        """See ArrayLibrary."""
        spec = array_store_spec(path)
        if array.is_raw:
            metadata = array_metadata(array) | {"dimension_separator": array.separator}
            spec |= {"metadata": metadata, "assume_metadata": True}
        return ts.open(spec, context=self._context, read=True, write=writes).result()

    def read(self, opened: Any, box: Region, memory: HostArray) -> None:
        """See ArrayLibrary."""
        source = opened[box.slices()].translate_to[0]
        ts.array(memory, copy=False, write=True).write(source).result()

    def write(self, opened: Any, box: Region, memory: HostArray, path: str) -> None:  # noqa: ARG002
        """See ArrayLibrary. It flushes files itself."""
        target = opened[box.slices()]
        target.write(memory, can_reference_source_data_indefinitely=True).result()

    def translated(self, job: Job, error: Exception) -> CheckpointError:
        """See ArrayLibrary. The text names the file."""
        text = str(error)
        named = _FILE_IN_MESSAGE.search(text)
        path = named.group(1) if named else str(job.path)
        kind: type[StorageError] = StorageError
        if text.startswith("NOT_FOUND"):
            kind = IncompleteCheckpointError
        elif text.startswith("RESOURCE_EXHAUSTED"):
            text = f"no space left; free some, or save elsewhere ({text})"
        elif "is not registered" in text or "filters are not supported" in text:
            text = f"TensorStore has no decoder for it; engine='zarr' may have one ({text})"
        elif text.startswith(("DATA_LOSS", "INVALID_ARGUMENT", "FAILED_PRECONDITION")):
            kind = CorruptCheckpointError
        return kind(f"{job.key}: {path}: {text}", key=job.key, path=path)
