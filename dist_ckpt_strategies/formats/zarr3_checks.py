"""Compare every byte of a ("zarr", 2) checkpoint's files with its manifest. Loads no torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np

from dist_ckpt_strategies.core.array import ArraySpec
from dist_ckpt_strategies.core.inner_grid import InnerGrid
from dist_ckpt_strategies.core.region import Extent
from dist_ckpt_strategies.errors import IncompleteCheckpointError
from dist_ckpt_strategies.formats.issues import Issue, Problem
from dist_ckpt_strategies.formats.manifest import (
    ArrayRecord,
    ChunkRecord,
    FileDigest,
    ObjectRecord,
    Span,
    digest_of,
)
from dist_ckpt_strategies.formats.raw_chunks import missing_chunk
from dist_ckpt_strategies.formats.scanned import FileCheck
from dist_ckpt_strategies.formats.zarr3 import (
    chunk_name,
    digests_of,
    metadata_content,
    metadata_name,
)
from dist_ckpt_strategies.storage.file_store import FileStore, WrongSizeError, nbytes_text
from dist_ckpt_strategies.storage.files import COMMON_NAME


def manifest_checks(
    file_store: FileStore,
    arrays: Iterable[ArrayRecord],
    objects: Iterable[ObjectRecord],
    common: FileDigest | None,
) -> Iterator[FileCheck]:
    """A check of each file that the manifest lists.

    Args:
        file_store: the checkpoint.
        arrays: of the manifest.
        objects: of the manifest.
        common: the common state's file, if it is listed.
    """
    for record in arrays:
        array = record.array
        content, name = metadata_content(array), metadata_name(array.key)
        compare = partial(_check_metadata, file_store, array, content)
        yield FileCheck(array.key, name, len(content), compare)
        for index, chunk in record.chunks.items():
            nbytes = InnerGrid.of(array, index).file_nbytes
            run = partial(check_chunk, file_store, array, index, chunk)
            yield FileCheck(array.key, chunk_name(array, index), nbytes, run)
    for name, records in packs_of(objects).items():
        check_pack = partial(_check_pack, file_store, name, records)
        yield FileCheck(None, name, pack_nbytes(records), check_pack)
    if common is not None:
        yield common_check(file_store, common)


def common_check(file_store: FileStore, listed: FileDigest) -> FileCheck:
    """A check of the common state's file."""
    run = partial(_check_common, file_store, listed)
    return FileCheck(None, COMMON_NAME, listed.nbytes, run)


def packs_of(objects: Iterable[ObjectRecord]) -> Mapping[str, Sequence[tuple[ObjectRecord, Span]]]:
    """The objects that lie in each file of objects, and where, by the file's name."""
    packs: dict[str, list[tuple[ObjectRecord, Span]]] = {}
    for record in objects:
        if record.span is not None:
            packs.setdefault(record.span.name, []).append((record, record.span))
    return packs


def pack_nbytes(records: Iterable[tuple[ObjectRecord, Span]]) -> int:
    """The size of a file of objects."""
    return max(span.byte_offset + span.nbytes for _, span in records)


def check_chunk(
    file_store: FileStore, array: ArraySpec, index: Extent, record: ChunkRecord
) -> list[Issue]:
    """Every inner chunk of a chunk's file whose digest differs, and the index where its does.

    Raises:
        IncompleteCheckpointError: the file is missing.
        StorageError: it cannot be read.
    """
    grid, name = InnerGrid.of(array, index), chunk_name(array, index)
    where = f"(chunk {index}, written by rank {record.writer})"
    max_chunks = max(1, file_store.block_nbytes // grid.stored_nbytes)
    counts = [
        min(max_chunks, grid.num_chunks - first) for first in range(0, grid.num_chunks, max_chunks)
    ]
    sizes = [count * grid.stored_nbytes for count in counts]
    blocks = file_store.read_blocks(name, [*sizes[:-1], sizes[-1] + grid.index_nbytes])
    digests: list[int] = []
    try:
        for count, nbytes, block in zip(counts, sizes, blocks, strict=True):
            content = np.frombuffer(block, np.uint8)
            digests += digests_of(content[:nbytes].reshape(count, -1))
            if len(digests) == grid.num_chunks:
                digests += digests_of(content[None, nbytes:])
    except IncompleteCheckpointError:
        raise missing_chunk(array, file_store.path(name)) from None
    except WrongSizeError as error:
        expected = f"{nbytes_text(error.expected)} {where}"
        return [Issue(Problem.WRONG_CHUNK_SIZE, array.key, name, expected, error.found)]
    return [
        Issue(
            Problem.DAMAGED_CHUNK,
            array.key,
            name,
            f"{'its index' if number == grid.num_chunks else f'inner chunk {number}'} with "
            f"digest {record.digest(number):016x} {where}",
            f"{digest:016x}",
        )
        for number, digest in enumerate(digests)
        if digest != record.digest(number)
    ]


def _check_metadata(file_store: FileStore, array: ArraySpec, content: bytes) -> Iterator[Issue]:
    """Compare the file that describes an array to other readers."""
    name = metadata_name(array.key)
    found = file_store.read(name)
    if found != content:
        lead = f"{len(content)} bytes with digest {digest_of(content)}"
        expected = f"{lead}, as other readers need them"
        text = f"{len(found)} with {digest_of(found)}"
        yield Issue(Problem.BAD_METADATA, array.key, name, expected, text)


def _check_pack(
    file_store: FileStore, name: str, records: Sequence[tuple[ObjectRecord, Span]]
) -> Iterator[Issue]:
    """Compare the size of a file of objects, then each object in it."""
    try:
        file_store.require_nbytes(name, pack_nbytes(records))
    except WrongSizeError as error:
        expected = f"{nbytes_text(error.expected)} of objects"
        yield Issue(Problem.WRONG_FILE_SIZE, None, name, expected, error.found)
        return
    for record, span in records:
        content = file_store.read_span(name, span.byte_offset, span.nbytes)
        if digest_of(content) != span.digest:
            lead = f"{span.nbytes} bytes from byte {span.byte_offset} with digest {span.digest}"
            expected = f"{lead} (written by rank {record.writer})"
            text = f"{len(content)} with {digest_of(content)}"
            yield Issue(Problem.DAMAGED_OBJECT, record.id.unique_key, name, expected, text)


def _check_common(file_store: FileStore, listed: FileDigest) -> Iterator[Issue]:
    content = file_store.read(COMMON_NAME)
    if (len(content), digest_of(content)) != (listed.nbytes, listed.digest):
        expected = f"{listed.nbytes} bytes with digest {listed.digest}"
        found = f"{len(content)} with {digest_of(content)}"
        yield Issue(Problem.DAMAGED_COMMON, None, COMMON_NAME, expected, found)
