"""The files of a ("zarr", 2) checkpoint, and the comparison of their bytes with their digests.

``verify`` compares the bytes. No torch.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import numpy as np

from dist_ckpt_strategies.core.array import ArraySpec, Shape
from dist_ckpt_strategies.core.inner_grid import InnerGrid
from dist_ckpt_strategies.errors import IncompleteCheckpointError
from dist_ckpt_strategies.formats.chunks import (
    ZARR_JSON,
    differing,
    digests_of,
    missing_chunk,
    zarr_json,
)
from dist_ckpt_strategies.formats.issues import FileCheck, Issue, Problem
from dist_ckpt_strategies.formats.manifest import (
    DIGEST_NBYTES,
    ArrayRecord,
    ChunkRecord,
    FileDigest,
    ObjectRecord,
    Span,
    digest_of,
)
from dist_ckpt_strategies.storage.files import COMMON_NAME, WrongSizeError, block_sizes, nbytes_text
from dist_ckpt_strategies.storage.store import Store


def manifest_files(
    store: Store,
    arrays: Iterable[ArrayRecord],
    objects: Iterable[ObjectRecord],
    common: FileDigest | None,
) -> Iterator[FileCheck]:
    """Every file that the manifest lists, and the comparison of its bytes with their digests."""
    for record in arrays:
        array, content = record.array, zarr_json(record.array)
        listed = FileDigest(len(content), digest_of(content))
        name, what = f"{array.directory}/{ZARR_JSON}", "what other readers need to know"
        yield _whole_file(store, array.key, name, listed, what)
        grid = InnerGrid.of(array, (0,) * len(array.shape))
        for index, chunk in record.chunks.items():
            num_chunks = len(chunk.digests) // DIGEST_NBYTES - 1
            nbytes = num_chunks * grid.stored_nbytes + grid.index_nbytes
            expected = f"{nbytes_text(nbytes)} {_where(index, chunk)}"
            run = partial(_check_chunk, store, array, index, chunk)
            yield FileCheck(array.key, array.chunk_file(index), nbytes, run, expected)
    packs: dict[str, list[tuple[Span, ObjectRecord]]] = {}
    for one in objects:
        if one.span is not None:
            packs.setdefault(one.span.name, []).append((one.span, one))
    for name, records in packs.items():
        records.sort(key=lambda record: record[0].byte_offset)
        nbytes = sum(span.nbytes for span, _ in records)
        expected = f"{nbytes_text(nbytes)} of objects"
        yield FileCheck(None, name, nbytes, partial(_check_pack, store, name, records), expected)
    if common is not None:
        yield _whole_file(store, None, COMMON_NAME, common, "the state that all ranks share")


def _whole_file(
    store: Store, key: str | None, name: str, listed: FileDigest, what: str
) -> FileCheck:
    expected = f"{what}, {nbytes_text(listed.nbytes)}"

    def run() -> Iterator[Issue]:
        content = store.read(name)
        found = FileDigest(len(content), digest_of(content))
        if found != listed:
            yield Issue(Problem.DAMAGED, key, name, f"{what}, {listed}", str(found))

    return FileCheck(key, name, listed.nbytes, run, expected)


def _where(index: Shape, record: ChunkRecord) -> str:
    return f"(chunk {index}, written by rank {record.writer})"


def _check_chunk(
    store: Store, array: ArraySpec, index: Shape, record: ChunkRecord
) -> Iterator[Issue]:
    """Every inner chunk of a chunk's file whose digest differs, and the index where its does."""
    grid, name, where = InnerGrid.of(array, index), array.chunk_file(index), _where(index, record)
    step = max(1, store.block_nbytes // grid.stored_nbytes) * grid.stored_nbytes
    sizes = block_sizes(grid.data_nbytes, step)
    digests = bytearray()
    try:
        blocks = store.read_blocks(name, [*sizes[:-1], sizes[-1] + grid.index_nbytes])
        for nbytes, block in zip(sizes, blocks, strict=True):
            content = np.frombuffer(block, np.uint8)
            digests += digests_of(content[:nbytes].reshape(-1, grid.stored_nbytes))
            if len(digests) == grid.num_chunks * DIGEST_NBYTES:
                digests += digests_of(content[None, nbytes:])
    except IncompleteCheckpointError:
        raise missing_chunk(array, store.path(name)) from None
    except WrongSizeError as error:
        expected = f"{nbytes_text(error.expected)} {where}"
        yield Issue(Problem.WRONG_SIZE, array.key, name, expected, error.found)
        return
    for number, found, listed in differing(bytes(digests), record.digests):
        what = "its index" if number == grid.num_chunks else f"inner chunk {number}"
        expected = f"{what} with digest {listed} {where}"
        yield Issue(Problem.DAMAGED, array.key, name, expected, found)


def _check_pack(
    store: Store, name: str, records: Sequence[tuple[Span, ObjectRecord]]
) -> Iterator[Issue]:
    """Compare the size of a file of objects, then each object in it: one follows the other."""
    try:
        blocks = store.read_blocks(name, [span.nbytes for span, _ in records])
        for (span, record), content in zip(records, blocks, strict=True):
            found = digest_of(content)
            if found != span.digest:
                lead = f"{span.nbytes} bytes from byte {span.byte_offset} with digest {span.digest}"
                expected = f"{lead} (written by rank {record.writer})"
                text = f"{len(content)} with {found}"
                yield Issue(Problem.DAMAGED, record.id.unique_key, name, expected, text)
    except WrongSizeError as error:
        expected = f"{nbytes_text(error.expected)} of objects"
        yield Issue(Problem.WRONG_SIZE, None, name, expected, error.found)
