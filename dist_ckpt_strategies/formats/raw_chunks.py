"""Move raw chunks straight between their files and the tensors' memory.

The bytes of a raw chunk are the bytes of its elements. A box whose rows are long needs no decoder
to be read: positioned reads, several files at a time, land where the tensor lives. A whole chunk
needs no encoder to be written.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dist_ckpt_strategies.core.array import ArraySpec
from dist_ckpt_strategies.core.inner_grid import ChunkSpans, raw_spans
from dist_ckpt_strategies.errors import (
    CheckpointError,
    CorruptCheckpointError,
    IncompleteCheckpointError,
    StorageError,
)
from dist_ckpt_strategies.storage.base import ArrayRead, ArrayWrite
from dist_ckpt_strategies.storage.direct_io import (
    MIN_DIRECT_NBYTES,
    BounceBuffers,
    Bytes,
    pread_into,
    read_direct,
    start_direct,
    write_buffered,
    write_direct,
)
from dist_ckpt_strategies.storage.file_systems import is_cached
from dist_ckpt_strategies.storage.files import create_new, file_errors, storage_error
from dist_ckpt_strategies.storage.time_limit import MAX_SLICE_NBYTES, raise_if_cancelled

_MIN_DIRECT_READ_NBYTES = 256 << 10
"""Below this, asking whether a file is cached costs as much as reading it."""

_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe would wait for its writer

_MAX_PIECE_NBYTES = MAX_SLICE_NBYTES
"""Longer runs are cut, so that several threads share one large file."""


@dataclass(frozen=True, slots=True)
class RawRead:
    """Runs of one chunk file and the memory that each of them fills."""

    array: ArraySpec
    path: str
    runs: tuple[tuple[int, Bytes], ...]
    bounce: BounceBuffers | None

    def run(self) -> None:
        """Read every run whole.

        Raises:
            IncompleteCheckpointError: the file is missing.
            CorruptCheckpointError: the file has another size than its chunk.
            StorageError: the file cannot be read.
        """
        try:
            handle = os.open(self.path, _READ)
        except FileNotFoundError:
            raise missing_chunk(self.array, self.path) from None
        except OSError as error:
            raise storage_error(self.array.key, self.path, error) from error
        try:
            self._read_from(handle)
        except CheckpointError:
            raise
        except OSError as error:
            raise storage_error(self.array.key, self.path, error) from error
        finally:
            os.close(handle)

    def _read_from(self, handle: int) -> None:
        size = os.fstat(handle).st_size
        if size != self.array.chunk_nbytes:
            raise wrong_chunk_size(self.array, self.path, size)
        if self.bounce is not None and self._is_worth_direct(handle, size) and start_direct(handle):
            with self.bounce.borrowed() as buffer:
                found = [read_direct(handle, at, memory, buffer) for at, memory in self.runs]
        else:
            found = [pread_into(handle, at, memory) for at, memory in self.runs]
        for (byte_offset, memory), count in zip(self.runs, found, strict=True):
            if count != memory.size:
                raise wrong_chunk_size(self.array, self.path, byte_offset + count)

    def _is_worth_direct(self, handle: int, size: int) -> bool:
        """Whole blocks are read then: of a small part of a large file much more than it has."""
        wanted = sum(memory.size for _, memory in self.runs)
        return wanted >= _MIN_DIRECT_READ_NBYTES and not is_cached(handle, size)


@dataclass(frozen=True, slots=True)
class RawWrite:
    """The whole content of one chunk file."""

    array: ArraySpec
    path: str
    content: Bytes
    bounce: BounceBuffers | None
    is_flushed: bool

    def run(self) -> None:
        """Make the file; flush it, unless the caller flushes all files at once.

        Raises:
            StorageError: it cannot be written, or is there already.
        """
        with file_errors(self.array.key, self.path):
            handle = create_new(self.path)
            try:
                raise_if_cancelled()
                self._write_to(handle)
                if self.is_flushed:
                    os.fsync(handle)
            finally:
                os.close(handle)

    def _write_to(self, handle: int) -> None:
        is_large = self.content.size >= MIN_DIRECT_NBYTES
        if self.bounce is not None and is_large and start_direct(handle):
            with self.bounce.borrowed() as buffer:
                write_direct(handle, self.content, buffer)
        else:
            write_buffered(handle, self.content)


def raw_write(
    root: Path, write: ArrayWrite, bounce: BounceBuffers | None, *, is_flushed: bool
) -> RawWrite | None:
    """The direct write that stores ``write``; None where it has to go through a chunk writer.

    A chunk at the array's edge is one that is padded, and goes the other way.
    """
    array, region = write.array, write.region
    index = array.chunk_at(region)
    if index is None or not (array.is_raw and write.source.flags.c_contiguous):
        return None
    content = write.source.reshape(-1).view(np.uint8)
    path = f"{root}/{array.key}/{array.chunk_name(index)}"
    return RawWrite(array, path, content, bounce, is_flushed)


def missing_chunk(array: ArraySpec, path: Path | str) -> StorageError:
    """The error for a chunk that should be there and is not."""
    return IncompleteCheckpointError(
        f"{array.key}: chunk file {path} is missing; the save was cut short, or the file was "
        "removed afterwards (`dist-ckpt verify` lists all of them)",
        key=array.key,
        path=str(path),
    )


def wrong_chunk_size(array: ArraySpec, path: Path | str, found: int) -> StorageError:
    """The error for a chunk file that is cut short or too long."""
    return CorruptCheckpointError(
        f"{array.key}: chunk file {path} has {found} bytes, expected {array.chunk_nbytes}",
        key=array.key,
        path=str(path),
    )


def require_chunk(array: ArraySpec, path: Path) -> None:
    """Raise unless the file of a chunk is there and, where it is raw, of the right size.

    Raises:
        IncompleteCheckpointError: it is missing.
        CorruptCheckpointError: it has another size.
        OSError: it cannot be looked at.
    """
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        raise missing_chunk(array, path) from None
    if array.is_raw and size != array.chunk_nbytes:
        raise wrong_chunk_size(array, path, size)


def raw_reads(root: Path, read: ArrayRead, bounce: BounceBuffers | None) -> list[RawRead] | None:
    """The direct reads that fill ``read``; None where it has to go through a chunk reader."""
    if not (read.target.flags.c_contiguous and read.target.flags.writeable):
        return None
    spans = raw_spans(read.array, read.region)
    if spans is None:
        return None
    memory = read.target.reshape(-1).view(np.uint8)
    directory = f"{root}/{read.array.key}"
    reads: list[RawRead] = []
    for chunk in spans:
        path = f"{directory}/{read.array.chunk_name(chunk.index)}"
        reads.extend(RawRead(read.array, path, runs, bounce) for runs in _shares(chunk, memory))
    return reads


def _shares(chunk: ChunkSpans, memory: Bytes) -> Iterator[tuple[tuple[int, Bytes], ...]]:
    """The runs of a chunk, cut and grouped so that one share is about _MAX_PIECE_NBYTES."""
    if memory.size <= _MAX_PIECE_NBYTES and memory.size == chunk.span_nbytes:
        yield ((chunk.offsets[0][0], memory),)
        return
    share: list[tuple[int, Bytes]] = []
    held = 0
    for in_file, in_target in chunk.offsets:
        for start in range(0, chunk.span_nbytes, _MAX_PIECE_NBYTES):
            size = min(_MAX_PIECE_NBYTES, chunk.span_nbytes - start)
            share.append((in_file + start, memory[in_target + start : in_target + start + size]))
            held += size
            if held >= _MAX_PIECE_NBYTES:
                yield tuple(share)
                share, held = [], 0
    if share:
        yield tuple(share)
