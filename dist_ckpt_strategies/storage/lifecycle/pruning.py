"""A directory that holds many checkpoints: what each of them is, and how one goes. No torch."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from dist_ckpt_strategies.errors import CheckpointError
from dist_ckpt_strategies.plan.prune import FoundCheckpoint, Standing
from dist_ckpt_strategies.spec.marker import CheckpointMarker
from dist_ckpt_strategies.storage.conversion.journal import JOURNAL_NAME
from dist_ckpt_strategies.storage.disk.files import (
    COMMON_NAME,
    MARKER_NAME,
    MAX_JSON_NBYTES,
    PARTIAL_PREFIX,
    REMOVED_PREFIX,
    file_errors,
    is_elsewhere,
    read_file,
    remove_empty,
    require_directory,
)
from dist_ckpt_strategies.storage.disk.folders import folders_below, read_folder
from dist_ckpt_strategies.storage.findings import lacks_files
from dist_ckpt_strategies.storage.format1.layout import METADATA_NAME
from dist_ckpt_strategies.storage.format1.survey import survey_checkpoint
from dist_ckpt_strategies.storage.format2.manifest import (
    INDEX_NAME,
    MANIFEST_NAME,
    SAVE_NAME,
    SCHEMA,
    parse_index,
)
from dist_ckpt_strategies.storage.format2.survey import survey_format2
from dist_ckpt_strategies.storage.lifecycle.clearing import retract
from dist_ckpt_strategies.storage.lifecycle.publication import has_withdrawn_marker, withdraw_marker
from dist_ckpt_strategies.storage.objects.files import OBJECT_SUFFIX
from dist_ckpt_strategies.storage.objects.stored import StoredShard

TRACKER_NAME = "latest_checkpointed_iteration.txt"
"""Where Megatron-LM notes which iteration is to be resumed."""

_NUMBER = re.compile(r"(\d+)\Z")
_ITERATION = re.compile(r"iter_\d{7,}")
_LOCKS_SUFFIX = ".sync"
_FORMAT1, _FORMAT2 = ("zarr", 1), ("zarr", 2)


def find_checkpoints(root: Path, now_s: float) -> list[FoundCheckpoint]:
    """What each directory in ``root`` is; links are passed over.

    Args:
        root: the directory that holds the checkpoints.
        now_s: the time, in seconds since the epoch.

    Raises:
        CheckpointNotFoundError: ``root`` does not exist.
        StorageError: it cannot be read.
    """
    require_directory(root)
    with file_errors(None, root), os.scandir(root) as scan:
        names = sorted(entry.name for entry in scan if entry.is_dir(follow_symlinks=False))
    tracked = _tracked(root)
    return [look_at(root, name, now_s, tracked) for name in names]


def look_at(root: Path, name: str, now_s: float, tracked: int | None = None) -> FoundCheckpoint:
    """What one directory in ``root`` is; arguments and errors as for ``find_checkpoints``."""
    iteration = iteration_of(name)
    standing = _standing(root / name)
    is_ours = standing is not Standing.OTHER
    age_s = max(0.0, now_s - _newest_s(root / name, standing)) if is_ours else 0.0
    is_named = tracked is not None and iteration == tracked
    return FoundCheckpoint(name, iteration, standing, age_s, is_named)


def iteration_of(name: str) -> int | None:
    """The number that a name ends in; None where it ends in none."""
    number = _NUMBER.search(name)
    return int(number[1]) if number else None


class Shelf(Protocol):
    """What holds many checkpoints, each under a name of its own."""

    def find(self, now_s: float) -> list[FoundCheckpoint]:
        """What each of them is, and whatever else is there."""
        ...

    def look_at(self, name: str, now_s: float) -> FoundCheckpoint:
        """What one of them is."""
        ...

    def is_whole(self, name: str) -> bool:
        """Whether a complete one lacks no file, as far as names and sizes tell."""
        ...

    def nbytes(self, name: str) -> int | None:
        """Bytes of the files of one of them; None where that cannot be told."""
        ...

    def remove(self, name: str) -> tuple[str, ...]:
        """Remove one of them, its marker first; names of what is no part of it, and stays."""
        ...


class DirectoryShelf:
    """A directory that holds checkpoints; see Shelf.

    Args:
        root: the directory.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def find(self, now_s: float) -> list[FoundCheckpoint]:
        """See Shelf."""
        return find_checkpoints(self.root, now_s)

    def look_at(self, name: str, now_s: float) -> FoundCheckpoint:
        """See Shelf."""
        return look_at(self.root, name, now_s)

    def is_whole(self, name: str) -> bool:
        """See Shelf."""
        directory = self.root / name
        survey = survey_format2(directory) or survey_checkpoint(directory)
        return not lacks_files(survey.findings)

    def nbytes(self, name: str) -> int | None:
        """See Shelf."""
        return checkpoint_nbytes(self.root / name)

    def remove(self, name: str) -> tuple[str, ...]:
        """See Shelf."""
        return remove_checkpoint(self.root / name)


