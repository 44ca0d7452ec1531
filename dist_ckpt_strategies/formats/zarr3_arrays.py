"""What writing and reading arrays of format 2 has in common, wherever they are kept."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path

from dist_ckpt_strategies.config import Options
from dist_ckpt_strategies.core.array import ArraySpec
from dist_ckpt_strategies.core.inner_grid import InnerGrid, Run
from dist_ckpt_strategies.core.region import Shape
from dist_ckpt_strategies.formats.manifest import ArrayRecord, ChunkRecord
from dist_ckpt_strategies.formats.zarr3 import (
    ARRAYS_NAME,
    array_directory,
    at_box,
    chunk_name,
    metadata_content,
    metadata_name,
)
from dist_ckpt_strategies.formats.zarr3_chunks import (
    BUFFER_NBYTES,
    ChunkBlocks,
    ChunkFile,
    ChunkFileRead,
    ChunkFileWrite,
    runs_at_a_time,
)
from dist_ckpt_strategies.storage.base import ArrayRead, ArrayWrite, HostArray, Transfer
from dist_ckpt_strategies.storage.direct_io import BounceBuffers
from dist_ckpt_strategies.storage.file_systems import (
    FileAccess,
    WholeFlush,
    permitted_access,
    whole_flush,
)
from dist_ckpt_strategies.storage.files import create_file, sync_path, write_file
from dist_ckpt_strategies.storage.io_pool import Job, run_pooled

FindRecord = Callable[[str], ArrayRecord]
"""Gives what the manifest says about the array of a key."""

WriteChunk = Callable[[ChunkFile, ChunkBlocks], list[int]]
"""Stores the elements of a chunk; the digests of its inner chunks, and of its index."""

ReadRuns = Callable[[ArrayRead, ChunkFile, ChunkRecord | None, tuple[Run, ...]], None]
"""Reads runs of a chunk, verifies them where there is a record, and puts them in their place."""


class ArrayWriterBase(ABC):
    """Writes the arrays of one checkpoint; see ArrayWriter.

    Args:
        num_metadata_threads: descriptions of arrays that are written at the same time.
        num_write_threads: chunks that are written at the same time.

    Attributes:
        digests: of each chunk written, by key and index: of its inner chunks, then of its index.
    """

    def __init__(self, num_metadata_threads: int, num_write_threads: int) -> None:
        self._num_metadata_threads = num_metadata_threads
        self._num_write_threads = num_write_threads
        self.digests: dict[tuple[str, Shape], list[int]] = {}

    def begin_creates(self, arrays: Sequence[ArraySpec]) -> Transfer:
        """See ArrayWriter."""
        jobs = (
            Job(a.key, self.path(metadata_name(a.key)), partial(self.create, a)) for a in arrays
        )
        return run_pooled(jobs, self._num_metadata_threads)

    def begin_writes(self, writes: Sequence[ArrayWrite]) -> Transfer:
        """See ArrayWriter."""
        write_chunk = self.chunk_writer()
        jobs = []
        for write in writes:
            for index in write.array.chunks_of(write.region):
                file = ChunkFile.of(write.array, index, self.path(chunk_name(write.array, index)))
                source = at_box(write.source, file.grid.region.within(write.region))
                run = partial(self._write, write_chunk, file, source)
                jobs.append(Job(write.array.key, file.path, run))
        return run_pooled(jobs, self._num_write_threads)

    @abstractmethod
    def begin_syncs(self, arrays: Sequence[ArraySpec]) -> Transfer:
        """See ArrayWriter."""

    @abstractmethod
    def path(self, name: str) -> str:
        """A file as its user calls it."""

    @abstractmethod
    def create(self, array: ArraySpec) -> None:
        """Write the description of an array."""

    @abstractmethod
    def chunk_writer(self) -> WriteChunk:
        """What writes the chunks of one transfer, on several threads."""

    def _write(self, write_chunk: WriteChunk, file: ChunkFile, source: HostArray) -> None:
        self.digests[file.array.key, file.index] = write_chunk(file, [(file.grid, source)])


class ArrayReaderBase(ABC):
    """Reads the arrays of one checkpoint, and verifies what it reads; see ArrayReader.

    Args:
        num_threads: parts of chunks that are read at the same time.
        find: gives the records that digests are compared with; None to compare none.
    """

    def __init__(self, num_threads: int, find: FindRecord | None) -> None:
        self._num_threads = num_threads
        self._find = find

    def begin_reads(self, reads: Sequence[ArrayRead]) -> Transfer:
        """See ArrayReader."""
        read_runs = self.run_reader()
        jobs = [job for read in reads for job in self._jobs(read, read_runs)]
        return run_pooled(jobs, self._num_threads)

    @abstractmethod
    def path(self, name: str) -> str:
        """A file as its user calls it."""

    @abstractmethod
    def shares(self, grid: InnerGrid, read: ArrayRead) -> Iterator[tuple[Run, ...]]:
        """The runs of a chunk that hold what is to be read, grouped to be read one by one."""

    @abstractmethod
    def run_reader(self) -> ReadRuns:
        """What reads the runs of one transfer, on several threads."""

    def _jobs(self, read: ArrayRead, read_runs: ReadRuns) -> Iterator[Job]:
        array = read.array
        record = None if self._find is None else self._find(array.key)
        for index in array.chunks_of(read.region):
            file = ChunkFile.of(array, index, self.path(chunk_name(array, index)))
            chunk = None if record is None else record.chunks[index]
            for runs in self.shares(file.grid, read):
                yield Job(array.key, file.path, partial(read_runs, read, file, chunk, runs))


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

    def begin_creates(self, arrays: Sequence[ArraySpec]) -> Transfer:
        """See ArrayWriter."""
        _ = self._flush  # here: a thread that blocks in it would keep the lock of the property
        return super().begin_creates(arrays)

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

        def write(file: ChunkFile, blocks: ChunkBlocks) -> list[int]:
            return ChunkFileWrite(
                file, blocks, buffers, is_direct=is_direct, is_flushed=is_flushed
            ).run()

        return write


def open_writer(root: Path, options: Options) -> Zarr3Writer:
    """What writes the arrays of a save to a directory. Picklable, for a process without torch."""
    return Zarr3Writer(root, permitted_access(root, options))


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
