"""A checkpoint that is stored as packs, opened to be read. Rank-local; nothing on disk changes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np

from dist_ckpt_strategies.config import Options, Verify
from dist_ckpt_strategies.core.array import ArraySpec, DType, ObjectId, Region
from dist_ckpt_strategies.core.blocks import BlockTable, merged, overlaps
from dist_ckpt_strategies.errors import (
    ArrayNotFoundError,
    CheckpointChangedError,
    CorruptCheckpointError,
    IncompleteCheckpointError,
    array_not_found,
    some_of,
)
from dist_ckpt_strategies.formats.index import INDEX_NAME, StoredObject
from dist_ckpt_strategies.formats.locations import Location, place_of, require_something
from dist_ckpt_strategies.formats.pack import RANGE_NBYTES, Digests, StoredBytes, num_ranges
from dist_ckpt_strategies.formats.pack_commit import current_save, missing_packs, read_pointer
from dist_ckpt_strategies.formats.pack_read import (
    BlockReads,
    DigestTables,
    begin_reads,
    read_content,
    read_table,
)
from dist_ckpt_strategies.formats.pack_write import PackRecord, file_of
from dist_ckpt_strategies.storage.bucket import Bucket
from dist_ckpt_strategies.storage.io_pool import Deadline, Transfer, run_within
from dist_ckpt_strategies.storage.store import ArrayRead

T = TypeVar("T")

COMMON = "common state"


@dataclass(frozen=True, slots=True)
class _LookUp:
    """Arrays that were looked up together: their blocks, numbers by key, and packs by number."""

    table: BlockTable
    numbers: dict[str, int]
    packs: dict[int, PackRecord]


class PackCheckpoint:
    """The save that a place holds.

    Args:
        location: of the checkpoint.
        options: how it is read.

    Attributes:
        root: the location.
        identity: the digest of its index, which no other save has.
        index: what is stored where.

    Raises:
        CheckpointNotFoundError: there is nothing at that place.
        IncompleteCheckpointError: it has no index, or the save that the index names is gone.
        CorruptCheckpointError: the index is damaged.
    """

    def __init__(self, location: Location, options: Options) -> None:
        self.root, self._store, self._options = location, place_of(location), options
        opened = current_save(self._store)
        if opened is None:
            require_something(location)
            raise IncompleteCheckpointError(
                f"{self._store.path(INDEX_NAME)} does not exist: there are no packs, or a save has "
                "not ended, or it is lost; dist-ckpt rebuild-index makes it anew from the packs",
                path=self._store.path(INDEX_NAME),
            )
        pointer, self.index = opened
        self.identity = pointer.digest
        self._last = _LookUp(merged([])[0], {}, {})
        self._tables: DigestTables = {}

    @property
    def save(self) -> PackCheckpoint:
        """What consumers of either format read through."""
        return self

    def read(self, step: Callable[[], T], limit_s: float | None = None) -> T:
        """What a step reads of it. Packs are never written again, but removed with their save.

        With a limit storage is asked on another thread what is there, where a pack is gone.

        Raises:
            CheckpointChangedError: another save has replaced it.
        """
        try:
            return step()
        except IncompleteCheckpointError as error:
            look = partial(read_pointer, self._store)
            limit = None if limit_s is None else Deadline.after(limit_s)
            pointer = look() if limit is None else run_within(limit, self.root, look)
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
        """The stored blocks of an array, and which rank wrote each."""
        found = self._look_up([key])
        for row in np.flatnonzero(found.table.array == found.numbers[key]).tolist():
            yield found.table.region(row), found.packs[int(found.table.place[row, 0])].rank

    def find(self, keys: Iterable[str]) -> dict[str, ArraySpec]:
        """The arrays of these keys, sorted by key.

        Raises:
            ArrayNotFoundError: there is no such array; names similar ones.
        """
        specs = {}
        table = self._look_up(keys).table
        for key, facts in zip(table.keys, table.facts, strict=True):
            chunk = tuple([size or 1 for size in facts.shape])
            specs[key] = ArraySpec(key, facts.shape, DType(facts.dtype), chunk)
        return dict(sorted(specs.items()))

    def _look_up(self, keys: Iterable[str]) -> _LookUp:
        """The blocks of these keys, and perhaps of others: those that were looked up last."""
        wanted, last = set(keys), self._last
        if wanted <= last.numbers.keys():
            return last
        try:
            table = self.index.find(wanted)
        except ArrayNotFoundError as error:
            raise array_not_found(str(error.key), list(self.keys()), self._store) from error
        packs = self.index.packs(np.unique(table.place[:, 0]).tolist())
        self._last = _LookUp(table, {key: n for n, key in enumerate(table.keys)}, packs)
        return self._last

    def digests(self, keys: Iterable[str]) -> dict[tuple[str, Region], Digests]:
        """The digests of all ranges of each stored block, but of packs whose digests are damaged.

        By key and region.
        """
        wanted = set(keys)
        look = self._look_up(wanted)
        table, found, damaged = look.table, {}, set()
        places = zip(table.array.tolist(), table.place.tolist(), strict=True)
        for row, (array, (number, _, first)) in enumerate(places):
            key, pack, region = table.keys[array], look.packs[number], table.region(row)
            if key not in wanted:
                continue
            if pack not in self._tables and pack not in damaged:
                damaged.add(pack)
                with suppress(CorruptCheckpointError, IncompleteCheckpointError):
                    read_table(self._store, pack, self._tables, key)
            if pack in self._tables:
                nbytes = region.numel * DType(table.facts[array].dtype).itemsize
                found[key, region] = self._tables[pack][first : first + num_ranges(nbytes)]
        return found

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
        found = self._look_up(read.array.key for read in reads)
        arrays = [found.numbers[read.array.key] for read in reads]
        common = overlaps(found.table, arrays, [read.region for read in reads])
        targets = []
        for number, low, shape in zip(
            common.of_region.tolist(), common.origin.tolist(), common.extent.tolist(), strict=True
        ):
            region, target = reads[number].region, reads[number].target
            if shape[: region.ndim] != list(region.shape):
                dims = zip(low, shape, region.offset, strict=False)
                target = target[(*(slice(a - at, a - at + n) for a, n, at in dims), ...)]
            targets.append(target)
        rows, max_nbytes = common.row, max(RANGE_NBYTES, min(self._store.read_nbytes, self._budget))
        return begin_reads(
            self._store,
            BlockReads(
                found.packs,
                found.table.place[rows],
                found.table.extent[rows],
                common.origin - found.table.origin[rows],
                common.extent,
                targets,
                [reads[number].array.key for number in common.of_region.tolist()],
            ),
            num_threads=max(1, min(self._store.num_readers, self._budget // max_nbytes)),
            verify=self._options.verify is not Verify.OFF,
            tables=self._tables,
            max_nbytes=max_nbytes,
        )

    @property
    def _budget(self) -> int:
        """Bytes that all threads together read by one call each."""
        num_copies = 2 if isinstance(self._store, Bucket) else 1
        return self._options.max_inflight_bytes // num_copies

    def require_files(self) -> None:
        """Raise an IncompleteCheckpointError unless all packs are there, as far as sizes tell."""
        packs = list(self.index.packs(range(self.index.num_packs)).values())
        for pack in missing_packs(self._store, packs)[:1]:
            path = self._store.path(file_of(pack.name))
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
        return self.read(lambda: read_content(self._store, pack, stored, key, self._tables))

    def _file(self, stored: StoredBytes) -> str:
        return self._store.path(file_of(self.index.packs([stored.pack])[stored.pack].name))
