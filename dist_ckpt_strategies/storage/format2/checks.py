"""Compare the files of a format 2 checkpoint with its manifest. Loads no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from dist_ckpt_strategies.spec.array import ArraySpec
from dist_ckpt_strategies.spec.manifest import ArrayRecord, ChunkRecord, FileDigest, ObjectRecord
from dist_ckpt_strategies.storage.disk.direct_io import BounceBuffers
from dist_ckpt_strategies.storage.disk.files import COMMON_NAME
from dist_ckpt_strategies.storage.file_store import FileStore
from dist_ckpt_strategies.storage.findings import Finding, Problem
from dist_ckpt_strategies.storage.format2.chunk_files import (
    BUFFER_NBYTES,
    Bytes,
    ChunkFile,
    borrowed_for,
    read_run,
    runs_at_a_time,
)
from dist_ckpt_strategies.storage.format2.inner_codec import digests_of
from dist_ckpt_strategies.storage.format2.layout import chunk_name, metadata_content, metadata_name
from dist_ckpt_strategies.storage.format2.manifest import digest_of
from dist_ckpt_strategies.storage.raw_chunks import read_buffered


@dataclass(frozen=True, slots=True)
class FileCheck:
    """A look at every byte of a file that the manifest lists, or of an object in it.

    Attributes:
        key: whose file it is; None for the common state's.
        name: of the file, below the checkpoint's directory.
        nbytes: how many are read.
        run: gives what is wrong with it; raises where it cannot be read.
    """

    key: str | None
    name: str
    nbytes: int
    run: Callable[[], list[Finding]]


def metadata_check(file_store: FileStore, array: ArraySpec) -> FileCheck:
    """A check of the file that describes an array to other readers."""
    content = metadata_content(array)
    run = partial(_check_metadata, file_store, array, content)
    return FileCheck(array.key, metadata_name(array.key), len(content), run)


def chunk_checks(
    file_store: FileStore, record: ArrayRecord, buffers: BounceBuffers
) -> Iterator[FileCheck]:
    """A check of each chunk's file; the file store is a directory."""
    array = record.array
    for index, chunk in record.chunks.items():
        name = chunk_name(array, index)
        file = ChunkFile.of(array, index, file_store.path(name))
        nbytes = file.grid.file_nbytes
        yield FileCheck(array.key, name, nbytes, partial(_check_chunk, name, file, chunk, buffers))


def object_check(file_store: FileStore, record: ObjectRecord) -> FileCheck | None:
    """A check of an object; None where the manifest itself holds it."""
    span = record.span
    if span is None:
        return None
    run = partial(_check_object, file_store, record)
    return FileCheck(record.id.unique_key, span.name, span.nbytes, run)


def pack_ends(objects: Iterable[ObjectRecord]) -> Mapping[str, int]:
    """The size of each file of objects, by its name."""
    ends: dict[str, int] = {}
    for span in (record.span for record in objects):
        if span is not None:
            ends[span.name] = max(ends.get(span.name, 0), span.byte_offset + span.nbytes)
    return ends


def common_check(file_store: FileStore, listed: FileDigest) -> FileCheck:
    """A check of the common state's file."""
    return FileCheck(None, COMMON_NAME, listed.nbytes, partial(_check_common, file_store, listed))


def check_buffers() -> BounceBuffers:
    """Memory to read chunks into, for any number of checks."""
    return BounceBuffers(BUFFER_NBYTES)


def _check_metadata(file_store: FileStore, array: ArraySpec, content: bytes) -> list[Finding]:
    name = metadata_name(array.key)
    found = file_store.read(name)
    if found == content:
        return []
    expected = f"{len(content)} bytes with digest {digest_of(content)}, as other readers need them"
    text = f"{len(found)} with {digest_of(found)}"
    return [Finding(Problem.BAD_METADATA, array.key, name, expected, text)]


def _check_chunk(
    name: str, file: ChunkFile, record: ChunkRecord, buffers: BounceBuffers
) -> list[Finding]:
    """Every inner chunk whose digest differs, and the index where its does."""
    grid = file.grid
    found: list[int] = []
    with file.opened() as handle, borrowed_for(grid, buffers) as buffer:
        for run in grid.all(runs_at_a_time(grid)):
            content: Bytes = read_run(handle, grid, run, buffer, is_direct=False)
            found += digests_of(content.reshape(run.num_chunks, -1))
        index = np.empty(grid.index_nbytes, np.uint8)
        read_buffered(handle, grid.data_nbytes, index)
    found += digests_of(index[None])
    return chunk_findings(name, file, record, found)


def chunk_findings(
    name: str, file: ChunkFile, record: ChunkRecord, digests: Sequence[int]
) -> list[Finding]:
    """What the digests of all inner chunks of a file, and of its index, show to be wrong."""
    where = f"chunk {file.index}, written by rank {record.writer}"
    return [
        Finding(
            Problem.DAMAGED_CHUNK,
            file.array.key,
            name,
            f"{'its index' if number == file.grid.num_chunks else f'inner chunk {number}'} with "
            f"digest {record.digest(number):016x} ({where})",
            f"{digest:016x}",
        )
        for number, digest in enumerate(digests)
        if digest != record.digest(number)
    ]


def _check_object(file_store: FileStore, record: ObjectRecord) -> list[Finding]:
    span = record.span
    assert span is not None  # noqa: S101 - object_check has looked
    content = file_store.read_span(span.name, span.byte_offset, span.nbytes)
    if digest_of(content) == span.digest:
        return []
    expected = (
        f"{span.nbytes} bytes from byte {span.byte_offset} with digest {span.digest} "
        f"(written by rank {record.writer})"
    )
    found = f"{len(content)} with {digest_of(content)}"
    return [Finding(Problem.DAMAGED_OBJECT, record.id.unique_key, span.name, expected, found)]


def _check_common(file_store: FileStore, listed: FileDigest) -> list[Finding]:
    content = file_store.read(COMMON_NAME)
    if (len(content), digest_of(content)) == (listed.nbytes, listed.digest):
        return []
    expected = f"{listed.nbytes} bytes with digest {listed.digest}"
    found = f"{len(content)} with {digest_of(content)}"
    return [Finding(Problem.DAMAGED_COMMON, None, COMMON_NAME, expected, found)]
