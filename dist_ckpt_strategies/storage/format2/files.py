"""Which files of a format ("zarr", 2) checkpoint are there, before the manifest is read. No torch.

An object store tells names, and no sizes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from dist_ckpt_strategies.errors import (
    BucketNotFoundError,
    StorageError,
    StoreAccessError,
    StoreUnreachableError,
)
from dist_ckpt_strategies.spec.marker import CheckpointMarker
from dist_ckpt_strategies.storage.disk.files import (
    COMMON_NAME,
    MARKER_NAME,
    MAX_JSON_NBYTES,
    PARTIAL_PREFIX,
    REMOVED_PREFIX,
    file_errors,
    require_directory,
)
from dist_ckpt_strategies.storage.disk.folders import Folder, folders_below, read_folder
from dist_ckpt_strategies.storage.file_store import Directory, FileStore
from dist_ckpt_strategies.storage.findings import Finding
from dist_ckpt_strategies.storage.format2.layout import ARRAYS_NAME
from dist_ckpt_strategies.storage.format2.manifest import (
    INDEX_NAME,
    MANIFEST_NAME,
    OBJECTS_NAME,
    SAVE_NAME,
    SCHEMA,
)
from dist_ckpt_strategies.storage.lifecycle.marker_file import marker_or_finding

FORMAT2 = ("zarr", 2)
"""What the marker says of such a checkpoint."""

FOLDER_NAMES = (ARRAYS_NAME, OBJECTS_NAME, MANIFEST_NAME)
"""Directories, or what stands for them, that hold all files but two."""

TOP_NAMES = (MARKER_NAME, COMMON_NAME)


@dataclass(frozen=True, slots=True)
class SaveBegun:
    """When and where a save began, as the first file of it says.

    Attributes:
        seconds: since the epoch.
        host: name of the machine of the first rank.
    """

    seconds: float
    host: str


@dataclass(frozen=True, slots=True)
class FoundFiles:
    """What is there.

    Attributes:
        file_store: gives their content.
        marker: of the checkpoint, or what is wrong with it.
        files: size of each of its files, by name; None where that is not known yet.
        others: names beside them, which are no part of it.
    """

    file_store: FileStore
    marker: CheckpointMarker | Finding
    files: Mapping[str, int | None]
    others: tuple[str, ...]


def sharded_format(marker: CheckpointMarker) -> tuple[str, int]:
    """Backend and version of the sharded part."""
    return marker.sharded_backend, marker.sharded_backend_version


def is_remains(name: str) -> bool:
    """Whether a file was being written, or removed, when a process was killed."""
    return any(part.startswith((PARTIAL_PREFIX, REMOVED_PREFIX)) for part in name.split("/"))


def files_of_directory(root: Path) -> FoundFiles | None:
    """What a directory holds; None where it is no checkpoint of format 2.

    Raises:
        CheckpointNotFoundError: it does not exist.
        StorageError: it cannot be looked into.
    """
    require_directory(root)
    marker = marker_or_finding(root)
    with file_errors(None, root / MANIFEST_NAME):  # which may not be looked into
        is_known = any((root / name).is_file() for name in (SAVE_NAME, INDEX_NAME))
    if not is_known and (isinstance(marker, Finding) or sharded_format(marker) != FORMAT2):
        return None
    top = read_folder(root, "")
    return FoundFiles(Directory(root), marker, dict(_files(root, top)), _others(top))


def read_begun(file_store: FileStore) -> SaveBegun | None:
    """When and where the save to a place began; None where nothing of ours says so."""
    try:
        fields = json.loads(file_store.read(SAVE_NAME)[:MAX_JSON_NBYTES])
        if fields["schema"] != SCHEMA:
            return None
        return SaveBegun(float(fields["time"]), str(fields["host"]))
    except (StoreAccessError, StoreUnreachableError, BucketNotFoundError):
        raise  # that says nothing about this file
    except (StorageError, ValueError, LookupError, TypeError):
        return None


def _files(root: Path, top: Folder) -> Iterator[tuple[str, int]]:
    """The checkpoint's own files, and what lies among them."""
    yield from (one for one in top.files.items() if one[0] in TOP_NAMES or is_remains(one[0]))
    below = [name for name in FOLDER_NAMES if name in top.folders]
    for folder in folders_below(root, below):
        yield from ((folder.path_of(name), nbytes) for name, nbytes in folder.files.items())


def _others(top: Folder) -> tuple[str, ...]:
    mine = {*TOP_NAMES, *FOLDER_NAMES}
    names = (*top.files, *top.folders, *top.links, *top.others)
    return tuple(sorted(name for name in names if name not in mine and not is_remains(name)))
