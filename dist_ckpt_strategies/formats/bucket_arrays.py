"""Arrays of format 2 in an object store: a chunk is an object, put whole, read in parts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from dist_ckpt_strategies.config import Options
from dist_ckpt_strategies.core.array import ArraySpec, Region, Shape
from dist_ckpt_strategies.core.inner_grid import InnerGrid, Run
from dist_ckpt_strategies.errors import IncompleteCheckpointError, StorageError
from dist_ckpt_strategies.formats.arrays import (
    ArrayWriterBase,
    FindRecord,
    Format2Reader,
    chunk_name,
)
from dist_ckpt_strategies.formats.chunks import (
    Blocks,
    InnerChunks,
    MemorySink,
    decode_run,
    encode_chunk,
    missing_chunk,
    require_size,
)
from dist_ckpt_strategies.storage.bucket import MAX_REQUESTS, Bucket
from dist_ckpt_strategies.storage.io_pool import ByteBudget, Transfer, raise_if_cancelled
from dist_ckpt_strategies.storage.store import ArrayRead

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
        super().__init__(bucket, num_threads, num_threads)
        self._budget = ByteBudget(options.max_inflight_bytes)

    def begin_syncs(self, arrays: Sequence[ArraySpec]) -> Transfer:  # noqa: ARG002 - a protocol
        """See ArrayWriter. What the store has acknowledged is durable."""
        return Transfer((), 0)

    def _create(self, key: str, name: str, content: bytes) -> None:
        with _key_errors(key):
            self._store.write(name, content)

    def write_chunk(self, array: ArraySpec, index: Shape, blocks: Blocks) -> list[int]:
        """See ArrayWriterBase."""
        nbytes = InnerGrid.of(array, index).file_nbytes
        with self._budget.held(_NUM_COPIES * nbytes), _key_errors(array.key):
            sink = MemorySink(nbytes)
            digests = encode_chunk(array, index, blocks, sink)
            self._store.write(chunk_name(array, index), sink.content.tobytes())
        return digests


class BucketReader(Format2Reader):
    """Reads the arrays of one checkpoint in an object store, and verifies what it reads.

    See Format2Reader. Takes ``max_inflight_bytes`` beside the tensors.

    Args:
        bucket: the checkpoint.
        options: how much to have under way.
        find: gives the records that digests are compared with; None to compare none.
    """

    def __init__(self, bucket: Bucket, options: Options, find: FindRecord | None) -> None:
        super().__init__(bucket, num_requests(options, REQUEST_NBYTES), find)

    def _shares(self, grid: InnerGrid, region: Region) -> Iterator[tuple[Run, ...]]:
        """See Format2Reader. The runs of a share follow each other in the object."""
        max_chunks = max(1, REQUEST_NBYTES // grid.stored_nbytes)
        share: list[Run] = []
        held = 0
        for run in grid.runs(region):
            is_next = share and run.first == share[0].first + held
            if share and not (is_next and held + run.num_chunks <= max_chunks):
                yield tuple(share)
                share, held = [], 0
            share.append(run)
            held += run.num_chunks
        yield tuple(share)

    def _read_runs(self, read: ArrayRead, chunk: InnerChunks, runs: tuple[Run, ...]) -> None:
        """See Format2Reader. Where the runs end the data, the index is read too: for the size."""
        array, grid, name = read.array, chunk.grid, chunk_name(read.array, chunk.index)
        start = runs[0].first * grid.stored_nbytes
        end = (runs[-1].first + runs[-1].num_chunks) * grid.stored_nbytes
        is_last = end == grid.data_nbytes
        with _key_errors(array.key):
            try:
                content = self._store.read(name, start, -1 if is_last else end - start)
            except IncompleteCheckpointError:
                raise missing_chunk(array, chunk.path) from None
        expected = grid.file_nbytes if is_last else end
        require_size(array, chunk.path, start + len(content), expected)
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
