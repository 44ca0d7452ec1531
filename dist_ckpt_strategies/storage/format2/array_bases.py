"""What writing and reading arrays of format 2 has in common, wherever they are kept."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from dist_ckpt_strategies.spec.array import ArraySpec
from dist_ckpt_strategies.spec.inner_grid import InnerGrid, Run
from dist_ckpt_strategies.spec.manifest import ArrayRecord, ChunkRecord
from dist_ckpt_strategies.spec.region import Extent
from dist_ckpt_strategies.storage.base import ArrayRead, ArrayWrite, HostArray, Transfer
from dist_ckpt_strategies.storage.format2.chunk_files import ChunkFile
from dist_ckpt_strategies.storage.format2.inner_codec import at_box
from dist_ckpt_strategies.storage.format2.layout import chunk_name, metadata_name
from dist_ckpt_strategies.storage.transfers import Job, run_pooled

FindRecord = Callable[[str], ArrayRecord]
"""Gives what the manifest says about the array of a key."""

WriteChunk = Callable[[ChunkFile, HostArray], list[int]]
"""Stores the elements of a chunk's region; the digests of its inner chunks, and of its index."""

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
        self.digests: dict[tuple[str, Extent], list[int]] = {}

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
    def path(self, name: str) -> str:
        """A file as its user calls it."""

    @abstractmethod
    def create(self, array: ArraySpec) -> None:
        """Write the description of an array."""

    @abstractmethod
    def chunk_writer(self) -> WriteChunk:
        """What writes the chunks of one transfer, on several threads."""

    def _write(self, write_chunk: WriteChunk, file: ChunkFile, source: HostArray) -> None:
        self.digests[file.array.key, file.index] = write_chunk(file, source)


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
