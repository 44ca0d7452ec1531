"""A checkpoint in an object store, as ``dist-ckpt inspect`` and ``verify`` look at it. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

import numpy as np

from dist_ckpt_strategies.errors import CheckpointNotFoundError, IncompleteCheckpointError
from dist_ckpt_strategies.spec.manifest import ArrayRecord, ChunkRecord
from dist_ckpt_strategies.spec.marker import CheckpointMarker
from dist_ckpt_strategies.storage.buckets.bucket import Bucket
from dist_ckpt_strategies.storage.buckets.publication import require_something
from dist_ckpt_strategies.storage.disk.files import MARKER_NAME
from dist_ckpt_strategies.storage.findings import Finding, Problem, nbytes_text
from dist_ckpt_strategies.storage.format2.checks import FileCheck, chunk_findings
from dist_ckpt_strategies.storage.format2.chunk_files import ChunkFile
from dist_ckpt_strategies.storage.format2.files import (
    FOLDER_NAMES,
    FORMAT2,
    TOP_NAMES,
    FoundFiles,
    is_remains,
    sharded_format,
)
from dist_ckpt_strategies.storage.format2.inner_codec import digests_of
from dist_ckpt_strategies.storage.format2.layout import chunk_name
from dist_ckpt_strategies.storage.format2.manifest import INDEX_NAME, SAVE_NAME
from dist_ckpt_strategies.storage.lifecycle.marker_file import missing_marker, parsed_or_finding

NUM_THREADS = 16
"""Objects that are looked at at the same time; each has one request for data under way."""

REQUEST_NBYTES = 8 << 20

_MAX_NAMED = 3


def files_of_bucket(bucket: Bucket) -> FoundFiles | None:
    """What lies below a URL; None where it is no checkpoint of format 2. One list of names.

    Raises:
        CheckpointNotFoundError: nothing does, or several checkpoints do.
        BucketNotFoundError, StoreAccessError, StoreUnreachableError: nothing can be told.
    """
    names = list(bucket.names(""))
    if not names:
        require_something(bucket)
    marker = read_marker_or_finding(bucket)
    is_known = SAVE_NAME in names or INDEX_NAME in names
    if not is_known and (isinstance(marker, Finding) or sharded_format(marker) != FORMAT2):
        _require_one(bucket, names)
        return None
    mine = [name for name in names if _is_ours(name)]
    others = {name.partition("/")[0] for name in names if not _is_ours(name)}
    return FoundFiles(bucket, marker, dict.fromkeys(mine), tuple(sorted(others)))


def _is_ours(name: str) -> bool:
    top, slash, _ = name.partition("/")
    return name in TOP_NAMES or is_remains(name) or (bool(slash) and top in FOLDER_NAMES)


def _require_one(bucket: Bucket, names: Iterable[str]) -> None:
    """Refuse a place that only holds checkpoints, and say which."""
    inner = sorted({top for name in names if (top := _folder_of_checkpoint(name)) is not None})
    if inner:
        shown = ", ".join(inner[:_MAX_NAMED]) + (", ..." if inner[_MAX_NAMED:] else "")
        raise CheckpointNotFoundError(
            f"{bucket} is no checkpoint, but holds {len(inner)} ({shown}); name one of them",
            path=str(bucket),
        )


def _folder_of_checkpoint(name: str) -> str | None:
    top, _, rest = name.partition("/")
    return top if rest in {MARKER_NAME, SAVE_NAME} else None


def read_marker_or_finding(bucket: Bucket) -> CheckpointMarker | Finding:
    """The marker of a checkpoint, or what is wrong with it."""
    try:
        return parsed_or_finding(bucket.read(MARKER_NAME))
    except IncompleteCheckpointError:
        return missing_marker()


def bucket_chunk_checks(bucket: Bucket, record: ArrayRecord) -> Iterator[FileCheck]:
    """A check of each chunk's object: of its size, then of all of it, in parts of 8 MiB."""
    array = record.array
    for index, chunk in record.chunks.items():
        name = chunk_name(array, index)
        file = ChunkFile.of(array, index, bucket.path(name))
        run = partial(_check_chunk, bucket, name, file, chunk)
        yield FileCheck(array.key, name, file.grid.file_nbytes, run)


def _check_chunk(bucket: Bucket, name: str, file: ChunkFile, record: ChunkRecord) -> list[Finding]:
    grid, key = file.grid, file.array.key
    if not bucket.has_nbytes(name, grid.file_nbytes):
        where = f"(chunk {file.index}, written by rank {record.writer})"
        expected = f"{nbytes_text(grid.file_nbytes)} {where}"
        found = nbytes_text(bucket.nbytes(name) or 0)
        return [Finding(Problem.WRONG_CHUNK_SIZE, key, name, expected, found)]
    digests: list[int] = []
    step = max(1, REQUEST_NBYTES // grid.stored_nbytes)
    for first in range(0, grid.num_chunks, step):
        count = min(step, grid.num_chunks - first)
        content = bucket.read_span(name, first * grid.stored_nbytes, count * grid.stored_nbytes)
        digests += digests_of(np.frombuffer(content, np.uint8).reshape(count, -1))
    index = bucket.read_span(name, grid.data_nbytes, grid.index_nbytes)
    digests += digests_of(np.frombuffer(index, np.uint8)[None])
    return chunk_findings(name, file, record, digests)


def size_finding(bucket: Bucket, name: str, nbytes: int) -> Finding | None:
    """What is wrong with the size of an object that holds other objects; None where nothing is."""
    if bucket.has_nbytes(name, nbytes):
        return None
    found = nbytes_text(bucket.nbytes(name) or 0)
    expected = f"{nbytes_text(nbytes)} of objects"
    return Finding(Problem.WRONG_FILE_SIZE, None, name, expected, found)
