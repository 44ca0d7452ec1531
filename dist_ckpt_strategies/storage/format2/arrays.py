"""Arrays of format 2 on a file system; every inner chunk has a digest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path

from dist_ckpt_strategies.spec.array import ArraySpec
from dist_ckpt_strategies.spec.inner_grid import InnerGrid, Run
from dist_ckpt_strategies.spec.manifest import ChunkRecord
from dist_ckpt_strategies.storage.base import ArrayRead, HostArray, Transfer
from dist_ckpt_strategies.storage.disk.direct_io import BounceBuffers
from dist_ckpt_strategies.storage.disk.file_access import FileAccess
from dist_ckpt_strategies.storage.disk.files import create_file, sync_path, write_file
from dist_ckpt_strategies.storage.disk.whole_flush import WholeFlush, whole_flush
from dist_ckpt_strategies.storage.format2.array_bases import (
    ArrayReaderBase,
    ArrayWriterBase,
    FindRecord,
    ReadRuns,
    WriteChunk,
)
from dist_ckpt_strategies.storage.format2.chunk_files import (
    BUFFER_NBYTES,
    ChunkFile,
    ChunkFileRead,
    ChunkFileWrite,
    runs_at_a_time,
)
from dist_ckpt_strategies.storage.format2.layout import (
    ARRAYS_NAME,
    array_directory,
    metadata_content,
    metadata_name,
)
from dist_ckpt_strategies.storage.transfers import Job, run_pooled

_MAX_JOB_NBYTES = 16 << 20
"""Reads of a large file are cut into jobs of this size, for several threads to share."""


class Zarr3Writer(ArrayWriterBase):
    """Writes the arrays of one checkpoint directory; see ArrayWriter.

    Args:
        root: the checkpoint directory.
        access: what suits its file system.
    """

    def __init__(self, root: Path, access: FileAccess) -> None:
        super().__init__(access.num_metadata_threads, access.num_write_threads)
        self._root = root
        self._access = access

    def begin_syncs(self, arrays: Sequence[ArraySpec]) -> Transfer:
        """See ArrayWriter."""
        if self._flush is not None:
            return run_pooled([Job("", self._root, self._flush.run)], 1)
        names = {array_directory(array.key): array.key for array in arrays}
        paths = {self.path(name): key for name, key in names.items()}
        if paths:
            paths[self.path(ARRAYS_NAME)] = ""
        paths[str(self._root)] = ""
        jobs = (Job(key, path, partial(sync_path, path)) for path, key in paths.items())
        return run_pooled(jobs, self._access.num_write_threads)

    @cached_property
    def _flush(self) -> WholeFlush | None:
        """What makes all writes durable, opened before the first; None for one file at a time."""
        return whole_flush(self._root) if self._access.is_flushed_whole else None

    def path(self, name: str) -> str:
        """See ArrayWriterBase."""
        return f"{self._root}/{name}"

    def create(self, array: ArraySpec) -> None:
        """See ArrayWriterBase."""
        path, content = self.path(metadata_name(array.key)), metadata_content(array)
        if not create_file(path, content):
            write_file(Path(path), content)
        if self._flush is None:
            sync_path(path)

    def chunk_writer(self) -> WriteChunk:
        """See ArrayWriterBase."""
        buffers = BounceBuffers(BUFFER_NBYTES)
        is_direct, is_flushed = self._access.is_direct, self._flush is None

        def write(file: ChunkFile, source: HostArray) -> list[int]:
            return ChunkFileWrite(
                file, source, buffers, is_direct=is_direct, is_flushed=is_flushed
            ).run()

        return write


class Zarr3Reader(ArrayReaderBase):
    """Reads the arrays of one checkpoint directory, and verifies what it reads; see ArrayReader.

    Args:
        root: the checkpoint directory.
        access: what suits its file system.
        find: gives the records that digests are compared with; None to compare none.
    """

    def __init__(self, root: Path, access: FileAccess, find: FindRecord | None) -> None:
        super().__init__(access.num_read_threads, find)
        self._root = root
        self._access = access

    def path(self, name: str) -> str:
        """See ArrayReaderBase."""
        return f"{self._root}/{name}"

    def shares(self, grid: InnerGrid, read: ArrayRead) -> Iterator[tuple[Run, ...]]:
        """See ArrayReaderBase. One share is about _MAX_JOB_NBYTES."""
        share: list[Run] = []
        held = 0
        for run in grid.overlapping(read.region, runs_at_a_time(grid)):
            share.append(run)
            held += run.num_chunks * grid.stored_nbytes
            if held >= _MAX_JOB_NBYTES:
                yield tuple(share)
                share, held = [], 0
        if share:
            yield tuple(share)

    def run_reader(self) -> ReadRuns:
        """See ArrayReaderBase."""
        buffers = BounceBuffers(BUFFER_NBYTES)
        is_direct = self._access.is_direct

        def read_runs(
            read: ArrayRead, file: ChunkFile, record: ChunkRecord | None, runs: tuple[Run, ...]
        ) -> None:
            ChunkFileRead(
                file, record, runs, read.region, read.target, buffers, is_direct=is_direct
            ).run()

        return read_runs
