"""A checkpoint that is stored as packs, opened to be read. Rank-local; nothing on disk changes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np

from dist_ckpt_strategies.config import Options, Verify
from dist_ckpt_strategies.core.array import ArraySpec, DType, ObjectId, Region
from dist_ckpt_strategies.core.blocks import BlockTable, Column, merged, overlaps
from dist_ckpt_strategies.core.coverage import require_coverage
from dist_ckpt_strategies.errors import (
    ArrayNotFoundError,
    CheckpointChangedError,
    CorruptCheckpointError,
    IncompleteCheckpointError,
    PlanError,
    StorageError,
    StorageTimeoutError,
    array_not_found,
    some_of,
)
from dist_ckpt_strategies.formats.index import INDEX_NAME, FullIndex, Pointer, full_index_of
from dist_ckpt_strategies.formats.locations import (
    Location,
    holds_packs,
    place_of,
    require_something,
)
from dist_ckpt_strategies.formats.pack import RANGE_NBYTES, Digests, StoredBytes, num_ranges
from dist_ckpt_strategies.formats.pack_commit import (
    current_save,
    open_full_index,
    read_pointer,
    require_packs,
)
from dist_ckpt_strategies.formats.pack_read import (
    BlockReads,
    DigestTables,
    read_content,
    read_jobs,
    read_table,
)
from dist_ckpt_strategies.formats.pack_write import PackRecord, file_of
from dist_ckpt_strategies.storage.bucket import Bucket
from dist_ckpt_strategies.storage.files import MARKER_NAME, READ_AT_ONCE, file_errors
from dist_ckpt_strategies.storage.io_pool import Deadline, Transfer, run_within
from dist_ckpt_strategies.storage.store import ArrayRead

T = TypeVar("T")

COMMON = "common state"


class OpenedSave:
    """The save at a location, told apart from one that replaces it: made before it is read.

    A commit removes the marker before it moves other files; where there is none, its renames change
    the directory's time. Packs never change, and are removed with their save.

    Attributes:
        pointer: what its ``index`` says, read now unless it is given; None if there are no packs.
        identity: the same on all ranks that have opened this save; empty where nothing tells. Of
            packs it is the digest of the index.
        index: the full index, where that had to be read.
    """

    def __init__(self, root: Location, pointer: Pointer | None = None) -> None:
        self.index: FullIndex | None = None
        if pointer is None and isinstance(root, Bucket):
            self.index = current_save(root)
            pointer = None if self.index is None else self.index.pointer
        elif pointer is None and holds_packs(root):
            pointer = pointer_at(root)
        self.root, self.pointer, self.has_packs = root, pointer, pointer is not None
        self.identity, self._state = (pointer.digest, "") if pointer else _look(root)

    def require_current(self, limit_s: float | None = None) -> None:
        """Raise CheckpointChangedError where it has been replaced or removed since.

        With a limit storage is asked on another thread.
        """
        root = self.root

        def look() -> tuple[str, str]:
            pointer = pointer_at(root) if self.has_packs else None
            return (pointer.digest, "") if pointer else _look(root)

        state = look() if limit_s is None else run_within(Deadline.after(limit_s), root, look)
        if state != (self.identity, self._state):
            raise CheckpointChangedError(
                f"{root}: another save replaced this checkpoint while it was read, or it was "
                "removed; what was read may be of both saves; load it again",
                path=str(root),
            )

    def read(self, step: Callable[[], T], limit_s: float | None = None) -> T:
        """Run a step that reads, and return its result; ``require_current`` also runs if it raises.

        Packs are looked for again only after one of them was missing.
        """
        try:
            result = step()
        except StorageTimeoutError:
            raise
        except StorageError as error:
            if not self.has_packs or isinstance(error, IncompleteCheckpointError):
                self.require_current(limit_s)
            raise
        if not self.has_packs:
            self.require_current(limit_s)
        return result


def pointer_at(root: Location) -> Pointer | None:
    """The content of ``index``; in a bucket, what it should be for the save that counts."""
    store = place_of(root)
    if isinstance(store, Bucket):
        index = current_save(store)
        return None if index is None else index.pointer
    return read_pointer(store)


def _look(root: Location) -> tuple[str, str]:
    """The identity of a save that is not of packs, and what else tells it from another one."""
    if isinstance(root, Path):
        for path in (root / MARKER_NAME, root):
            refused = (FileNotFoundError, NotADirectoryError, PermissionError)
            with file_errors(None, path), suppress(*refused):
                handle = os.open(path, READ_AT_ONCE)  # an NFS client then asks its server
                status = os.fstat(handle)
                os.close(handle)
                identity = "" if path == root else str(status.st_mtime_ns)
                return identity, f"{status.st_ino} {status.st_mtime_ns}"
    return "", ""


_Lookup = tuple[BlockTable, dict[str, int], dict[int, PackRecord]]
"""Arrays that were looked up together: their blocks, their numbers by key, and packs by number."""


class PackCheckpoint:
    """The save that a place holds.

    Attributes:
        save: what is opened, by default what is there.
        identity: the digest of its index, which no other save has.
        index: what is stored where.

    Raises:
        CheckpointNotFoundError: there is nothing at that place.
        IncompleteCheckpointError: it has no index, or the save that the index names is gone.
        CorruptCheckpointError: the index is damaged.
    """

    def __init__(
        self, location: Location, options: Options, save: OpenedSave | None = None
    ) -> None:
        self._store, self._options = place_of(location), options
        index = None
        if save is None:
            index = current_save(self._store)
        elif save.pointer is not None:
            read = partial(open_full_index, self._store, save.pointer)
            index = save.index or save.read(read)
        if index is None:
            require_something(location)
            raise IncompleteCheckpointError(
                f"{self._store.path(INDEX_NAME)} does not exist: there are no packs, or a save has "
                "not ended, or it is lost; dist-ckpt rebuild-index makes it anew from the packs",
                path=self._store.path(INDEX_NAME),
            )
        self.index, self.save = index, save or OpenedSave(location, index.pointer)
        self.identity = self.save.identity
        self._last: _Lookup = (merged([])[0], {}, {})
        self._tables: DigestTables = {}

    @property
    def features(self) -> tuple[str, ...]:
        """Features of its packs; see ``pack.UNVERIFIED``."""
        return tuple(self.index.facts.get("features", ()))

    def blocks(self, key: str) -> Iterator[tuple[Region, int]]:
        """The stored blocks of an array, and which rank wrote each."""
        looked_up, numbers, packs = self._look_up([key])
        table = looked_up.between(numbers[key], numbers[key])
        for row in range(len(table)):
            yield table.region(row), packs[int(table.place[row, 0])].rank

    def find(self, keys: Iterable[str]) -> dict[str, ArraySpec]:
        """The arrays of these keys, sorted by key.

        Raises:
            ArrayNotFoundError: there is no such array; names similar ones.
        """
        wanted, specs = sorted(set(keys)), {}
        table, numbers, _ = self._look_up(wanted)
        for key in wanted:
            facts = table.facts[numbers[key]]
            chunk = tuple([size or 1 for size in facts.shape])
            specs[key] = ArraySpec(key, facts.shape, DType(facts.dtype), chunk)
        return specs

    def _look_up(self, keys: Iterable[str]) -> _Lookup:
        """The blocks of these keys, and perhaps of others: those that were looked up last."""
        wanted = set(keys)
        if wanted <= self._last[1].keys():
            return self._last
        try:
            table = self.index.find(wanted)
        except ArrayNotFoundError as error:
            raise array_not_found(str(error.key), list(self.keys()), self._store) from error
        numbers, of_row = np.unique(table.place[:, 0], return_inverse=True)
        packs = self.index.packs(numbers.tolist())
        ranks = np.array([packs[number].rank for number in numbers.tolist()], np.int64)
        self._require_partitions(table, ranks[of_row])
        self._last = table, {key: n for n, key in enumerate(table.keys)}, packs
        return self._last

    def _require_partitions(self, table: BlockTable, ranks: Column) -> None:
        """Raise unless blocks make up their arrays: else elements would not be read at all."""
        try:
            require_coverage(table, ranks)
        except PlanError as error:
            path = self._store.path(full_index_of(self.index.pointer.save_id))
            raise CorruptCheckpointError(
                f"{path} is damaged: {error.message}; dist-ckpt rebuild-index makes it anew",
                key=error.key,
                path=path,
            ) from error

    def digests(self, keys: Iterable[str]) -> dict[tuple[str, Region], Digests]:
        """The digests of all ranges of each stored block, but of packs whose digests are damaged.

        By key and region.
        """
        wanted, digests, damaged = set(keys), {}, set()
        table, _, packs = self._look_up(wanted)
        places = zip(table.array.tolist(), table.place.tolist(), strict=True)
        for row, (array, (number, _, first)) in enumerate(places):
            key, pack, region = table.keys[array], packs[number], table.region(row)
            if key not in wanted:
                continue
            if pack not in self._tables and pack not in damaged:
                damaged.add(pack)
                with suppress(CorruptCheckpointError, IncompleteCheckpointError):
                    read_table(self._store, pack, self._tables, key)
            if pack in self._tables:
                nbytes = region.numel * DType(table.facts[array].dtype).itemsize
                digests[key, region] = self._tables[pack][first : first + num_ranges(nbytes)]
        return digests

    def keys(self) -> Iterator[str]:
        """The keys of all arrays, sorted."""
        last = None
        for table in self.index.tables():
            for key in table.keys:
                if key != last:
                    yield key
                last = key

    def begin_reads(self, reads: Sequence[ArrayRead]) -> Transfer:
        """Begin to read regions of arrays; every byte is verified.

        Storage is asked only for arrays that ``find`` has not given last.
        """
        looked_up, numbers, packs = self._look_up(read.array.key for read in reads)
        arrays = [numbers[read.array.key] for read in reads]
        first = min(arrays, default=0)
        table = looked_up.between(first, max(arrays, default=0))
        arrays = [number - first for number in arrays]
        rows, of_read, origin, shape = overlaps(table, arrays, [read.region for read in reads])
        keys, targets = [], []
        for number, low, extent in zip(
            of_read.tolist(), origin.tolist(), shape.tolist(), strict=True
        ):
            region, target = reads[number].region, reads[number].target
            if extent[: len(region.shape)] != list(region.shape):
                dims = zip(low, extent, region.offset, strict=False)
                target = target[(*(slice(a - at, a - at + n) for a, n, at in dims), ...)]
            targets.append(target)
            keys.append(reads[number].array.key)
        place, offset = table.place[rows], origin - table.origin[rows]
        # Of all threads together, by one call each; a bucket's are in memory twice.
        budget = self._options.max_inflight_bytes // (2 if isinstance(self._store, Bucket) else 1)
        max_nbytes = max(RANGE_NBYTES, min(self._store.read_nbytes, budget))
        wanted = BlockReads(packs, place, table.extent[rows], offset, shape, targets, keys)
        is_verified = self._options.verify is not Verify.OFF
        jobs = read_jobs(self._store, wanted, self._tables, max_nbytes, verify=is_verified)
        return Transfer(jobs, max(1, min(self._store.num_readers, budget // max_nbytes)))

    def require_files(self) -> None:
        """Raise an IncompleteCheckpointError unless all packs are there, as far as sizes tell."""
        require_packs(self._store, self.index.packs().values())

    def object_ids(self) -> Iterator[ObjectId]:
        """All shards of objects, sorted."""
        return (name for name, _ in self.index.objects())

    def object_path(self, object_id: ObjectId) -> str:
        """The file of one shard of an object, for messages."""
        return self._file(self._object(object_id))

    def object_content(self, object_id: ObjectId) -> bytes:
        """The stored bytes of one shard of an object, compared with their digest.

        Raises:
            ArrayNotFoundError: there is no such shard.
        """
        return self._content(self._object(object_id), object_id.unique_key)

    def common_content(self) -> bytes:
        """The common state, pickled; its digest is compared.

        Raises:
            IncompleteCheckpointError: it was not saved.
        """
        stored = self.index.common
        if stored is None:
            raise IncompleteCheckpointError(f"{self._store} has no common state")
        return self._content(stored, COMMON)

    def _object(self, object_id: ObjectId) -> StoredBytes:
        of_key = dict(self.index.objects([object_id.key]))
        if object_id in of_key:
            return of_key[object_id]
        stored = some_of([name.unique_key for name in of_key]) or "none of that key"
        raise ArrayNotFoundError(
            f"{object_id.unique_key}: no such object in {self._store}; stored are {stored}",
            key=object_id.key,
            path=str(self._store),
        )

    def _content(self, stored: StoredBytes, key: str) -> bytes:
        pack = self.index.packs([stored.pack])[stored.pack]
        return self.save.read(lambda: read_content(self._store, pack, stored, key, self._tables))

    def _file(self, stored: StoredBytes) -> str:
        return self._store.path(file_of(self.index.packs([stored.pack])[stored.pack].name))
