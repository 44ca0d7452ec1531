"""Write and read the arrays of a checkpoint: of either format in a directory, format 2 in a bucket.

Raw chunks of format 1 are the bytes of their elements: a region whose rows are long is read
straight into the tensor's memory. Inner chunks of format 2 are compared with their digests while
they are in the processor's cache. A process that only writes loads no torch for this.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

import numpy as np

from dist_ckpt_strategies.config import Options
from dist_ckpt_strategies.core.array import ArraySpec, Region, Shape
from dist_ckpt_strategies.core.inner_grid import RUN_NBYTES, InnerGrid, Run, raw_spans
from dist_ckpt_strategies.errors import IncompleteCheckpointError, StorageError
from dist_ckpt_strategies.formats import zarr2
from dist_ckpt_strategies.formats.chunks import (
    ZARR_JSON,
    Blocks,
    InnerChunks,
    at_region,
    bits_of,
    decode_run,
    encode_inner,
    encode_raw,
    memory_of,
    missing_chunk,
    opened_chunk,
    span_shares,
    wrong_size,
    zarr_json,
)
from dist_ckpt_strategies.formats.manifest import ArrayRecord
from dist_ckpt_strategies.storage.bucket import MAX_REQUESTS, Bucket
from dist_ckpt_strategies.storage.file_systems import (
    BLOCK_NBYTES,
    BUFFER_NBYTES,
    MIN_DIRECT_NBYTES,
    BounceBuffers,
    Bytes,
    file_access,
    is_cached,
    read_aligned,
    read_direct,
    start_direct,
    stop_direct,
    whole_flush,
)
from dist_ckpt_strategies.storage.files import (
    Directory,
    file_errors,
    new_file,
    pread_into,
    sync_jobs,
    write_buffered,
)
from dist_ckpt_strategies.storage.io_pool import ByteBudget, Job, Transfer, raise_if_cancelled
from dist_ckpt_strategies.storage.store import ArrayRead, ArrayWrite, HostArray, Store

FindRecord = Callable[[str], ArrayRecord]
"""Gives what the manifest says about the array of a key."""

_MIN_DIRECT_READ_NBYTES = 256 << 10
"""Below this, asking whether a file is cached costs as much as reading it."""

_ROWS_NBYTES = 2 << 20
"""Of a raw chunk of format 1, read at a time where the rows of a region are short."""


_NUM_COPIES = 2
"""Of what is on its way to or from a bucket: ours, and TensorStore's."""


class StoreWriter(ABC):
    """Writes the arrays of one checkpoint.

    Attributes:
        store: the files of the checkpoint.
        digests: of each chunk of format 2 written, by key and index: of its inner chunks, then of
            its index.
    """

    store: Store
    _num_metadata_threads: int
    _num_write_threads: int
    digests: dict[tuple[str, Shape], bytes]
    _buffers: BounceBuffers

    def begin_creates(self, arrays: Sequence[ArraySpec]) -> Transfer:
        """Write the metadata of new arrays."""
        jobs = []
        for array in arrays:
            if array.inner_shape is None:
                name = zarr2.METADATA_NAME
                content = zarr2.metadata_content(array.shape, array.chunk_shape, array.dtype)
            else:
                name, content = ZARR_JSON, zarr_json(array)
            name, segments = f"{array.directory}/{name}", [np.frombuffer(content, np.uint8)]
            write = partial(self._write, array.key, name, len(content), segments)
            jobs.append(Job(array.key, self.store.path(name), write))
        return Transfer(jobs, self._num_metadata_threads)

    def begin_writes(self, writes: Sequence[ArrayWrite]) -> Transfer:
        """Issue all writes at once; each covers whole chunks, no chunk is written twice.

        They need not wait for the array's creation.
        """
        jobs = []
        for write in writes:
            array, regular = write.array, write.array.chunk_at(write.region)
            chunks: Iterable[tuple[Shape, tuple[Region, HostArray]]]
            chunks = (
                _chunks_of(write) if regular is None else [(regular, (write.region, write.source))]
            )
            for index, block in chunks:
                path = self.store.path(array.chunk_file(index))
                jobs.append(Job(array.key, path, partial(self.write_chunk, array, index, [block])))
        return Transfer(jobs, self._num_write_threads)

    def write_chunk(self, array: ArraySpec, index: Shape, blocks: Blocks) -> None:
        """Write a file that is not there yet; in format 2 its digests join ``digests``.

        Raises:
            StorageError: it cannot be written.
        """
        name = array.chunk_file(index)
        if array.inner_shape is None:
            self._write(array.key, name, array.chunk_nbytes, encode_raw(blocks))
            return
        grid, digests = InnerGrid.of(array, index), bytearray()
        segments = encode_inner(grid, array.dtype, blocks, self._buffers, digests)
        self._write(array.key, name, grid.file_nbytes, segments)
        self.digests[array.key, index] = bytes(digests)

    @abstractmethod
    def begin_syncs(self, arrays: Sequence[ArraySpec]) -> Transfer:
        """Make durable all that was written here, and the names of these arrays' files.

        Those that other ranks wrote included: call it when every rank has written.
        """

    @abstractmethod
    def _write(self, key: str, name: str, nbytes: int, segments: Iterable[Bytes]) -> None:
        """Make a file, out of segments, each valid until the next one is asked for."""


