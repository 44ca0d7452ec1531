"""A checkpoint of format ("zarr", 1), opened to be read. Rank-local; nothing on disk changes.

A raw chunk is a block in a file of its own, read as the blocks of packs are; others are decoded by
TensorStore.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import xxhash

from dist_ckpt_strategies.config import Options
from dist_ckpt_strategies.core.array import ArraySpec, ObjectId, Region, Shape
from dist_ckpt_strategies.core.blocks import padded
from dist_ckpt_strategies.errors import (
    ArrayNotFoundError,
    CorruptCheckpointError,
    IncompleteCheckpointError,
    array_not_found,
)
from dist_ckpt_strategies.formats.locations import refuse_format2
from dist_ckpt_strategies.formats.pack import Digests
from dist_ckpt_strategies.formats.pack_checkpoint import OpenedSave, PackCheckpoint
from dist_ckpt_strategies.formats.pack_read import READ_NBYTES, BlockReads, read_jobs
from dist_ckpt_strategies.formats.zarr2 import (
    METADATA_NAME,
    array_keys,
    decode_chunk,
    object_ids,
    object_path,
    parse_metadata,
)
from dist_ckpt_strategies.storage.files import (
    COMMON_NAME,
    MAX_JSON_NBYTES,
    Directory,
    file_errors,
    read_file,
    require_directory,
)
from dist_ckpt_strategies.storage.io_pool import Job, Transfer, raise_if_cancelled
from dist_ckpt_strategies.storage.store import ArrayRead, HostArray

T = TypeVar("T")


def common_digest(root: Path) -> str:
    """The digest of the common state's file; empty where there is none."""
    with suppress(IncompleteCheckpointError):
        return xxhash.xxh3_128_hexdigest(Directory(root).read(COMMON_NAME))
    return ""


