"""What a checkpoint directory holds, and what is wrong with it, without loading anything.

One pass over the directories reads names, sizes and the small metadata files; torch is not
imported. Reading the objects as well, to verify their own checksums, is a second step.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path

from dist_ckpt_strategies.errors import (
    CheckpointError,
    CheckpointNotFoundError,
)
from dist_ckpt_strategies.spec.array import ArraySpec
from dist_ckpt_strategies.spec.marker import CheckpointMarker
from dist_ckpt_strategies.spec.object import UNKNOWN, ObjectId
from dist_ckpt_strategies.spec.region import Extent
from dist_ckpt_strategies.storage.files import PARTIAL_PREFIX, REMOVED_PREFIX
from dist_ckpt_strategies.storage.findings import (
    NO_FILE,
    Finding,
    Problem,
    check_chunks,
    check_shards,
    chunk_index,
    shard_path,
)
from dist_ckpt_strategies.storage.folders import Folder, folders_below, read_folder, reason
from dist_ckpt_strategies.storage.object_files import COMMON_NAME, OBJECT_SUFFIX, file_damage
from dist_ckpt_strategies.storage.publication import MARKER_NAME
from dist_ckpt_strategies.storage.zarr2 import METADATA_NAME, parse_metadata

_SHARDED_BACKENDS = frozenset({("zarr", 1)})
_COMMON_BACKENDS = frozenset({("torch", 1)})

_MAX_JSON_NBYTES = 1 << 20
"""Metadata has a few hundred bytes; of a file beyond this no more is read."""

_ARCHIVE_THREADS = 8
_CHUNK_NAME = re.compile(r"\d+(?:[./]\d+)*", re.ASCII)
_CHUNK_FOLDERS = re.compile(r"(?:/\d+)+", re.ASCII)
_LOCKS_SUFFIX = ".sync"
_TEMPORARY_SUFFIXES = (".__lock", ".partial")
"""Files that TensorStore and zarr-python rename once they are whole."""

Watch = Callable[[int, int], None]
"""Told how much of a step is done and how much there is; the second may still grow."""


class LeftoverKind(StrEnum):
    """Why something is in a checkpoint without being part of it; the values are in the JSON."""

    LOCKS = "locks"
    PARTIAL = "partial"
    REMOVED = "removed"


@dataclass(frozen=True, slots=True)
class StoredArray:
    """An array whose metadata could be read.

    Attributes:
        array: its metadata.
        num_chunks: chunk files of its grid that are there.
        file_nbytes: their bytes.
    """

    array: ArraySpec
    num_chunks: int
    file_nbytes: int


@dataclass(frozen=True, slots=True)
class StoredObject:
    """A grid of objects, as the names of its files state it.

    Attributes:
        key: the object's.
        shape: of the grid, in shards.
        num_shards: shards of the grid that are there.
        file_nbytes: their bytes.
    """

    key: str
    shape: Extent
    num_shards: int
    file_nbytes: int


@dataclass(frozen=True, slots=True)
class StoredArchive:
    """A ``.pt`` file; ``key`` is None for the common state, ``path`` relative to the root."""

    key: str | None
    path: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Leftover:
    """A file or directory of no use: locks of the old backend, remains of a save cut short."""

    kind: LeftoverKind
    path: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Survey:
    """What a checkpoint directory holds.

    Attributes:
        root: the directory, absolute.
        marker: None where it is missing or cannot be read.
        common_nbytes: size of ``common.pt``; None where it is missing.
        arrays: sorted by key.
        objects: sorted by key.
        archives: every file that check_archives reads.
        leftovers: harmless, and only mentioned.
        findings: what names, sizes and metadata show to be wrong.
        num_files: all files below the directory.
        nbytes: their bytes.
    """

    root: Path
    marker: CheckpointMarker | None
    common_nbytes: int | None
    arrays: tuple[StoredArray, ...]
    objects: tuple[StoredObject, ...]
    archives: tuple[StoredArchive, ...]
    leftovers: tuple[Leftover, ...]
    findings: tuple[Finding, ...]
    num_files: int
    nbytes: int

    @property
    def is_foreign(self) -> bool:
        """Whether another backend wrote the arrays, so that they were not looked for."""
        return self.marker is not None and _is_foreign(self.marker)


def survey_checkpoint(root: Path, watch: Watch | None = None) -> Survey:
    """Look at every file of a checkpoint, without reading arrays or objects.

    A checkpoint of another sharded backend is counted, and not looked into.

    Args:
        root: the checkpoint directory.
        watch: told about directories, done and known so far.

    Raises:
        CheckpointNotFoundError: the directory does not exist, or is no checkpoint itself but
            holds some.
    """
    root = root.absolute()
    if not root.is_dir():
        raise CheckpointNotFoundError(f"{root} does not exist or is no directory", path=str(root))
    marker = _read_marker(root)
    if isinstance(marker, Finding):
        _require_no_checkpoints_in(root)
    scan = _Scan(root)
    foreign = isinstance(marker, CheckpointMarker) and _is_foreign(marker)
    waiting, done = [""], 0
    while waiting:
        folder = read_folder(root, waiting.pop())
        followed = scan.count(folder) if foreign else scan.take(folder)
        waiting.extend(map(folder.path_of, followed))
        done += 1
        if watch:
            watch(done, done + len(waiting))
    return scan.survey(marker, foreign=foreign)


def check_checkpoint(root: Path, watch: Watch | None = None) -> tuple[Finding, ...]:
    """Everything that can be told to be wrong with a checkpoint; empty where it is whole.

    Every chunk file is there and of the right size, every grid of objects is complete, every
    ``.pt`` file fits its own checksums, the marker is there and known. The elements of arrays
    are not read: format 1 keeps no checksum of them, nor a list of the arrays.

    Raises:
        CheckpointNotFoundError: there is no such directory.
    """
    survey = survey_checkpoint(root, watch)
    return (*survey.findings, *check_archives(survey, watch))


def check_archives(survey: Survey, watch: Watch | None = None) -> tuple[Finding, ...]:
    """Read every ``.pt`` file of a checkpoint and compare it with its own checksums.

    Args:
        survey: of the checkpoint.
        watch: told about bytes, done and in all.
    """
    findings, done = [], 0
    total = sum(archive.nbytes for archive in survey.archives)
    with ThreadPoolExecutor(_ARCHIVE_THREADS, thread_name_prefix="dist-ckpt-check") as pool:
        results = pool.map(partial(_check_archive, survey.root), survey.archives)
        for archive, finding in zip(survey.archives, results, strict=True):
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
        return _unreadable(archive.key, archive.path, reason(error))
    if damage is None:
        return None
    expected = "an archive that fits its own checksums"
    return Finding(Problem.DAMAGED_ARCHIVE, archive.key, archive.path, expected, damage)


def _is_foreign(marker: CheckpointMarker) -> bool:
    return (marker.sharded_backend, marker.sharded_backend_version) not in _SHARDED_BACKENDS


def _read_marker(root: Path) -> CheckpointMarker | Finding:
    try:
        with (root / MARKER_NAME).open("rb") as file:
            return CheckpointMarker.from_json(file.read(_MAX_JSON_NBYTES))
    except FileNotFoundError:
        expected = "the last file that a save writes"
        return Finding(Problem.MISSING_MARKER, None, MARKER_NAME, expected, NO_FILE)
    except OSError as error:
        return _unreadable(None, MARKER_NAME, reason(error))
    except (ValueError, TypeError) as error:
        expected = "the four fields of a marker"
        return Finding(Problem.BAD_MARKER, None, MARKER_NAME, expected, f"something else: {error}")


def _require_no_checkpoints_in(root: Path) -> None:
    """Refuse a directory of checkpoints: their arrays would be taken for those of one."""
    names = read_folder(root, "").folders
    inner = [name for name in names if os.path.exists(os.path.join(root, name, MARKER_NAME))]  # noqa: PTH110, PTH118
    if inner:
        shown = ", ".join(inner[:3]) + (", ..." if len(inner) > len(inner[:3]) else "")
        raise CheckpointNotFoundError(
            f"{root} is no checkpoint, but holds {len(inner)} ({shown}); name one of them",
            path=str(root),
        )


def _unreadable(key: str | None, path: str, why: str) -> Finding:
    return Finding(Problem.UNREADABLE, key, path, "something that can be read", why)


class _Scan:
    """Takes in the directories of a checkpoint one after the other."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._top = Folder("", {}, ())
        self._arrays: dict[str, StoredArray] = {}
        self._shards: dict[str, list[_Shard]] = {}
        self._orphans: Counter[str] = Counter()
        self._leftovers: list[Leftover] = []
        self._findings: list[Finding] = []
        self._num_files = 0
        self._nbytes = 0

    def count(self, folder: Folder) -> Collection[str]:
        """Count the files of a directory; returns the directories in it that are to follow."""
        self._num_files += len(folder.files)
        self._nbytes += folder.nbytes
        if folder.failure:
            self._findings.append(_unreadable(None, folder.key or ".", folder.failure))
        return folder.folders

    def take(self, folder: Folder) -> Collection[str]:
        """Take in what a directory of a ("zarr", 1) checkpoint holds; returns which to follow."""
        self.count(folder)
        if _holds_locks(folder):
            self._leftovers.append(Leftover(LeftoverKind.LOCKS, folder.key, folder.nbytes))
            return ()
        followed = self._without_leftovers(folder)
        if not folder.key:
            self._top = folder
            return followed
        self._take_shards(folder)
        if METADATA_NAME in folder.files:
            return self._take_array(folder, followed)
        self._orphans[_CHUNK_FOLDERS.sub("", folder.key)] += sum(map(_is_chunk, folder.files))
        return followed

    def survey(self, marker: CheckpointMarker | Finding, *, foreign: bool) -> Survey:
        """All that was taken in."""
        ...