def _chunks_of(write: ArrayWrite) -> Iterator[tuple[Shape, tuple[Region, HostArray]]]:
    """The chunks of a region: index of each, its region and its elements."""
    array, whole = write.array, Region.whole(write.array.shape)
    for index in write.region.cells(array.chunk_shape):
        chunk = array.chunk_region(index)
        held = chunk.intersect(whole)
        assert held is not None  # noqa: S101 - cells gives none that are outside
        source = at_region(write.source, held.within(write.region))
        yield index, (chunk if array.inner_shape is None else held, source)


class DirectoryWriter(StoreWriter):
    """Writes the arrays of one checkpoint directory; see StoreWriter.

    Raises StorageError if the directory cannot be opened.
    """

    def __init__(self, root: Path, options: Options) -> None:
        self._root = root.absolute()
        self.store, self.digests = Directory(self._root), {}
        access = file_access(self._root, options)
        self._num_metadata_threads = access.num_metadata_threads
        self._num_write_threads = access.num_write_threads
        self._is_direct = access.is_direct
        self._buffers = BounceBuffers()
        # Opened before the first write, which it then covers. None: one file at a time.
        self._flush = whole_flush(self._root) if access.is_flushed_whole else None

    def begin_syncs(self, arrays: Sequence[ArraySpec]) -> Transfer:
        """See StoreWriter."""
        if self._flush is not None:
            return Transfer([Job("", self._root, self._flush)], 1)
        names = {array.directory: array.key for array in arrays}
        return Transfer(sync_jobs(self._root, names), self._num_write_threads)

    def _write(self, key: str, name: str, nbytes: int, segments: Iterable[Bytes]) -> None:
        path = self.store.path(name)
        is_flushed = self._flush is None
        with file_errors(key, path), new_file(path, is_flushed=is_flushed) as handle:
            if self._is_direct and nbytes >= MIN_DIRECT_NBYTES and start_direct(handle):
                with self._buffers.borrowed() as buffer:
                    _write_direct(handle, segments, buffer)
            else:
                for segment in segments:
                    write_buffered(handle, segment)


def _write_direct(handle: int, segments: Iterable[Bytes], buffer: Bytes) -> None:
    """Write past the page cache, but for the end that fills no block."""
    held = 0
    for segment in segments:
        done = 0
        while done < segment.size:
            some = segment[done : done + buffer.size - held]
            buffer[held : held + some.size] = some
            held, done = held + some.size, done + some.size
            if held == buffer.size:
                write_buffered(handle, buffer)
                held = 0
    end = held - held % BLOCK_NBYTES
    write_buffered(handle, buffer[:end])
    stop_direct(handle)
    write_buffered(handle, buffer[end:held])


class BucketWriter(StoreWriter):
    """Writes the arrays of one checkpoint in an object store; see StoreWriter.

    Takes ``max_inflight_bytes`` beside the tensors, or twice the largest chunk.
    """

    def __init__(self, bucket: Bucket, options: Options) -> None:
        self.store, self.digests, self._buffers = bucket, {}, BounceBuffers()
        self._num_metadata_threads = min(options.io_threads, MAX_REQUESTS)
        self._num_write_threads = self._num_metadata_threads
        self._budget = ByteBudget(options.max_inflight_bytes)

    def begin_syncs(self, arrays: Sequence[ArraySpec]) -> Transfer:  # noqa: ARG002 - a protocol
        """See StoreWriter. What the store has acknowledged is durable."""
        return Transfer((), 0)

    def _write(self, key: str, name: str, nbytes: int, segments: Iterable[Bytes]) -> None:
        with self._budget.held(_NUM_COPIES * nbytes), _key_errors(key):
            self.store.write(name, b"".join(segment.tobytes() for segment in segments))


