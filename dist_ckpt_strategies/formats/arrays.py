"""Write and read the arrays of a checkpoint of either format; in a directory here.

Raw chunks of format 1 are the bytes of their elements: a region whose rows are long is read
straight into the tensor's memory. Inner chunks of format 2 are compared with their digests while
they are in the processor's cache.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from dist_ckpt_strategies.config import Options
from dist_ckpt_strategies.core.array import ArraySpec, Region, Shape
from dist_ckpt_strategies.core.inner_grid import InnerGrid, Run, raw_spans
from dist_ckpt_strategies.formats import zarr2, zarr3
from dist_ckpt_strategies.formats.chunks import (
    Blocks,
    FileSink,
    InnerChunks,
    at_region,
    bits_of,
    decode_run,
    encode_chunk,
    memory_of,
    needed_nbytes,
    opened_chunk,
    require_size,
    span_shares,
)
from dist_ckpt_strategies.formats.decoders import decode_chunk
from dist_ckpt_strategies.formats.manifest import ArrayRecord
from dist_ckpt_strategies.storage.file_systems import (
    BUFFER_NBYTES,
    MIN_DIRECT_NBYTES,
    BounceBuffers,
    Bytes,
    file_access,
    is_cached,
    pread_into,
    read_aligned,
    read_direct,
    start_direct,
    whole_flush,
    write_buffered,
)
from dist_ckpt_strategies.storage.files import (
    directories_above,
    file_errors,
    new_file,
    sync_path,
    write_file,
)
from dist_ckpt_strategies.storage.io_pool import ByteBudget, Job, Transfer, raise_if_cancelled
from dist_ckpt_strategies.storage.store import ArrayRead, ArrayWrite, Directory, HostArray, Store

FindRecord = Callable[[str], ArrayRecord]
"""Gives what the manifest says about the array of a key."""

_MAX_JOB_NBYTES = 16 << 20
"""Reads of a large file are cut into jobs of this size, for several threads to share."""

_MIN_DIRECT_READ_NBYTES = 256 << 10
"""Below this, asking whether a file is cached costs as much as reading it."""


def directory_name(array: ArraySpec) -> str:
    """The directory of an array, below the checkpoint's."""
    return array.key if array.inner_shape is None else zarr3.array_directory(array.key)


def chunk_name(array: ArraySpec, index: Shape) -> str:
    """The file of a chunk, below the checkpoint's directory."""
    if array.inner_shape is None:
        return f"{array.key}/{array.chunk_name(index)}"
    return f"{zarr3.array_directory(array.key)}/{'.'.join(['c', *map(str, index)])}"


class ArrayWriterBase(ABC):
    """Writes the arrays of one checkpoint; see ArrayWriter.

    Args:
        store: the checkpoint.
        num_metadata_threads: descriptions of arrays that are written at the same time.
        num_write_threads: chunks that are written at the same time.

    Attributes:
        digests: of each chunk of format 2 written, by key and index: of its inner chunks, then of
            its index.
    """

    def __init__(self, store: Store, num_metadata_threads: int, num_write_threads: int) -> None:
        self._store = store
        self._num_metadata_threads = num_metadata_threads
        self._num_write_threads = num_write_threads
        self.digests: dict[tuple[str, Shape], list[int]] = {}

    def begin_creates(self, arrays: Sequence[ArraySpec]) -> Transfer:
        """See ArrayWriter."""
        jobs = []
        for array in arrays:
            layout = zarr2 if array.inner_shape is None else zarr3
            name = f"{directory_name(array)}/{layout.METADATA_NAME}"
            create = partial(self._create, array.key, name, layout.metadata_content(array))
            jobs.append(Job(array.key, self._store.path(name), create))
        return Transfer(jobs, self._num_metadata_threads)

    def begin_writes(self, writes: Sequence[ArrayWrite]) -> Transfer:
        """See ArrayWriter."""
        jobs = []
        for write in writes:
            array, whole = write.array, Region.whole(write.array.shape)
            for index in write.region.cells(array.chunk_shape):
                chunk = array.chunk_region(index)
                held = chunk.intersect(whole)
                assert held is not None  # noqa: S101 - cells gives none that are outside
                source = at_region(write.source, held.within(write.region))
                blocks = [(chunk if array.inner_shape is None else held, source)]
                path = self._store.path(chunk_name(array, index))
                jobs.append(Job(array.key, path, partial(self._write, array, index, blocks)))
        return Transfer(jobs, self._num_write_threads)

    def _write(self, array: ArraySpec, index: Shape, blocks: Blocks) -> None:
        digests = self.write_chunk(array, index, blocks)
        if digests:
            self.digests[array.key, index] = digests

    @abstractmethod
    def begin_syncs(self, arrays: Sequence[ArraySpec]) -> Transfer:
        """See ArrayWriter."""

    @abstractmethod
    def write_chunk(self, array: ArraySpec, index: Shape, blocks: Blocks) -> list[int]:
        """Store a chunk; the digests of its inner chunks and of its index, in format 2.

        Raises:
            StorageError: it cannot be written.
        """

    @abstractmethod
    def _create(self, key: str, name: str, content: bytes) -> None:
        """Make a small file, or replace it."""


