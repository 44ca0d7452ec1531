"""The ``.pt`` files of a checkpoint: complete grids, and archives that fit their checksums."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

from dist_ckpt_strategies.spec.object import UNKNOWN, ObjectId
from dist_ckpt_strategies.spec.region import Extent
from dist_ckpt_strategies.storage.disk.folders import reason
from dist_ckpt_strategies.storage.findings import (
    MAX_LISTED,
    NO_FILE,
    Finding,
    Problem,
    Watch,
    grid_indices,
    grid_text,
    unreadable,
)
from dist_ckpt_strategies.storage.objects.files import OBJECT_SUFFIX, file_damage

_THREADS = 8


@dataclass(frozen=True, slots=True)
class StoredShard:
    """The file of one shard of an object.

    Attributes:
        id: what its name states; the shape's last number is UNKNOWN in the older form.
        nbytes: its size.
    """

    id: ObjectId
    nbytes: int

    @property
    def path(self) -> str:
        """The file, relative to the checkpoint."""
        return _shard_path(self.id)

    @classmethod
    def parse(cls, path: str, nbytes: int) -> StoredShard | None:
        """The shard in a file of that path; None where the name is none of a shard."""
        if not path.endswith(OBJECT_SUFFIX):
            return None
        found = ObjectId.parse(path.removesuffix(OBJECT_SUFFIX))
        return cls(found, nbytes) if found and _shard_path(found) == path else None


@dataclass(frozen=True, slots=True)
class StoredObject:
    """A grid of objects, as the names of its files state it.

    Attributes:
        key: the object's.
        shape: of the grid, in shards.
        shards: by offset, those whose files are there, even where they are outside of the grid.
    """

    key: str
    shape: Extent
    shards: tuple[StoredShard, ...]

    @property
    def num_expected(self) -> int:
        """Shards of the complete grid."""
        return math.prod(self.shape)

    @property
    def num_shards(self) -> int:
        """Shards of the grid that are there."""
        return sum(self.has_place_for(shard.id.offset) for shard in self.shards)

    @property
    def file_nbytes(self) -> int:
        """Bytes of all files."""
        return sum(shard.nbytes for shard in self.shards)

    def has_place_for(self, offset: Extent) -> bool:
        """Whether a shard of that offset is in the grid."""
        return all(map(int.__lt__, offset, self.shape))

    def path_of(self, offset: Extent) -> str:
        """The file of a shard, in the form in which the others are named."""
        stated = self.shards[0].id.shape
        return _shard_path(ObjectId(self.key, offset, stated))


@dataclass(frozen=True, slots=True)
class StoredArchive:
    """A ``.pt`` file; ``key`` is None for the common state, ``path`` relative to the root."""

    key: str | None
    path: str
    nbytes: int


def stored_objects(shards: Iterable[StoredShard]) -> tuple[StoredObject, ...]:
    """The grids that the shards make up, sorted by key.

    Shards of one key that state different shapes make up a grid each. One of the older form, with
    the last number of its shape left out, ends at the largest offset that is there.
    """
    by_grid: dict[tuple[str, Extent], list[StoredShard]] = defaultdict(list)
    for shard in shards:
        by_grid[shard.id.key, shard.id.shape].append(shard)
    found = []
    for key, stated in sorted(by_grid):
        of_grid = sorted(by_grid[key, stated], key=lambda shard: shard.id)
        last = 1 + max(shard.id.offset[-1] for shard in of_grid)
        shape = (*stated[:-1], last) if stated[-1] == UNKNOWN else stated
        found.append(StoredObject(key, shape, tuple(of_grid)))
    return tuple(found)


def check_shards(stored: StoredObject) -> Iterator[Finding]:
    """Findings about the files of one grid of objects."""
    key = stored.key
    present = {shard.id.offset for shard in stored.shards if stored.has_place_for(shard.id.offset)}
    missing = (offset for offset in grid_indices(stored.shape) if offset not in present)
    num_missing = stored.num_expected - len(present)
    expected = f"one of {stored.num_expected} shards"
    for offset in islice(missing, min(num_missing, MAX_LISTED)):
        yield Finding(Problem.MISSING_OBJECT, key, stored.path_of(offset), expected, NO_FILE)
    if num_missing > MAX_LISTED:
        found = f"{len(present)}; {num_missing - MAX_LISTED} more are missing than listed here"
        yield Finding(Problem.MISSING_OBJECT, key, key, f"{stored.num_expected} shards", found)
    for shard in stored.shards:
        if shard.id.offset not in present:
            grid, found = f"shards of the grid {grid_text(stored.shape)} only", "one outside of it"
            yield Finding(Problem.UNEXPECTED_OBJECT, key, shard.path, grid, found)


def check_archives(
    root: Path, archives: Sequence[StoredArchive], watch: Watch | None = None
) -> tuple[Finding, ...]:
    """Read ``.pt`` files and compare each with its own checksums; nothing is unpickled.

    Args:
        root: the checkpoint directory.
        archives: what to read.
        watch: told about bytes, done and in all.
    """
    findings, done = [], 0
    total = sum(archive.nbytes for archive in archives)
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="dist-ckpt-check") as pool:
        results = pool.map(partial(_check_archive, root), archives)
        for archive, finding in zip(archives, results, strict=True):
            done += archive.nbytes
            if watch:
                watch(done, total)
            if finding:
                findings.append(finding)
    return tuple(findings)


def _check_archive(root: Path, archive: StoredArchive) -> Finding | None:
    try:
        with (root / archive.path).open("rb") as file:
            damage = file_damage(file)
    except OSError as error:
        return unreadable(archive.key, archive.path, reason(error))
    if damage is None:
        return None
    expected = "an archive that fits its own checksums"
    return Finding(Problem.DAMAGED_ARCHIVE, archive.key, archive.path, expected, damage)


def _shard_path(object_id: ObjectId) -> str:
    """The file of a shard; an UNKNOWN number does not stand in its name."""
    is_older = object_id.shape[-1] == UNKNOWN
    return (object_id.older_key if is_older else object_id.unique_key) + OBJECT_SUFFIX
