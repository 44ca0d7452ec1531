"""Array data through TensorStore: the default engine.

Settings and the reason for each: ``file_io_locking`` none, because the default can leave the tail
of an old value after a crash; ``fill_missing_data_reads`` false, because a lost chunk must not read
as zeros; ``fill_value`` null in the metadata, so that all-zero chunks are stored.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import tensorstore as ts

from dist_ckpt_strategies.core.array import ArraySpec
from dist_ckpt_strategies.core.region import Region
from dist_ckpt_strategies.errors import CheckpointError, CorruptCheckpointError, StorageError
from dist_ckpt_strategies.formats.raw_chunks import (
    RawWrite,
    missing_chunk,
    raw_reads,
    raw_write,
    require_chunk,
)
from dist_ckpt_strategies.formats.zarr2 import (
    METADATA_NAME,
    Zarr2Layout,
    array_metadata,
    begin_creates,
    begin_syncs,
    by_chunk,
    library_nbytes,
)
from dist_ckpt_strategies.storage.base import ArrayRead, ArrayWrite, HostArray, Transfer
from dist_ckpt_strategies.storage.file_systems import FileAccess, WholeFlush, whole_flush
from dist_ckpt_strategies.storage.files import file_errors
from dist_ckpt_strategies.storage.io_pool import (
    AllTransfers,
    BoundedTransfers,
    Job,
    Pending,
    PendingTransfers,
    Start,
    limited,
    run_pooled,
    run_with_limit,
)

_MAX_TRUSTED_NBYTES = 1 << 30
"""Chunks stated to be larger are looked at before they are read."""

_FILE_IN_MESSAGE = re.compile(r'local file "([^"]+)"')


def array_store_spec(path: Path) -> dict[str, Any]:
    """The TensorStore spec of an existing format 1 array, for readers without our code too."""
    return {
        "driver": "zarr",
        "kvstore": {"driver": "file", "path": str(_plain_path(path))},
        "metadata_key": METADATA_NAME,
        "fill_missing_data_reads": False,
    }


@limited
def _plain_path(path: Path) -> Path:
    """The path as TensorStore takes it: absolute, without ``..`` and with one leading slash."""
    found = path.absolute()
    if ".." in found.parts:
        found = found.resolve()
    return Path("/", *found.parts[1:])


class TensorStoreArrays:
    """Reads and writes the arrays below one directory; see ArrayStore.

    Raw chunks that land in one piece are read by positioned reads instead (raw_chunks), which is
    what makes a load as fast as the disk.
    """

    def __init__(
        self,
        root: Path,
        access: FileAccess,
        io_threads: int,
        timeout_s: float = 1800.0,
        max_inflight_bytes: int = 512 << 20,
    ) -> None:
        self._root = _plain_path(root)
        if "\\" in str(self._root):
            raise StorageError(
                f"{self._root}: TensorStore takes the backslash for '/'; rename the directory, or "
                "choose engine='zarr'",
                path=str(self._root),
            )
        self._layout = Zarr2Layout(self._root)
        self._timeout_s = timeout_s
        self._budget_nbytes = max_inflight_bytes
        self._access = access
        self._context = ts.Context(
            {
                "file_io_concurrency": {"limit": io_threads},
                "file_io_sync": True,
                "file_io_locking": {"mode": "none"},
                "cache_pool": {"total_bytes_limit": 0},
            }
        )

    def begin_creates(self, arrays: Sequence[ArraySpec]) -> Transfer:
        """See ArrayStore."""
        is_flushed = self._flush is None
        num_threads = self._access.num_metadata_threads
        return begin_creates(self._layout, arrays, num_threads, is_flushed=is_flushed)

    def begin_syncs(self, arrays: Sequence[ArraySpec]) -> Transfer:
        """See ArrayStore."""
        if self._flush is None:
            return begin_syncs(self._layout, arrays, self._access.num_write_threads)
        return run_pooled([Job("", self._root, self._flush.run)], 1, _unexpected)

    @cached_property
    def _flush(self) -> WholeFlush | None:
        """What makes all writes durable, opened before the first; None for one file at a time."""
        return whole_flush(self._root) if self._access.is_flushed_whole else None

    def begin_writes(self, writes: Sequence[ArrayWrite]) -> Transfer:
        """See ArrayStore."""
        bounce = self._access.bounce_buffers()
        is_flushed = self._flush is None
        direct = [raw_write(self._root, w, bounce, is_flushed=is_flushed) for w in writes]
        encoded = [write for write, raw in zip(writes, direct, strict=True) if raw is None]
        encoding = self._begin_encoded_writes(encoded)
        return AllTransfers((encoding, self._begin_files(filter(None, direct))))

    def _begin_files(self, files: Iterable[RawWrite]) -> Transfer:
        jobs = (Job(file.array.key, file.path, file.run) for file in files)
        return run_pooled(jobs, self._access.num_write_threads, _unexpected)

    def _begin_encoded_writes(self, writes: Sequence[ArrayWrite]) -> Transfer:
        def describe() -> None:
            for write in writes:
                self._layout.ensure(write.array)

        if writes:
            run_with_limit(describe, self._root)
        opened = self._open_all([write.array for write in writes])
        return self._bounded(
            Start(
                library_nbytes(write.array),
                partial(self._begin_write, write.array, target, box, memory),
            )
            for write, target in zip(writes, opened, strict=True)
            for box, memory in by_chunk(write.array, write.region, write.source)
        )

    def _begin_write(
        self, array: ArraySpec, target: Any, box: Region, memory: HostArray
    ) -> Pending:
        stored = target[box.slices()]
        done = stored.write(memory, can_reference_source_data_indefinitely=True)
        return self._pending(array, done.commit)

    def begin_reads(self, reads: Sequence[ArrayRead]) -> Transfer:
        """See ArrayStore."""
        bounce = self._access.bounce_buffers()
        direct = [raw_reads(self._root, read, bounce) for read in reads]
        decoded = [read for read, raws in zip(reads, direct, strict=True) if raws is None]
        jobs = [Job(raw.array.key, raw.path, raw.run) for raws in direct for raw in raws or ()]
        decoding = self._begin_decoded_reads(decoded)
        return AllTransfers(
            (decoding, run_pooled(jobs, self._access.num_read_threads, _unexpected))
        )

    def _begin_decoded_reads(self, reads: Sequence[ArrayRead]) -> Transfer:
        for read in reads:
            if read.array.chunk_nbytes > _MAX_TRUSTED_NBYTES:
                self._require_plausible(read)
        opened = self._open_all([read.array for read in reads])
        return self._bounded(
            Start(
                library_nbytes(read.array),
                partial(self._begin_read, read.array, stored, box, memory),
            )
            for read, stored in zip(reads, opened, strict=True)
            for box, memory in by_chunk(read.array, read.region, read.target)
        )

    def _begin_read(self, array: ArraySpec, stored: Any, box: Region, memory: HostArray) -> Pending:
        source = stored[box.slices()].translate_to[0]
        done = ts.array(memory, copy=False, write=True).write(source)
        return self._pending(array, done.commit)

    def _bounded(self, starts: Iterable[Start]) -> Transfer:
        """TensorStore has every chunk that it encodes or decodes in memory, as a whole."""
        return BoundedTransfers(starts, self._budget_nbytes)

    @limited
    def _require_plausible(self, read: ArrayRead) -> None:
        """Raise where the metadata states chunks for which TensorStore would run out of memory.

        It then ends the process. A raw chunk has its size on disk, too.
        """
        array = read.array
        for index in array.chunks_of(read.region):
            path = self._layout.chunk_path(array, index)
            with file_errors(array.key, path):
                require_chunk(array, path)
        if array.chunk_nbytes > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
            metadata = self._layout.metadata_path(array.key)
            raise StorageError(
                f"{array.key}: {metadata} states chunks of {array.chunk_nbytes} bytes, more than "
                "this machine has memory to decode",
                key=array.key,
                path=metadata,
            )

    def _open_all(self, arrays: Sequence[ArraySpec]) -> list[Any]:
        """Every array, all opened at once, before anything is transferred."""
        futures = [self._open(array) for array in arrays]
        pendings = [self._pending(*pair) for pair in zip(arrays, futures, strict=True)]
        PendingTransfers(tuple(pendings)).wait(self._timeout_s)
        return [future.result() for future in futures]

    def _open(self, array: ArraySpec) -> Any:
        """The array, without reading its metadata again: we hold it."""
        spec = array_store_spec(self._root / array.key)
        if array.is_raw:
            metadata = array_metadata(array) | {"dimension_separator": array.separator}
            spec |= {"metadata": metadata, "assume_metadata": True}
        try:
            return ts.open(spec, context=self._context, read=True, write=array.is_raw)
        except ValueError as error:  # what it refuses without looking at the files
            raise _translated(array, self._root / array.key, error) from error

    def _pending(self, array: ArraySpec, future: Any) -> Pending:
        directory = self._root / array.key
        return Pending(f"{array.key}: {directory}", future, partial(_translated, array, directory))


def _translated(array: ArraySpec, directory: Path, error: Exception) -> CheckpointError:
    """What an error of TensorStore means; its text names the file."""
    text = str(error)
    named = _FILE_IN_MESSAGE.search(text)
    path = Path(named.group(1)) if named else directory
    if text.startswith("NOT_FOUND"):
        return missing_chunk(array, path)
    if text.startswith("RESOURCE_EXHAUSTED"):
        text = f"no space left; free some, or save elsewhere ({text})"
    elif _is_unknown(text):
        text = f"TensorStore has no decoder for it; engine='zarr' may have one ({text})"
    kind = CorruptCheckpointError if _is_damage(text) else StorageError
    return kind(f"{array.key}: {path}: {text}", key=array.key, path=str(path))


def _is_unknown(text: str) -> bool:
    """Whether the bytes may be whole, but are encoded as TensorStore never does."""
    return "is not registered" in text or "filters are not supported" in text


def _is_damage(text: str) -> bool:
    """Whether TensorStore found other bytes than the format allows."""
    return text.startswith(("DATA_LOSS", "INVALID_ARGUMENT", "FAILED_PRECONDITION"))


def _unexpected(job: Job, error: Exception) -> CheckpointError:
    return StorageError(f"{job.key}: {job.path}: {error!r}", key=job.key, path=str(job.path))