class DirectoryWriter(ArrayWriterBase):
    """Writes the arrays of one checkpoint directory; see ArrayWriter.

    Args:
        root: the directory.
        options: whether files go past the page cache and are flushed at once.

    Raises:
        StorageError: the directory cannot be opened.
    """

    def __init__(self, root: Path, options: Options) -> None:
        self._root = root.absolute()
        access = file_access(self._root, options)
        threads = access.num_metadata_threads, access.num_write_threads
        super().__init__(Directory(self._root), *threads)
        self._is_direct = access.is_direct
        self._buffers = BounceBuffers()
        # Opened before the first write, which it then covers. None: one file at a time.
        self._flush = whole_flush(self._root) if access.is_flushed_whole else None

    def begin_syncs(self, arrays: Sequence[ArraySpec]) -> Transfer:
        """See ArrayWriter."""
        if self._flush is not None:
            return Transfer([Job("", self._root, self._flush)], 1)
        names = {directory_name(array): array.key for array in arrays}
        paths = directories_above(self._root, names)
        jobs = (Job(key, path, partial(sync_path, path)) for path, key in paths.items())
        return Transfer(jobs, self._num_write_threads)

    def _create(self, key: str, name: str, content: bytes) -> None:
        del key  # the job's error names it
        path = self._store.path(name)
        try:
            with new_file(path, is_flushed=self._flush is None) as handle:
                write_buffered(handle, np.frombuffer(content, np.uint8))
        except FileExistsError:
            write_file(Path(path), content)

    def write_chunk(self, array: ArraySpec, index: Shape, blocks: Blocks) -> list[int]:
        """See ArrayWriterBase. The file must not be there yet."""
        path = self._store.path(chunk_name(array, index))
        is_flushed = self._flush is None
        with file_errors(array.key, path), new_file(path, is_flushed=is_flushed) as handle:
            raise_if_cancelled()
            grid = None if array.inner_shape is None else InnerGrid.of(array, index)
            buffer_nbytes = 0 if grid is None else needed_nbytes(grid)
            file_nbytes = array.chunk_nbytes if grid is None else grid.file_nbytes
            is_direct = (
                self._is_direct
                and file_nbytes >= MIN_DIRECT_NBYTES
                and buffer_nbytes <= BUFFER_NBYTES
                and start_direct(handle)
            )
            if not (is_direct or buffer_nbytes):
                return encode_chunk(array, index, blocks, FileSink(handle))
            with self._buffers.borrowed(buffer_nbytes) as buffer:
                sink = FileSink(handle, buffer, is_direct=is_direct)
                digests = encode_chunk(array, index, blocks, sink)
                sink.finish()
                return digests


_ROWS_NBYTES = 2 << 20
"""Of a raw chunk of format 1, read at a time where the rows of a region are short."""


