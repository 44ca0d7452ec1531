"""A checkpoint that is stored as packs, opened to be read. Rank-local; nothing on disk changes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from dist_ckpt_strategies.config import Options, Verify
from dist_ckpt_strategies.core.array import ArraySpec, DType, ObjectId, Region
from dist_ckpt_strategies.core.blocks import BlockTable
from dist_ckpt_strategies.errors import (
    ArrayNotFoundError,
    CheckpointChangedError,
    CorruptCheckpointError,
    IncompleteCheckpointError,
    similar_text,
    some_of,
)
from dist_ckpt_strategies.formats.index import INDEX_NAME, StoredObject
from dist_ckpt_strategies.formats.locations import Location, require_something
from dist_ckpt_strategies.formats.pack import RANGE_NBYTES, Digests, StoredBytes, num_ranges
from dist_ckpt_strategies.formats.pack_commit import current_save, read_pointer
from dist_ckpt_strategies.formats.pack_read import (
    READ_NBYTES,
    BlockRead,
    DigestTables,
    begin_reads,
    read_table,
)
from dist_ckpt_strategies.formats.pack_write import file_of
from dist_ckpt_strategies.storage.bucket import Bucket, Place
from dist_ckpt_strategies.storage.files import Directory, require_directory
from dist_ckpt_strategies.storage.io_pool import Deadline, Transfer, limited, run_with_limit
from dist_ckpt_strategies.storage.store import ArrayRead

T = TypeVar("T")

COMMON = "common state"

_FEW = 8
"""Blocks of an array that are looked at one by one."""


def place_of(location: Location) -> Place:
    """The files at a location."""
    return location.place() if isinstance(location, Bucket) else Directory(location)


class PackCheckpoint:
    """The save that a place holds.

    Args:
        location: of the checkpoint.
        options: how it is read.

    Attributes:
        identity: the digest of its index, which no other save has.
        index: what is stored where.

    Raises:
        CheckpointNotFoundError: there is nothing at that place.
        IncompleteCheckpointError: it has no index, or the save that the index names is gone.
        CorruptCheckpointError: the index is damaged.
    """

    def __init__(self, location: Location, options: Options) -> None:
        self._store, self._options = place_of(location), options
        opened = limited(current_save)(self._store)
        if opened is None:
            if isinstance(location, Path):
                require_directory(location)
            else:
                require_something(location)
            raise IncompleteCheckpointError(
                f"{location} has no {INDEX_NAME}: it holds no packs, or a save has not ended, or "
                f"{INDEX_NAME} is lost; dist-ckpt rebuild-index makes it anew from the packs",
                path=self._store.path(INDEX_NAME),
            )
        pointer, self.index = opened
        self.identity = pointer.digest
        self._found: dict[str, tuple[BlockTable, range]] = {}
        self._tables: DigestTables = {}

    @property
    def save(self) -> PackCheckpoint:
        """What consumers of either format read through."""
        return self

    def read(self, step: Callable[[], T]) -> T:
        """What a step reads of it. Packs are never written again, but removed with their save.

        Raises:
            CheckpointChangedError: another save has replaced it.
        """
        try:
            return step()
        except IncompleteCheckpointError as error:
            pointer = limited(read_pointer)(self._store)
            if pointer is None or pointer.digest == self.identity:
                raise
            raise CheckpointChangedError(
                f"{self._store}: another save replaced this checkpoint while it was read; load it "
                "again",
                path=str(self._store),
            ) from error

    @property
    def features(self) -> tuple[str, ...]:
        """Those of its packs; see ``pack.UNVERIFIED``."""
        return tuple(self.index.facts.get("features", ()))

    def blocks(self, key: str) -> Iterator[tuple[Region, int]]:
        """The stored blocks of an array that ``find`` has given, and which rank wrote each."""
        table, rows = self._found[key]
        numbers = table.place[rows.start : rows.stop, 0].tolist()
        packs = self.index.packs(numbers)
        for row, number in zip(rows, numbers, strict=True):
            yield table.region(row), packs[number].rank

    def find(self, keys: Iterable[str]) -> dict[str, ArraySpec]:
        """The arrays of these keys, sorted by key.

        Raises:
            ArrayNotFoundError: there is no such array; names similar ones.
        """
        wanted = sorted(set(keys))
        try:
            table = run_with_limit(lambda: self.index.find(wanted), self._store)
        except ArrayNotFoundError as error:
            raise self._not_found(str(error.key)) from error
        # Rows are sorted by key, and arrays are numbered in that order.
        bounds = np.searchsorted(table.array, np.arange(len(table.keys) + 1)).tolist()
        specs = {}
        for n, (key, facts) in enumerate(zip(table.keys, table.facts, strict=True)):
            self._found[key] = table, range(bounds[n], bounds[n + 1])
            chunk = tuple(max(1, size) for size in facts.shape)
            specs[key] = ArraySpec(key, facts.shape, DType(facts.dtype), chunk)
        return {key: specs[key] for key in wanted}

    def digests(self, keys: Iterable[str]) -> dict[tuple[str, Region], Digests]:
        """The digests of all ranges of each stored block, but of packs whose digests are damaged.

        By key and region.
        """
        found, damaged = {}, set()
        for key, spec in self.find(keys).items():
            table, rows = self._found[key]
            places = table.place[rows.start : rows.stop].tolist()
            packs = self.index.packs(number for number, *_ in places)
            for row, (number, _, first) in zip(rows, places, strict=True):
                pack, region = packs[number], table.region(row)
                if pack not in self._tables and pack not in damaged:
                    damaged.add(pack)
                    with suppress(CorruptCheckpointError, IncompleteCheckpointError):
                        read_table(self._store, pack, self._tables, key)
                if pack in self._tables:
                    count = num_ranges(region.numel * spec.dtype.itemsize)
                    found[key, region] = self._tables[pack][first : first + count]
        return found

    def keys(self) -> Iterator[str]:
        """The keys of all arrays, sorted."""
        last = None
        for table in self.index.tables():
            for key in table.keys:
                if key != last:
                    yield key
                last = key

    def array_reader(self) -> PackCheckpoint:
        """Reads the arrays that ``find`` gives."""
        return self

    def begin_reads(self, reads: Sequence[ArrayRead]) -> Transfer:
        """Begin to read regions of arrays that ``find`` has given; every byte is verified."""
        found = [(read, *block) for read in reads for block in self._blocks_of(read)]
        numbers = {place[0] for _, place, _, _ in found}
        packs = run_with_limit(lambda: self.index.packs(numbers), self._store)
        max_nbytes = max(RANGE_NBYTES, min(READ_NBYTES, self._budget))
        requests = []
        for read, (number, byte_offset, first_range), block, common in found:
            target: Any = read.target
            requests.append(
                BlockRead(
                    packs[number],
                    byte_offset,
                    first_range,
                    block.shape,
                    common.within(block),
                    target[(*common.within(read.region).slices(), ...)],
                    read.array.key,
                )
            )
        return begin_reads(
            self._store,
            requests,
            num_threads=max(1, min(self._store.num_readers, self._budget // max_nbytes)),
            deadline=Deadline.after(self._options.timeout_s / 2),
            verify=self._options.verify is not Verify.OFF,
            tables=self._tables,
            max_nbytes=max_nbytes,
        )

    @property
    def _budget(self) -> int:
        """Bytes that all threads together read by one call each."""
        num_copies = 2 if isinstance(self._store, Bucket) else 1
        return self._options.max_inflight_bytes // num_copies

    def _not_found(self, key: str) -> ArrayNotFoundError:
        keys = list(self.keys())
        return ArrayNotFoundError(
            f"{key}: no such array among the {len(keys)} in {self._store}{similar_text(key, keys)}",
            key=key,
            path=str(self._store),
        )

    def _blocks_of(self, read: ArrayRead) -> Iterator[tuple[list[int], Region, Region]]:
        """The blocks that share an element with what is read: place, region, common region."""
        if read.array.key not in self._found:
            self.find([read.array.key])
        table, rows = self._found[read.array.key]
        region, ndim = read.region, read.region.ndim
        chosen: Sequence[int] = rows
        if len(rows) > _FEW:
            some = slice(rows.start, rows.stop)
            origin, extent = table.origin[some, :ndim], table.extent[some, :ndim]
            low, high = np.maximum(origin, region.offset), np.minimum(origin + extent, region.end)
            chosen = (np.flatnonzero((low < high).all(axis=1)) + rows.start).tolist()
        for row in chosen:
            block = table.region(row)
            common = block.intersect(region)
            if common is not None:
                yield table.place[row].tolist(), block, common

    def require_files(self) -> None:
        """Raise an IncompleteCheckpointError unless all packs are there, as far as sizes tell."""
        for pack in self.index.packs(range(self.index.num_packs)).values():
            path = self._store.path(file_of(pack.name))
            if not self._store.has_bytes(file_of(pack.name), pack.nbytes):
                raise IncompleteCheckpointError(
                    f"{path}, written by rank {pack.rank}, is missing or has another size than "
                    f"{pack.nbytes} bytes",
                    path=path,
                )

    def object_ids(self) -> Iterator[ObjectId]:
        """All shards of objects, sorted."""
        return (found.id for found in self.index.objects())

    def object_path(self, object_id: ObjectId) -> str:
        """The file of one shard of an object, for messages."""
        return self._file(self._object(object_id).stored)

    def object_content(self, object_id: ObjectId) -> bytes:
        """What is stored of one shard of an object; its digest is compared.

        Raises:
            ArrayNotFoundError: there is no such shard.
        """
        return self._content(self._object(object_id).stored, object_id.unique_key)

    def common_content(self) -> bytes:
        """The common state, pickled; its digest is compared.

        Raises:
            IncompleteCheckpointError: it was not saved.
        """
        stored = self.index.common
        if stored is None:
            raise IncompleteCheckpointError(f"{self._store} has no common state")
        return self._content(stored, COMMON)

    def _object(self, object_id: ObjectId) -> StoredObject:
        of_key = self.index.objects([object_id.key])
        for found in of_key:
            if found.id == object_id:
                return found
        known = some_of([found.id.unique_key for found in of_key]) or "none of that key"
        raise ArrayNotFoundError(
            f"{object_id.unique_key}: no such object in {self._store}; stored are {known}",
            key=object_id.key,
            path=str(self._store),
        )

    def _content(self, stored: StoredBytes, key: str) -> bytes:
        pack = self.index.packs([stored.pack])[stored.pack]
        target = np.empty(stored.nbytes, np.uint8)
        whole = Region.whole((stored.nbytes,))
        read = BlockRead(
            pack, stored.byte_offset, stored.first_range, whole.shape, whole, target, key
        )
        begin_reads(
            self._store,
            [read],
            num_threads=1,
            deadline=Deadline.after(self._options.timeout_s / 2),
        ).wait()
        return target.tobytes()

    def _file(self, stored: StoredBytes) -> str:
        return self._store.path(file_of(self.index.packs([stored.pack])[stored.pack].name))
