"""Arrays of format 2 in an object store: a chunk is an object, put whole, read in parts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import xxhash

from dist_ckpt_strategies.config import Options
from dist_ckpt_strategies.core.array import ArraySpec
from dist_ckpt_strategies.core.inner_grid import InnerGrid, Run
from dist_ckpt_strategies.errors import IncompleteCheckpointError, StorageError
from dist_ckpt_strategies.formats.manifest import ChunkRecord
from dist_ckpt_strategies.formats.raw_chunks import missing_chunk
from dist_ckpt_strategies.formats.zarr3 import (
    chunk_name,
    decode_run,
    encode_index,
    encode_run,
    metadata_content,
    metadata_name,
)
from dist_ckpt_strategies.formats.zarr3_arrays import (
    ArrayReaderBase,
    ArrayWriterBase,
    FindRecord,
    ReadRuns,
    WriteChunk,
)
from dist_ckpt_strategies.formats.zarr3_chunks import (
    ChunkBlocks,
    ChunkFile,
    runs_at_a_time,
    runs_of,
)
from dist_ckpt_strategies.storage.base import ArrayRead, Transfer
from dist_ckpt_strategies.storage.bucket import MAX_REQUESTS, Bucket
from dist_ckpt_strategies.storage.io_pool import ByteBudget, run_pooled
from dist_ckpt_strategies.storage.time_limit import raise_if_cancelled

REQUEST_NBYTES = 8 << 20
"""Inner chunks that follow each other are read together, up to this many bytes."""

_NUM_COPIES = 2
"""Of what is on its way: ours, and TensorStore's."""


class BucketWriter(ArrayWriterBase):
    """Writes the arrays of one checkpoint in an object store; see ArrayWriter.

    Takes ``max_inflight_bytes`` beside the tensors, or twice the largest chunk.

    Args:
        bucket: the checkpoint.
        options: how much to have under way.
    """

    def __init__(self, bucket: Bucket, options: Options) -> None:
        num_threads = min(options.io_threads, MAX_REQUESTS)
        super().__init__(num_threads, num_threads)
        self._bucket = bucket
        self._budget = ByteBudget(options.max_inflight_bytes)

    def begin_syncs(self, arrays: Sequence[ArraySpec]) -> Transfer:  # noqa: ARG002 - a protocol
        """See ArrayWriter. What the store has acknowledged is durable."""
        return run_pooled((), 0)

    def path(self, name: str) -> str:
        """See ArrayWriterBase."""
        return self._bucket.path(name)

    def create(self, array: ArraySpec) -> None:
        """See ArrayWriterBase."""
        with _key_errors(array.key):
            self._bucket.write(metadata_name(array.key), metadata_content(array))

    def chunk_writer(self) -> WriteChunk:
        """See ArrayWriterBase."""
        return self._put

    def _put(self, file: ChunkFile, blocks: ChunkBlocks) -> list[int]:
        with self._budget.held(_NUM_COPIES * file.grid.file_nbytes), _key_errors(file.array.key):
            content, digests = encoded_chunk(file, blocks)
            self._bucket.write(chunk_name(file.array, file.index), content)
        return digests


def encoded_chunk(file: ChunkFile, blocks: ChunkBlocks) -> tuple[bytes, list[int]]:
    """The whole object of a chunk, and the digests of its inner chunks and its index."""
    grid = file.grid
    digests: list[int] = []
    content = np.empty(grid.file_nbytes, np.uint8)
    for part, source, run in runs_of(blocks):
        start = len(digests) * grid.stored_nbytes
        target = content[start : start + run.num_chunks * grid.stored_nbytes]
        digests += encode_run(part, run, file.array.dtype, source, target)
    content[grid.data_nbytes :] = np.frombuffer(encode_index(grid), np.uint8)
    digests.append(xxhash.xxh3_64_intdigest(content[grid.data_nbytes :].data))
    return content.tobytes(), digests


class BucketReader(ArrayReaderBase):
    """Reads the arrays of one checkpoint in an object store, and verifies what it reads.

    See ArrayReader. Takes ``max_inflight_bytes`` beside the tensors.

    Args:
        bucket: the checkpoint.
        options: how much to have under way.
        find: gives the records that digests are compared with; None to compare none.
    """

    def __init__(self, bucket: Bucket, options: Options, find: FindRecord | None) -> None:
        super().__init__(num_requests(options, REQUEST_NBYTES), find)
        self._bucket = bucket

    def path(self, name: str) -> str:
        """See ArrayReaderBase."""
        return self._bucket.path(name)

    def shares(self, grid: InnerGrid, read: ArrayRead) -> Iterator[tuple[Run, ...]]:
        """See ArrayReaderBase. The runs of a share follow each other in the object."""
        max_chunks = max(1, REQUEST_NBYTES // grid.stored_nbytes)
        share: list[Run] = []
        held = 0
        for run in grid.overlapping(read.region, min(max_chunks, runs_at_a_time(grid))):
            is_next = share and run.first == share[0].first + held
            if share and not (is_next and held + run.num_chunks <= max_chunks):
                yield tuple(share)
                share, held = [], 0
            share.append(run)
            held += run.num_chunks
        yield tuple(share)

    def run_reader(self) -> ReadRuns:
        """See ArrayReaderBase."""
        return self._read

    def _read(
        self, read: ArrayRead, file: ChunkFile, record: ChunkRecord | None, runs: tuple[Run, ...]
    ) -> None:
        grid = file.grid
        content = self._content(file, grid, runs)
        raise_if_cancelled()
        start = runs[0].first
        for run in runs:
            begin = (run.first - start) * grid.stored_nbytes
            part = content[begin : begin + run.num_chunks * grid.stored_nbytes]
            if record is not None:
                file.require(record, run.first, part.reshape(run.num_chunks, -1))
            decode_run(grid, run, file.array.dtype, part, read.region, read.target)

    def _content(
        self, file: ChunkFile, grid: InnerGrid, runs: tuple[Run, ...]
    ) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        """The bytes of runs that follow each other.

        Where they end the inner chunks, the index behind them is read too: that tells the size.
        """
        start = runs[0].first * grid.stored_nbytes
        end = (runs[-1].first + runs[-1].num_chunks) * grid.stored_nbytes
        name, is_last = chunk_name(file.array, file.index), end == grid.data_nbytes
        with _key_errors(file.array.key):
            try:
                if is_last:
                    content = self._bucket.read_rest(name, start)
                else:
                    content = self._bucket.read_span(name, start, end - start)
            except IncompleteCheckpointError:
                raise missing_chunk(file.array, file.path) from None
        expected = grid.file_nbytes if is_last else end
        if start + len(content) != expected:
            raise file.damaged(f"has {start + len(content)} bytes, expected {expected}")
        return np.frombuffer(content, np.uint8, end - start)


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