class Format1Reader:
    """Reads the arrays of one checkpoint directory of format ("zarr", 1); see ArrayReader.

    Takes ``max_inflight_bytes`` for chunks that are decoded; a larger one goes alone.
    """

    def __init__(self, root: Path, options: Options) -> None:
        self._root = root.absolute()
        self._options = options
        self._access = file_access(self._root, options)
        self._buffers = BounceBuffers()
        self._budget = ByteBudget(options.max_inflight_bytes)

    def begin_reads(self, reads: Sequence[ArrayRead]) -> Transfer:
        """See ArrayReader. Into the target's own memory where that is possible, and fast."""
        jobs: list[Job] = []
        num_threads = self._access.num_read_threads
        for read in reads:
            array, target = read.array, read.target
            spans = raw_spans(array, read.region) if target.flags.c_contiguous else None
            if spans is not None:
                memory = target.reshape(-1).view(np.uint8)
                for chunk in spans:
                    path = f"{self._root}/{array.chunk_file(chunk.index)}"
                    for share in span_shares(chunk, memory):
                        run = partial(self._read_spans, array, path, share)
                        jobs.append(Job(array.key, path, run))
                continue
            num_threads = max(num_threads, self._options.io_threads)
            for index in read.region.cells(array.chunk_shape):
                path = f"{self._root}/{array.chunk_file(index)}"
                jobs.append(Job(array.key, path, partial(self._read_chunk, read, index, path)))
        return Transfer(jobs, num_threads)

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
                raise wrong_size(array, path, byte_offset + count, array.chunk_nbytes)

    def _read_chunk(self, read: ArrayRead, index: Shape, path: str) -> None:
        """Copy a region of one chunk out of its elements, which are read or decoded first."""
        array, nbytes = read.array, read.array.chunk_nbytes
        chunk = array.chunk_region(index)
        region = read.region.intersect(chunk)
        assert region is not None  # noqa: S101 - cells yields only chunks that overlap
        target = bits_of(at_region(read.target, region.within(read.region)))
        with opened_chunk(array, path, nbytes if array.is_raw else None) as handle:
            if array.is_raw:
                self._read_rows(array, path, handle, region.within(chunk), target)
                return
            with self._budget.held(2 * nbytes):
                raise_if_cancelled()
                elements = zarr2.decode_chunk(self._root, array, index, region)
                raise_if_cancelled()
                np.copyto(target, bits_of(elements))

    def _read_rows(
        self, array: ArraySpec, path: str, handle: int, region: Region, target: HostArray
    ) -> None:
        """Read the rows that hold a region of a raw chunk, a few MiB of them at a time."""
        row_nbytes = array.chunk_nbytes // array.chunk_shape[0]
        step = max(1, min(region.shape[0], _ROWS_NBYTES // row_nbytes))
        with self._budget.held(step * row_nbytes):
            memory = np.empty(step * row_nbytes, np.uint8)
            for start in range(0, region.shape[0], step):
                num_rows = min(step, region.shape[0] - start)
                content = memory[: num_rows * row_nbytes]
                byte_offset = (region.offset[0] + start) * row_nbytes
                found = byte_offset + pread_into(handle, byte_offset, content)
                if found < byte_offset + content.size:
                    raise wrong_size(array, path, found, array.chunk_nbytes)
                rows = content.view(array.dtype.numpy).reshape(-1, *array.chunk_shape[1:])
                part = rows[(slice(None), *region.slices()[1:])]
                raise_if_cancelled()
                np.copyto(target[start : start + num_rows], bits_of(part))


class Format2Reader(ABC):
    """Reads and verifies the arrays of one checkpoint of format ("zarr", 2); see ArrayReader."""

    _store: Store
    _num_threads: int
    _find: FindRecord | None
    _max_job_nbytes = 16 << 20
    """Reads of a large file are cut into jobs of this size, for several threads to share."""

    _is_contiguous = False
    """Whether a job reads only inner chunks that follow each other."""

    def begin_reads(self, reads: Sequence[ArrayRead]) -> Transfer:
        """See ArrayReader. A file that is larger than a job may read is shared by several."""
        jobs = []
        for read in reads:
            array = read.array
            record = None if self._find is None else self._find(array.key)
            for index in read.region.cells(array.chunk_shape):
                path, grid = self._store.path(array.chunk_file(index)), InnerGrid.of(array, index)
                listed = record.chunks[index] if record else None
                chunk = InnerChunks(array, index, grid, path, listed)
                shares: list[list[Run]] = []
                end = left_nbytes = 0
                for run in grid.runs(read.region):
                    nbytes = run.num_chunks * grid.stored_nbytes
                    if nbytes > left_nbytes or (self._is_contiguous and run.first != end):
                        shares.append([])
                        left_nbytes = self._max_job_nbytes
                    shares[-1].append(run)
                    left_nbytes -= nbytes
                    end = run.first + run.num_chunks
                jobs += [
                    Job(array.key, path, partial(self._read_runs, read, chunk, runs))
                    for runs in shares
                ]
        return Transfer(jobs, self._num_threads)

    @abstractmethod
    def _read_runs(self, read: ArrayRead, chunk: InnerChunks, runs: Sequence[Run]) -> None:
        """Read runs of a chunk, verify them, and fill their place in the target."""


class DirectoryReader(Format2Reader):
    """Reads the arrays of one checkpoint directory; see Format2Reader.

    ``find`` gives the records that digests are compared with; None to compare none.
    """

    def __init__(self, root: Path, options: Options, find: FindRecord | None) -> None:
        access = file_access(root, options)
        self._store, self._find = Directory(root), find
        self._num_threads, self._is_direct = access.num_read_threads, access.is_direct
        self._buffers = BounceBuffers()

    def _read_runs(self, read: ArrayRead, chunk: InnerChunks, runs: Sequence[Run]) -> None:
        grid = chunk.grid
        buffer_nbytes = max(RUN_NBYTES, grid.stored_nbytes) + 2 * BLOCK_NBYTES
        borrow = partial(self._buffers.borrowed, buffer_nbytes)
        with opened_chunk(chunk.array, chunk.path, grid.file_nbytes) as handle:
            is_direct = (
                self._is_direct
                and grid.file_nbytes >= MIN_DIRECT_NBYTES
                and buffer_nbytes <= BUFFER_NBYTES
                and not is_cached(handle, grid.file_nbytes)
                and start_direct(handle)
            )
            for run in runs:
                own = None if is_direct else memory_of(grid, run, read.region, read.target)
                nbytes = run.num_chunks * grid.stored_nbytes
                byte_offset = run.first * grid.stored_nbytes
                with borrow() if own is None else nullcontext(own) as memory:
                    if is_direct:
                        content = read_aligned(handle, byte_offset, nbytes, memory)
                    else:
                        content = memory[: pread_into(handle, byte_offset, memory[:nbytes])]
                    if content.size != nbytes:
                        raise OSError(0, "it ended while it was read")
                    raise_if_cancelled()
                    chunk.verify(run, content)
                    if own is None:
                        decode_run(grid, run, read.array.dtype, content, read.region, read.target)


class BucketReader(Format2Reader):
    """Reads the arrays of one checkpoint in an object store; see DirectoryReader.

    Takes ``max_inflight_bytes`` beside the tensors.
    """

    _max_job_nbytes, _is_contiguous = 8 << 20, True  # one request for each job

    def __init__(self, bucket: Bucket, options: Options, find: FindRecord | None) -> None:
        self._store, self._find = bucket, find
        self._num_threads = num_requests(options, self._max_job_nbytes)

    def _read_runs(self, read: ArrayRead, chunk: InnerChunks, runs: Sequence[Run]) -> None:
        """See Format2Reader. Where the runs end the data, the index is read too: for the size."""
        array, grid, name = read.array, chunk.grid, read.array.chunk_file(chunk.index)
        start = runs[0].first * grid.stored_nbytes
        end = (runs[-1].first + runs[-1].num_chunks) * grid.stored_nbytes
        is_last = end == grid.data_nbytes
        with _key_errors(array.key):
            try:
                content = self._store.read(name, start, -1 if is_last else end - start)
            except IncompleteCheckpointError:
                raise missing_chunk(array, chunk.path) from None
        expected = grid.file_nbytes if is_last else end
        if start + len(content) != expected:
            raise wrong_size(array, chunk.path, start + len(content), expected)
        raise_if_cancelled()
        memory = np.frombuffer(content, np.uint8)
        for run in runs:
            begin = run.first * grid.stored_nbytes - start
            some = memory[begin : begin + run.num_chunks * grid.stored_nbytes]
            chunk.verify(run, some)
            decode_run(grid, run, array.dtype, some, read.region, read.target)


def num_requests(options: Options, nbytes: int) -> int:
    """Requests for so many bytes each that may be under way at the same time."""
    in_memory = options.max_inflight_bytes // (_NUM_COPIES * nbytes)
    return max(1, min(options.io_threads, MAX_REQUESTS, in_memory))


@contextmanager
def _key_errors(key: str) -> Iterator[None]:
    """Lead an error that names only an object with the key of its array."""
    try:
        yield
    except StorageError as error:
        if error.key is not None:
            raise
        raise type(error)(f"{key}: {error.message}", key=key, path=error.path) from error