def checkpoint_nbytes(directory: Path) -> int:
    """Bytes of all files in a directory."""
    return sum(folder.nbytes for folder in folders_below(directory, [""]))


def remove_checkpoint(directory: Path) -> tuple[str, ...]:
    """Remove a checkpoint, or what a killed save left: the marker first, durably, then the rest.

    Files that are no part of it stay, and the directory with them.

    Returns:
        The names of what stays.

    Raises:
        StorageError: something cannot be removed; what is left counts as unfinished.
    """
    with file_errors(None, directory):
        withdraw_marker(directory)
        (directory / COMMON_NAME).unlink(missing_ok=True)
    retract(directory, is_checkpoint=False)
    with file_errors(None, directory):
        _remove_empty_folders(directory)
        remove_empty(directory, directory.parent)
        return tuple(sorted(os.listdir(directory))) if directory.exists() else ()  # noqa: PTH208


def _remove_empty_folders(directory: Path) -> None:
    """Remove the empty directories below one; links and other checkpoints are not looked into."""
    with os.scandir(directory) as scan:
        inner = [Path(entry.path) for entry in scan if entry.is_dir(follow_symlinks=False)]
    for path in inner:
        if not is_elsewhere(path):
            _remove_empty_folders(path)
            if not any(path.iterdir()):
                path.rmdir()


def _standing(directory: Path) -> Standing:
    if (directory / MARKER_NAME).exists():
        return Standing.COMPLETE if _is_complete(directory) else Standing.OTHER
    if (directory / JOURNAL_NAME).exists():
        return Standing.OTHER  # a conversion, which may be resumed at any time
    is_ours = _began_format2(directory) or _is_left_of_format1(directory)
    return Standing.UNFINISHED if is_ours else Standing.OTHER


def _is_complete(directory: Path) -> bool:
    """Whether the marker names a format of ours, and what belongs to that is there."""
    try:
        marker = CheckpointMarker.from_json(read_file(directory / MARKER_NAME, MAX_JSON_NBYTES))
        found = marker.sharded_backend, marker.sharded_backend_version
        if found == _FORMAT2:
            path = directory / INDEX_NAME
            parse_index(read_file(path), str(path))
            return True
        return found == _FORMAT1 and not (directory / MANIFEST_NAME).exists()
    except (OSError, ValueError, TypeError, CheckpointError):
        return False


def _began_format2(directory: Path) -> bool:
    try:
        fields = json.loads(read_file(directory / SAVE_NAME, MAX_JSON_NBYTES))
        return bool(fields["schema"] == SCHEMA)
    except (OSError, ValueError, LookupError, TypeError):
        return False


def _is_left_of_format1(directory: Path) -> bool:
    """Whether a directory holds nothing but what a killed save leaves, or a killed removal.

    It has to be named as Megatron-LM names them, or to hold a file that only this package makes.
    """
    top = read_folder(directory.parent, directory.name)
    if top.failure or top.links or top.others:
        return False
    has_remains = has_withdrawn_marker(directory) or any(map(_is_remains, top.files))
    if not has_remains and not _ITERATION.fullmatch(directory.name):
        return False
    if any(name != COMMON_NAME and not _is_remains(name) for name in top.files):
        return False
    return all(_is_of_format1(directory, name) for name in top.folders)


def _is_of_format1(directory: Path, name: str) -> bool:
    """Whether everything below is an array's, an object's, or on its way out."""
    if _is_remains(name) or name.endswith(_LOCKS_SUFFIX):
        return True
    for folder in folders_below(directory, [name]):
        if folder.links or folder.others or folder.failure:
            return False
        if any(map(_is_remains, folder.key.split("/"))):
            continue
        is_array = METADATA_NAME in folder.files
        for file in folder.files:
            is_object = file.endswith(OBJECT_SUFFIX) and StoredShard.parse(folder.path_of(file), 0)
            if not (is_array or is_object or _is_remains(file)):
                return False
    return True


def _is_remains(name: str) -> bool:
    return name.startswith((PARTIAL_PREFIX, REMOVED_PREFIX))


def _newest_s(directory: Path, standing: Standing) -> float:
    """When something in it changed last; of a complete one when it became that."""
    if standing is Standing.COMPLETE:
        with suppress(OSError):
            return (directory / MARKER_NAME).stat().st_mtime
    return max(_times(directory))


def _times(directory: Path) -> Iterator[float]:
    yield 0.0
    for at, _, names in os.walk(directory):
        for path in (at, *(f"{at}/{name}" for name in names)):
            with suppress(OSError):  # it has gone meanwhile
                yield os.lstat(path).st_mtime


def _tracked(root: Path) -> int | None:
    try:
        return int(read_file(root / TRACKER_NAME, MAX_JSON_NBYTES))
    except (OSError, ValueError):
        return None