class Format1Checkpoint:
    """A checkpoint of format ("zarr", 1) that can be read; so are those of others by subclasses.

    Attributes:
        save: what is opened; made now unless it is given.
        identity: tells it from other saves, and from another copy of its common state, the only
            file of which a load reads all on every rank.

    Raises:
        IncompatibleVersionError: it is of format ("zarr", 2).
    """

    features: tuple[str, ...] = ()

    def __init__(self, root: Path, options: Options, save: OpenedSave | None = None) -> None:
        self._root, self._options = root, options
        self._store = Directory(root)
        self.save = save or OpenedSave(root)
        refuse_format2(root)
        self.identity = f"{self.save.identity} {common_digest(root)}"

    def begin_reads(self, reads: Sequence[ArrayRead]) -> Transfer:
        """Begin to read regions of arrays that ``find`` has given. There are no digests.

        Takes ``max_inflight_bytes`` for chunks that are decoded; a larger one goes alone.
        """
        raw: list[BlockPart] = []
        sizes: dict[str, int] = {}
        jobs: list[Job] = []
        nbytes = READ_NBYTES
        for read in reads:
            array = read.array
            whole: Any = read.target
            for index in read.region.cells(array.chunk_shape):
                chunk, name = array.chunk_region(index), array.chunk_file(index)
                common = read.region.intersect(chunk)
                assert common is not None  # noqa: S101 - cells yields only chunks that overlap
                target = whole[(*common.within(read.region).slices(), ...)]
                if array.is_raw:
                    raw.append((name, 0, array.key, chunk.shape, common.within(chunk), target))
                    sizes[self._store.path(name)] = array.chunk_nbytes
                else:
                    nbytes = max(nbytes, 2 * array.chunk_nbytes)
                    path = self._store.path(name)
                    decode = partial(self._decode, array, index, path, common, target)
                    jobs.append(Job(array.key, path, decode))
        for job in read_jobs(self._store, block_reads(raw), {}) if raw else ():
            run = partial(_read_chunk, job, sizes[str(job.path)])
            jobs.append(Job(job.key, job.path, run))
        return Transfer(jobs, self._num_threads(nbytes))

    def find(self, keys: Iterable[str]) -> Mapping[str, ArraySpec]:
        """The arrays of these keys, sorted by key. One metadata file is read for each.

        Raises:
            ArrayNotFoundError: one is missing; names similar ones.
            CorruptCheckpointError: the description of one is damaged.
        """
        paths = {key: f"{self._root}/{key}/{METADATA_NAME}" for key in sorted(keys)}
        specs: dict[str, ArraySpec] = {}

        def find(key: str) -> None:
            path = paths[key]
            try:
                with file_errors(key, path):
                    content = read_file(path, MAX_JSON_NBYTES)
            except IncompleteCheckpointError as error:
                require_directory(self._root)
                keys = list(array_keys(self._root))
                raise array_not_found(key, keys, self._root) from error
            specs[key] = parse_metadata(key, path, content)

        jobs = [Job(key, path, partial(find, key)) for key, path in paths.items()]
        Transfer(jobs, self._num_threads()).wait(self._options.timeout_s)
        return {key: specs[key] for key in paths}  # threads finish in any order

    def keys(self) -> Iterator[str]:
        """The keys of all arrays."""
        return array_keys(self._root)

    def object_ids(self) -> Iterator[ObjectId]:
        """All shards of objects."""
        return object_ids(self._root)

    def object_path(self, object_id: ObjectId) -> str:
        """The path or URL of one shard of an object, for messages."""
        return str(object_path(self._root, object_id))

    def object_content(self, object_id: ObjectId) -> bytes:
        """The stored bytes of one shard of an object, for ``load_content``.

        Raises:
            ArrayNotFoundError: there is no such shard.
        """
        path = object_path(self._root, object_id)
        with file_errors(object_id.unique_key, path, not_found=ArrayNotFoundError):
            return read_file(path)

    def common_content(self) -> bytes:
        """The common state, pickled; IncompleteCheckpointError if it was not saved as a file."""
        return self._store.read(COMMON_NAME)

    def digests(self, _: Iterable[str]) -> dict[tuple[str, Region], Digests]:
        """No digests of stored blocks: the format has none."""
        return {}

    def _num_threads(self, nbytes: int = READ_NBYTES) -> int:
        """Threads that each hold so many bytes."""
        return max(1, min(self._store.num_readers, self._options.max_inflight_bytes // nbytes))

    def _decode(
        self, array: ArraySpec, index: Shape, path: str, region: Region, target: HostArray
    ) -> None:
        """Copy a region, of the array, out of one chunk that is not raw."""
        _chunk_nbytes(array.key, path)
        elements = decode_chunk(self._root, array, index, region)
        raise_if_cancelled()
        np.copyto(target, elements)


StoredCheckpoint = Format1Checkpoint | PackCheckpoint
"""A checkpoint of a format of this package, of which arrays are read by region."""


BlockPart = tuple[str, int, str, Shape, Region, HostArray]
"""A file, the first byte of a block there, its key and shape, the part that is wanted, and where.

There are no digests.
"""


def block_reads(parts: Sequence[BlockPart]) -> BlockReads:
    """The reads of parts of blocks."""
    names, starts, keys, shapes, boxes, targets = zip(*parts, strict=True)
    width = max(map(len, shapes))
    place = np.zeros((len(names), 3), np.int64)
    place[:, 0], place[:, 1] = np.arange(len(names)), starts
    return BlockReads(
        dict(enumerate(names)),
        place,
        padded(shapes, width, 1),
        padded([box.offset for box in boxes], width, 0),
        padded([box.shape for box in boxes], width, 1),
        targets,
        keys,
    )


def found_among(arrays: Mapping[str, T], keys: Iterable[str], root: object) -> dict[str, T]:
    """The arrays of these keys, sorted by key; ArrayNotFoundError names one that is missing."""
    wanted = sorted(keys)
    for key in wanted:
        if key not in arrays:
            raise array_not_found(key, list(arrays), root)
    return {key: arrays[key] for key in wanted}


def _read_chunk(job: Job, nbytes: int) -> None:
    """Read a part of a raw chunk, unless its file has another size than ``nbytes``."""
    key, path = str(job.key), str(job.path)
    actual_nbytes = _chunk_nbytes(key, path)
    if actual_nbytes != nbytes:
        text = f"{key}: chunk file {path} has {actual_nbytes} bytes, expected {nbytes}"
        raise CorruptCheckpointError(text, key=key, path=path)
    job.run()


def _chunk_nbytes(key: str, path: str) -> int:
    """The size of the file of a chunk; IncompleteCheckpointError if it is missing."""
    with file_errors(key, path):
        try:
            return os.stat(path).st_size  # noqa: PTH116 - 10,000 times
        except FileNotFoundError:
            raise IncompleteCheckpointError(
                f"{key}: chunk file {path} is missing; the save was cut short, or the file was "
                "removed afterwards (`dist-ckpt verify` lists all of them)",
                key=key,
                path=path,
            ) from None
