"""Arrays of format 2 on a file system; every inner chunk has a digest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path

from dist_ckpt_strategies.errors import CheckpointError
from dist_ckpt_strategies.spec.array import ArraySpec
from dist_ckpt_strategies.spec.inner_grid import InnerGrid, Run
from dist_ckpt_strategies.spec.manifest import ArrayRecord
from dist_ckpt_strategies.spec.region import Extent, Region
from dist_ckpt_strategies.storage.base import ArrayRead, ArrayWrite, Transfer
from dist_ckpt_strategies.storage.chunk_files import (
    BUFFER_NBYTES,
    ChunkFile,
    ChunkFileRead,
    ChunkFileWrite,
    runs_at_a_time,
)
from dist_ckpt_strategies.storage.direct_io import BounceBuffers
from dist_ckpt_strategies.storage.file_access import FileAccess
from dist_ckpt_strategies.storage.files import create_file, storage_error, sync_path, write_file
from dist_ckpt_strategies.storage.inner_codec import at_box
from dist_ckpt_strategies.storage.transfers import Job, run_pooled
from dist_ckpt_strategies.storage.whole_flush import WholeFlush, whole_flush
from dist_ckpt_strategies.storage.zarr3 import (
    ARRAYS_NAME,
    array_directory,
    chunk_name,
    metadata_content,
    metadata_name,
)

_MAX_JOB_NBYTES = 16 << 20
"""Reads of a large file are cut into jobs of this size, for several threads to share."""

FindRecord = Callable[[str], ArrayRecord]
"""Gives what the manifest says about the array of a key."""


class Zarr3Writer:
    """Writes the arrays of one checkpoint directory; see ArrayWriter.

    Args:
        root: the checkpoint directory.
        access: what suits its file system.

    Attributes:
        digests: of each chunk file written, by key and index: of its inner chunks, then of its
            index.
    """

    def __init__(self, root: Path, access: FileAccess) -> None:
        self._root = root
        self._access = access
        self.digests: dict[tuple[str, Extent], list[int]] = {}

    def begin_creates(self, arrays: Sequence[ArraySpec]) -> Transfer:
        """See ArrayWriter."""
        jobs = (
            Job(a.key, self._path(metadata_name(a.key)), partial(self._create, a)) for a in arrays
        )
        return run_pooled(jobs, self._access.num_metadata_threads, _unexpected)

    def begin_writes(self, writes: Sequence[ArrayWrite]) -> Transfer:
        """See ArrayWriter."""
        buffers = BounceBuffers(BUFFER_NBYTES)
        jobs = []
        for write in writes:
            for index in write.array.chunks_of(write.region):
                file = self._file(write, index, buffers)
                jobs.append(Job(write.array.key, file.file.path, partial(self._write, file)))
        return run_pooled(jobs, self._access.num_write_threads, _unexpected)

    def begin_syncs(self, arrays: Sequence[ArraySpec]) -> Transfer:
        """See ArrayWriter."""
        if self._flush is not None:
            return run_pooled([Job("", self._root, self._flush.run)], 1, _unexpected)
        names = {array_directory(array.key): array.key for array in arrays}
        paths = {self._path(name): key for name, key in names.items()}
        if paths:
            paths[self._path(ARRAYS_NAME)] = ""
        paths[str(self._root)] = ""
        jobs = (Job(key, path, partial(sync_path, path)) for path, key in paths.items())
        return run_pooled(jobs, self._access.num_write_threads, _unexpected)

    @cached_property
    def _flush(self) -> WholeFlush | None:
        """What makes all writes durable, opened before the first; None for one file at a time."""
        return whole_flush(self._root) if self._access.is_flushed_whole else None

    def _create(self, array: ArraySpec) -> None:
        path, content = self._path(metadata_name(array.key)), metadata_content(array)
        if not create_file(path, content):
            write_file(Path(path), content)
        if self._flush is None:
            sync_path(path)

    def _file(self, write: ArrayWrite, index: Extent, buffers: BounceBuffers) -> ChunkFileWrite:
        array = write.array
        file = ChunkFile.of(array, index, self._path(chunk_name(array, index)))
        return ChunkFileWrite(
            file,
            at_box(write.source, file.grid.region.within(write.region)),
            buffers,
            is_direct=self._access.is_direct,
            is_flushed=self._flush is None,
        )

    def _write(self, write: ChunkFileWrite) -> None:
        self.digests[write.file.array.key, write.file.index] = write.run()

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"


class Zarr3Reader:
    """Reads the arrays of one checkpoint directory, and verifies what it reads; see ArrayReader.

    Args:
        root: the checkpoint directory.
        access: what suits its file system.
        find: gives the records that digests are compared with; None to compare none.
    """

    def __init__(self, root: Path, access: FileAccess, find: FindRecord | None) -> None:
        self._root = root
        self._access = access
        self._find = find

    def begin_reads(self, reads: Sequence[ArrayRead]) -> Transfer:
        """See ArrayReader."""
        buffers = BounceBuffers(BUFFER_NBYTES)
        jobs = [
            Job(read.array.key, part.file.path, part.run)
            for read in reads
            for part in self._parts(read, buffers)
        ]
        return run_pooled(jobs, self._access.num_read_threads, _unexpected)

    def _parts(self, read: ArrayRead, buffers: BounceBuffers) -> Iterator[ChunkFileRead]:
        array = read.array
        record = None if self._find is None else self._find(array.key)
        for index in array.chunks_of(read.region):
            file = ChunkFile.of(array, index, f"{self._root}/{chunk_name(array, index)}")
            for runs in _shares(file.grid, read.region):
                yield ChunkFileRead(
                    file,
                    None if record is None else record.chunks[index],
                    runs,
                    read.region,
                    read.target,
                    buffers,
                    is_direct=self._access.is_direct,
                )


def _shares(grid: InnerGrid, region: Region) -> Iterator[tuple[Run, ...]]:
    """The runs that hold a region, grouped so that one share is about _MAX_JOB_NBYTES."""
    share: list[Run] = []
    held = 0
    for run in grid.overlapping(region, runs_at_a_time(grid)):
        share.append(run)
        held += run.num_chunks * grid.stored_nbytes
        if held >= _MAX_JOB_NBYTES:
            yield tuple(share)
            share, held = [], 0
    if share:
        yield tuple(share)


def _unexpected(job: Job, error: Exception) -> CheckpointError:
    return storage_error(job.key, job.path, error)
