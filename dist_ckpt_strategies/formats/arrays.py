"""Write and read the arrays of a checkpoint: of either format in a directory, format 2 in a bucket.

Raw chunks of format 1 are the bytes of their elements: a region whose rows are long is read
straight into the tensor's memory. Inner chunks of format 2 are compared with their digests while
they are in the processor's cache. A process that only writes loads no torch for this.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np

from dist_ckpt_strategies.config import Options
from dist_ckpt_strategies.core.array import ArraySpec, Region, Shape
from dist_ckpt_strategies.core.inner_grid import InnerGrid
from dist_ckpt_strategies.errors import StorageError
from dist_ckpt_strategies.formats import zarr2
from dist_ckpt_strategies.formats.chunks import (
    ZARR_JSON,
    Blocks,
    at_region,
    encode_inner,
    encode_raw,
    zarr_json,
)
from dist_ckpt_strategies.storage.bucket import MAX_REQUESTS, Bucket
from dist_ckpt_strategies.storage.file_systems import (
    BLOCK_NBYTES,
    MIN_DIRECT_NBYTES,
    BounceBuffers,
    Bytes,
    file_access,
    start_direct,
    stop_direct,
    whole_flush,
)
from dist_ckpt_strategies.storage.files import (
    Directory,
    file_errors,
    new_file,
    sync_jobs,
    write_buffered,
)
from dist_ckpt_strategies.storage.io_pool import ByteBudget, Job, Transfer
from dist_ckpt_strategies.storage.store import ArrayWrite, HostArray, Store

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


@contextmanager
def _key_errors(key: str) -> Iterator[None]:
    """Lead an error that names only an object with the key of its array."""
    try:
        yield
    except StorageError as error:
        if error.key is not None:
            raise
        raise type(error)(f"{key}: {error.message}", key=key, path=error.path) from error
