"""What one directory of a ("zarr", 1) checkpoint holds: an array, objects, remains of a save."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

from dist_ckpt_strategies.errors import CheckpointError
from dist_ckpt_strategies.spec.array import ArraySpec
from dist_ckpt_strategies.storage.disk.files import (
    MARKER_NAME,
    MAX_JSON_NBYTES,
    PARTIAL_PREFIX,
    REMOVED_PREFIX,
    read_file,
)
from dist_ckpt_strategies.storage.disk.folders import Folder, folders_below, reason
from dist_ckpt_strategies.storage.findings import (
    Finding,
    Leftover,
    LeftoverKind,
    Problem,
    unreadable,
)
from dist_ckpt_strategies.storage.format1.layout import METADATA_NAME, parse_metadata
from dist_ckpt_strategies.storage.format1.stored_arrays import (
    StoredArray,
    check_chunks,
    chunk_index,
)
from dist_ckpt_strategies.storage.objects.stored import StoredShard

_CHUNK_NAME = re.compile(r"\d+(?:[./]\d+)*", re.ASCII)
_LOCKS_SUFFIX = ".sync"
_TEMPORARY_SUFFIXES = (".__lock", ".partial")
"""Files that TensorStore and zarr-python rename once they are whole."""


@dataclass(frozen=True, slots=True)
class FolderContents:
    """What one directory adds to the survey of a checkpoint.

    Attributes:
        key: the directory's path relative to the checkpoint.
        folders: keys of the directories to look at next.
        links: keys of links to directories; the directory is to be looked at, but none below it.
        num_files: files in it, and in directories of it that are not looked at next.
        nbytes: their bytes.
        arrays: one, or none.
        shards: of the object with the directory's key.
        num_orphans: files that look like chunks, where there is no array metadata.
        leftovers: harmless remains.
        findings: what is wrong with the array, or why the directory cannot be read.
    """

    key: str
    folders: tuple[str, ...] = ()
    links: tuple[str, ...] = ()
    num_files: int = 0
    nbytes: int = 0
    arrays: tuple[StoredArray, ...] = ()
    shards: tuple[StoredShard, ...] = ()
    num_orphans: int = 0
    leftovers: tuple[Leftover, ...] = ()
    findings: tuple[Finding, ...] = ()


def count_contents(folder: Folder) -> FolderContents:
    """The contents of a directory that is not looked into, but for the sizes of its files."""
    return FolderContents(
        folder.key,
        tuple(map(folder.path_of, folder.folders)),
        tuple(map(folder.path_of, folder.links)),
        len(folder.files),
        folder.nbytes,
        findings=(unreadable(None, folder.key or ".", folder.failure),) if folder.failure else (),
    )


def read_contents(root: Path, folder: Folder) -> FolderContents:
    """The contents of a directory of a checkpoint; none where it is a checkpoint of its own.

    Args:
        root: the checkpoint directory.
        folder: it, or a directory below it.
    """
    if not folder.key:
        return replace(count_contents(folder), leftovers=_partial_files(folder))
    if MARKER_NAME in folder.files:
        return FolderContents(folder.key)
    useless = _useless(folder)
    if useless:
        leftovers = (Leftover(useless, folder.key, folder.nbytes),)
        return replace(count_contents(folder), leftovers=leftovers)
    array = _read_metadata(root, folder) if METADATA_NAME in folder.files else None
    if isinstance(array, ArraySpec) and array.separator == "/":
        folder = _with_chunk_folders(root, folder)
    named = {name: size for name, size in folder.files.items() if _CHUNK_NAME.fullmatch(name)}
    arrays, findings = _check(array, named)
    counted = count_contents(folder)
    return FolderContents(
        counted.key,
        counted.folders,
        counted.links,
        counted.num_files,
        counted.nbytes,
        arrays,
        _shards(folder),
        0 if array else len(named),
        _partial_files(folder),
        counted.findings + findings + _check_shard_names(folder),
    )


def _check(
    array: ArraySpec | Finding | None, named: dict[str, int]
) -> tuple[tuple[StoredArray, ...], tuple[Finding, ...]]:
    """The array that the metadata describes, and what is wrong with its chunks or with itself."""
    if array is None:
        return (), ()
    if isinstance(array, Finding):
        return (), (array,)
    chunks = {name: size for name, size in named.items() if chunk_index(array, name) is not None}
    stored = StoredArray(array, len(chunks), sum(chunks.values()))
    return (stored,), tuple(check_chunks(array, chunks, named.keys() - chunks.keys()))


def _useless(folder: Folder) -> LeftoverKind | None:
    """Why nothing in the directory counts, if so.

    Megatron-Core <= 0.15 kept locks of the array ``w`` in ``w.sync``, one empty file each.
    """
    parts = folder.key.split("/")
    if any(part.startswith(REMOVED_PREFIX) for part in parts):
        return LeftoverKind.REMOVED
    if parts[-1].endswith(_LOCKS_SUFFIX) and folder.files and not folder.nbytes:
        return LeftoverKind.LOCKS
    return None


def _partial_files(folder: Folder) -> tuple[Leftover, ...]:
    return tuple(
        Leftover(LeftoverKind.PARTIAL, folder.path_of(name), nbytes)
        for name, nbytes in folder.files.items()
        if name.startswith(PARTIAL_PREFIX) or name.endswith(_TEMPORARY_SUFFIXES)
    )


def _shards(folder: Folder) -> tuple[StoredShard, ...]:
    parsed = (StoredShard.parse(folder.path_of(name), size) for name, size in folder.files.items())
    return tuple(shard for shard in parsed if shard is not None)


def _check_shard_names(folder: Folder) -> tuple[Finding, ...]:
    """Findings about what has the name of an object's file, and is none."""
    names = (*folder.folders, *folder.links, *folder.others)
    paths = (folder.path_of(name) for name in names)
    found = "a directory, or something else that is no file"
    return tuple(
        unreadable(folder.key, path, found) for path in paths if StoredShard.parse(path, 0)
    )


def _read_metadata(root: Path, folder: Folder) -> ArraySpec | Finding:
    path = folder.path_of(METADATA_NAME)
    try:
        content = read_file(f"{root}/{path}", MAX_JSON_NBYTES)
        return parse_metadata(folder.key, path, content)
    except OSError as error:
        return unreadable(folder.key, path, reason(error))
    except CheckpointError as error:
        expected = "the metadata of a Zarr v2 array"
        return Finding(Problem.BAD_METADATA, folder.key, path, expected, _why(error))


def _why(error: CheckpointError) -> str:
    """The cause alone: key and file stand in the finding."""
    cause = error.__cause__
    if isinstance(cause, KeyError):
        return f"no field {cause}"
    return str(cause) if cause else error.message.removeprefix(f"{error.key}: ")


def _with_chunk_folders(root: Path, folder: Folder) -> Folder:
    """The directory of an array whose chunks lie in numbered directories, with those files."""
    numbered = [name for name in folder.folders if name.isdecimal()]
    files = dict(folder.files)
    for inner in folders_below(root, map(folder.path_of, numbered)):
        prefix = inner.key.removeprefix(f"{folder.key}/")
        files.update({f"{prefix}/{name}": nbytes for name, nbytes in inner.files.items()})
    others = tuple(name for name in folder.folders if name not in numbered)
    return replace(folder, files=files, folders=others)
