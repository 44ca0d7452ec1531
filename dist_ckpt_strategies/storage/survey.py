"""What a checkpoint directory holds, and what is wrong with it, without loading anything.

One pass over the directories reads names, sizes and the small metadata files; torch is not
imported. Reading the objects as well, which verifies their own checksums, is a second step.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from pathlib import Path

from dist_ckpt_strategies.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
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
from dist_ckpt_strategies.storage.object_files import COMMON_NAME, OBJECT_SUFFIX, file_damage
from dist_ckpt_strategies.storage.publication import MARKER_NAME
from dist_ckpt_strategies.storage.zarr2 import METADATA_NAME, parse_metadata

_SHARDED_BACKENDS = frozenset({("zarr", 1)})
_COMMON_BACKENDS = frozenset({("torch", 1)})
_MAX_JSON_NBYTES = 1 << 20
"""A metadata file is a few hundred bytes; one beyond this is not read at all."""

_ARCHIVE_THREADS = 8
_CHUNK_NAME = re.compile(r"\d+(?:[./]\d+)*", re.ASCII)
_TEMPORARY_NAME = re.compile(r".*(\.__lock|\.partial)", re.DOTALL)
"""Files that TensorStore and zarr-python rename when they are whole."""

Watch = Callable[[int, int], None]
"""Told how much of a step is done and how much there is; the second may still grow."""


class LeftoverKind(StrEnum):
    """Why something is in a checkpoint without being part of it; values are in the JSON."""

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
        num_shards: shards that are there.
        file_nbytes: their bytes.
    """

    key: str
    shape: Extent
    num_shards: int
    file_nbytes: int


@dataclass(frozen=True, slots=True)
class StoredArchive:
    """A ``.pt`` file; ``key`` is None for the common state."""

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
        arrays: by key.
        objects: by key.
        archives: every file that ``check_archives`` reads.
        leftovers: harmless, and reported only.
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
    def is_known(self) -> bool:
        """Whether the arrays were looked for: not in a checkpoint of another backend."""
        return self.marker is None or _is_known(self.marker)


def survey_checkpoint(root: Path, watch: Watch | None = None) -> Survey:
    """Look at every file of a checkpoint, without reading arrays or objects.

    A checkpoint of another sharded backend is counted, and not looked into.

    Args:
        root: the checkpoint directory.
        watch: told about directories, done and known so far.

    Raises:
        CheckpointNotFoundError: the directory does not exist, or only directories in it are
            checkpoints.
    """
    root = root.absolute()
    if not root.is_dir():
        raise CheckpointNotFoundError(f"{root} does not exist or is no directory", path=str(root))
    marker = _read_marker(root)
    if not isinstance(marker, CheckpointMarker) and marker.problem is Problem.MISSING_MARKER:
        _require_no_checkpoints_in(root)
    scan = _Scan()
    looks_inside = not isinstance(marker, CheckpointMarker) or _is_known(marker)
    _walk(root, scan.take if looks_inside else scan.count, scan.note_unreadable, watch)
    return _survey(root, marker, scan)


def check_checkpoint(root: Path, watch: Watch | None = None) -> tuple[Finding, ...]:
    """Everything that can be told to be wrong with a checkpoint; empty where it is whole.

    Every chunk file is there and of the right size, every grid of objects is complete, every
    ``.pt`` file fits its own checksums, the marker is there and known. The elements of arrays
    are not read: format 1 keeps no checksum of them.

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
        return _unreadable(archive.key, archive.path, error)
    if damage is None:
        return None
    expected = "an archive that fits its own checksums"
    return Finding(Problem.DAMAGED_ARCHIVE, archive.key, archive.path, expected, damage)


def _is_known(marker: CheckpointMarker) -> bool:
    return (marker.sharded_backend, marker.sharded_backend_version) in _SHARDED_BACKENDS


def _read_marker(root: Path) -> CheckpointMarker | Finding:
    bad = partial(Finding, Problem.BAD_MARKER, None, MARKER_NAME, "the four fields of a marker")
    try:
        with (root / MARKER_NAME).open("rb") as file:
            return CheckpointMarker.from_json(file.read(_MAX_JSON_NBYTES))
    except FileNotFoundError:
        expected = "the last file that a save writes"
        return Finding(Problem.MISSING_MARKER, None, MARKER_NAME, expected, NO_FILE)
    except OSError as error:
        return _unreadable(None, MARKER_NAME, error)
    except (ValueError, TypeError) as error:
        return bad(f"something else: {error}")


def _require_no_checkpoints_in(root: Path) -> None:
    """Refuse a directory of checkpoints: its arrays would be those of all of them."""
    with os.scandir(root) as entries:
        names = sorted(e.name for e in entries if os.path.exists(os.path.join(e, MARKER_NAME)))  # noqa: PTH110, PTH118
    if names:
        shown = ", ".join(names[:3]) + (", ..." if len(names) > len(names[:3]) else "")
        raise CheckpointNotFoundError(
            f"{root} is no checkpoint, but holds {len(names)} of them ({shown}); name one",
            path=str(root),
        )


def _unreadable(key: str | None, path: str, error: OSError) -> Finding:
    found = error.strerror or type(error).__name__
    return Finding(Problem.UNREADABLE, key, path, "something that can be read", found)


@dataclass(frozen=True, slots=True)
class _Folder:
    """One directory: its path relative to the checkpoint is the key of what is in it."""

    path: str
    key: str
    files: dict[str, int]
    folders: tuple[str, ...]

    def nbytes(self) -> int:
        return sum(self.files.values())


def _read_folder(root: Path, key: str) -> _Folder:
    """Names and sizes in one directory. Links to a directory above are passed over."""
    path = os.path.join(root, key) if key else str(root)  # noqa: PTH118 - 10,000 times
    files, folders = {}, []
    with os.scandir(path) as entries:
        for entry in entries:
            if entry.is_dir():
                if not (entry.is_symlink() and _leads_up(entry)):
                    folders.append(entry.name)
            elif entry.is_file():
                files[entry.name] = entry.stat().st_size
    return _Folder(path, key, files, tuple(sorted(folders)))


def _leads_up(link: os.DirEntry[str]) -> bool:
    return Path(link.path).parent.resolve().is_relative_to(Path(link.path).resolve())


def _walk(
    root: Path,
    visit: Callable[[_Folder], Iterable[str]],
    fail: Callable[[str, OSError], None],
    watch: Watch | None,
) -> None:
    """Visit every directory; ``visit`` names the directories in it that are to follow."""
    waiting, done = [""], 0
    while waiting:
        key = waiting.pop()
        try:
            folder = _read_folder(root, key)
        except FileNotFoundError:
            continue
        except OSError as error:
            fail(key, error)
            continue
        waiting.extend(f"{key}/{name}" if key else name for name in visit(folder))
        done += 1
        if watch:
            watch(done, done + len(waiting))