class Format1Reader:
    """Reads the arrays of one checkpoint directory of format ("zarr", 1); see ArrayReader.

    Takes ``max_inflight_bytes`` for chunks that are decoded; a larger one goes alone.

    Args:
        root: the directory.
        options: threads, bounds and the decoder.
    """

    def __init__(self, root: Path, options: Options) -> None:
        self._root = root.absolute()
        self._options = options
        self._access = file_access(self._root, options)
        self._buffers = BounceBuffers()
        self._budget = ByteBudget(options.max_inflight_bytes)

    def begin_reads(self, reads: Sequence[ArrayRead]) -> Transfer:
        """See ArrayReader."""
        jobs: list[Job] = []
        num_threads = self._access.num_read_threads
        for read in reads:
            in_place = self._jobs_in_place(read)
            if in_place is None:
                num_threads = max(num_threads, self._options.io_threads)
                in_place = self._jobs_by_chunk(read)
            jobs += in_place
        return Transfer(jobs, num_threads)

    def _jobs_in_place(self, read: ArrayRead) -> Iterator[Job] | None:
        """Reads into the target's own memory; None where that is not possible, or too slow."""
        array, target = read.array, read.target
        if not (target.flags.c_contiguous and target.flags.writeable):
            return None
        spans = raw_spans(array, read.region)
        if spans is None:
            return None
        memory = target.reshape(-1).view(np.uint8)
        paths = [f"{self._root}/{chunk_name(array, chunk.index)}" for chunk in spans]
        return (
            Job(array.key, path, partial(self._read_spans, array, path, share))
            for chunk, path in zip(spans, paths, strict=True)
            for share in span_shares(chunk, memory)
        )

    def _read_spans(
        self, array: ArraySpec, path: str, spans: tuple[tuple[int, Bytes], ...]
    ) -> None:
        with opened_chunk(array, path, array.chunk_nbytes) as handle:
            # Whole blocks are read past the page cache: of a small part more than it has.
            is_direct = (
                self._access.is_direct
                and sum(memory.size for _, memory in spans) >= _MIN_DIRECT_READ_NBYTES
                and not is_cached(handle, array.chunk_nbytes)
                and start_direct(handle)
            )
            if is_direct:
                with self._buffers.borrowed() as buffer:
                    found = [read_direct(handle, at, memory, buffer) for at, memory in spans]
            else:
                found = [pread_into(handle, at, memory) for at, memory in spans]
        for (byte_offset, memory), count in zip(spans, found, strict=True):
            if count != memory.size:
                require_size(array, path, byte_offset + count, array.chunk_nbytes)

    def _jobs_by_chunk(self, read: ArrayRead) -> Iterator[Job]:
        array = read.array
        for index in read.region.cells(array.chunk_shape):
            region = read.region.intersect(array.chunk_region(index))
            assert region is not None  # noqa: S101 - cells yields only chunks that overlap
            target = at_region(read.target, region.within(read.region))
            path = f"{self._root}/{chunk_name(array, index)}"
            yield Job(
                array.key, path, partial(self._read_chunk, array, index, path, region, target)
            )

    def _read_chunk(
        self, array: ArraySpec, index: Shape, path: str, region: Region, target: HostArray
    ) -> None:
        """Copy a region of one chunk out of its elements, which are read or decoded first."""
        nbytes = array.chunk_nbytes
        with opened_chunk(array, path, nbytes if array.is_raw else None) as handle:
            if array.is_raw:
                self._read_rows(
                    array, path, handle, region.within(array.chunk_region(index)), target
                )
                return
            with self._budget.held(2 * nbytes):
                raise_if_cancelled()
                engine = self._options.engine
                elements = decode_chunk(self._root, array, index, region, handle, engine)
                raise_if_cancelled()
                np.copyto(bits_of(target), bits_of(elements))

    def _read_rows(
        self, array: ArraySpec, path: str, handle: int, region: Region, target: HostArray
    ) -> None:
        """Read the rows that hold a region of a raw chunk, a few MiB of them at a time."""
        shape = array.chunk_shape or (1,)
        region = region if region.ndim else Region((0,), (1,))
        target = target.reshape(region.shape) if target.ndim == 0 else target
        row_nbytes = array.chunk_nbytes // shape[0]
        step = max(1, min(region.shape[0], _ROWS_NBYTES // row_nbytes))
        with self._budget.held(step * row_nbytes):
            memory = np.empty(step * row_nbytes, np.uint8)
            for start in range(0, region.shape[0], step):
                num_rows = min(step, region.shape[0] - start)
                content = memory[: num_rows * row_nbytes]
                byte_offset = (region.offset[0] + start) * row_nbytes
                found = byte_offset + pread_into(handle, byte_offset, content)
                if found < byte_offset + content.size:
                    require_size(array, path, found, array.chunk_nbytes)
                rows = content.view(array.dtype.numpy).reshape(num_rows, *shape[1:])
                part = rows[(slice(None), *region.slices()[1:])]
                raise_if_cancelled()
                np.copyto(bits_of(target[start : start + num_rows]), bits_of(part))


class Format2Reader(ABC):
    """Reads the arrays of one checkpoint of format ("zarr", 2), and verifies what it reads.

    See ArrayReader.

    Args:
        store: the checkpoint.
        num_threads: parts of chunks that are read at the same time.
        find: gives the records that digests are compared with; None to compare none.
    """

    def __init__(self, store: Store, num_threads: int, find: FindRecord | None) -> None:
        self._store = store
        self._num_threads = num_threads
        self._find = find

    def begin_reads(self, reads: Sequence[ArrayRead]) -> Transfer:
        """See ArrayReader."""
        return Transfer([job for read in reads for job in self._jobs(read)], self._num_threads)

    def _jobs(self, read: ArrayRead) -> Iterator[Job]:
        array = read.array
        record = None if self._find is None else self._find(array.key)
        for index in read.region.cells(array.chunk_shape):
            path = self._store.path(chunk_name(array, index))
            grid = InnerGrid.of(array, index)
            chunk = InnerChunks(array, index, grid, path, record.chunks[index] if record else None)
            for runs in self._shares(grid, read.region):
                yield Job(array.key, path, partial(self._read_runs, read, chunk, runs))

    @abstractmethod
    def _shares(self, grid: InnerGrid, region: Region) -> Iterator[tuple[Run, ...]]:
        """The runs of a chunk that hold what is to be read, grouped to be read one by one."""

    @abstractmethod
    def _read_runs(self, read: ArrayRead, chunk: InnerChunks, runs: tuple[Run, ...]) -> None:
        """Read runs of a chunk, verify them, and fill their place in the target."""


class DirectoryReader(Format2Reader):
    """Reads the arrays of one checkpoint directory; see Format2Reader.

    Args:
        root: the directory.
        options: how to read.
        find: see Format2Reader.
    """

    def __init__(self, root: Path, options: Options, find: FindRecord | None) -> None:
        access = file_access(root, options)
        super().__init__(Directory(root), access.num_read_threads, find)
        self._is_direct = access.is_direct
        self._buffers = BounceBuffers()

    def _shares(self, grid: InnerGrid, region: Region) -> Iterator[tuple[Run, ...]]:
        """See Format2Reader. One share is about _MAX_JOB_NBYTES."""
        share: list[Run] = []
        held = 0
        for run in grid.runs(region):
            share.append(run)
            held += run.num_chunks * grid.stored_nbytes
            if held >= _MAX_JOB_NBYTES:
                yield tuple(share)
                share, held = [], 0
        if share:
            yield tuple(share)

    def _read_runs(self, read: ArrayRead, chunk: InnerChunks, runs: tuple[Run, ...]) -> None:
        grid, buffer_nbytes = chunk.grid, needed_nbytes(chunk.grid)
        with (
            opened_chunk(chunk.array, chunk.path, grid.file_nbytes) as handle,
            self._buffers.borrowed(buffer_nbytes) as buffer,
        ):
            is_direct = (
                self._is_direct
                and grid.file_nbytes >= MIN_DIRECT_NBYTES
                and buffer_nbytes <= BUFFER_NBYTES
                and not is_cached(handle, grid.file_nbytes)
                and start_direct(handle)
            )
            for run in runs:
                memory = None if is_direct else memory_of(grid, run, read.region, read.target)
                nbytes = run.num_chunks * grid.stored_nbytes
                byte_offset = run.first * grid.stored_nbytes
                if is_direct:
                    content = read_aligned(handle, byte_offset, nbytes, buffer)
                else:
                    content = buffer[:nbytes] if memory is None else memory
                    content = content[: pread_into(handle, byte_offset, content)]
                if content.size != nbytes:
                    raise OSError(0, "it ended while it was read")
                raise_if_cancelled()
                chunk.verify(run, content)
                if memory is None:
                    decode_run(grid, run, read.array.dtype, content, read.region, read.target)
