"""Scan a checkpoint of format ("zarr", 1) without loading it, and give the checks of its files.

All directories are listed; the metadata of arrays and the names of objects say which files there
should be. No torch.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from dist_ckpt_strategies.comm.shared_work import Watch
from dist_ckpt_strategies.core.array import UNKNOWN, ArraySpec, ObjectId, Shape
from dist_ckpt_strategies.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    StorageError,
)
from dist_ckpt_strategies.formats.issues import (
    COMMON_FORMAT,
    MAX_LISTED,
    NO_FILE,
    FileCheck,
    Issue,
    Problem,
    Scan,
    ScannedArray,
    ScannedObject,
    StaleFile,
    StaleKind,
    checked_marker,
    compared,
    missing_common,
    sorted_by_key,
    unreadable,
)
from dist_ckpt_strategies.formats.locations import (
    other_contents,
)
from dist_ckpt_strategies.formats.objects import OBJECT_SUFFIX, file_damage, shard_id
from dist_ckpt_strategies.formats.zarr2 import LOCKS_SUFFIX, METADATA_NAME, parse_metadata
from dist_ckpt_strategies.storage.files import (
    COMMON_NAME,
    MARKER_NAME,
    MAX_JSON_NBYTES,
    PARTIAL_PREFIX,
    REMOVED_PREFIX,
    Directory,
    nbytes_text,
    read_file,
    reason,
)
from dist_ckpt_strategies.storage.folders import Folder, read_folder

if TYPE_CHECKING:  # torch takes a while to import
    pass

_FORMAT1 = ("zarr", 1)

_NUM_THREADS = 8
"""That read objects of format 1: many small files, on a file system that may be far away."""

_READ_NBYTES = 2 << 20
"""So much stays in the processor's cache."""

_CHUNK_NAME = re.compile(r"\d+(?:\.\d+)*", re.ASCII)
_CHUNK_FOLDERS = re.compile(r"(?:/\d+)+\Z", re.ASCII)
_SUFFIX = f"/{METADATA_NAME}"

_TEMPORARY_SUFFIXES = (".__lock", ".partial")
"""Files that TensorStore and zarr-python rename once they are whole."""


def scan_zarr(root: Path, watch: Watch | None) -> Scan:
    """What a directory holds, and what is wrong with it; see ``scan.scan``."""
    top, (marker, issues) = read_folder(root, ""), checked_marker(Directory(root), _FORMAT1)
    if top.failure:
        raise StorageError(f"{root} cannot be listed: {top.failure}", path=str(root))
    is_foreign = marker is not None and marker.sharded_format != _FORMAT1
    folders = list(_folders(root, watch))
    issues += (unreadable(None, f.key or ".", f.failure) for f in folders if f.failure)
    files: dict[str, int] = {}
    stale: list[StaleFile] = []
    for folder in () if is_foreign else folders:
        _look_into(folder, files, stale, issues)
    checks: list[FileCheck] = []
    common_nbytes = top.files.get(COMMON_NAME)
    if common_nbytes is not None:
        checks.append(_archive(root, None, COMMON_NAME, common_nbytes))
    elif marker is None or marker.common_format == COMMON_FORMAT:
        issues.append(missing_common())
    arrays = tuple(_compared_arrays(root, files, checks, issues))
    objects = tuple(_compared_objects(root, files, checks, issues))
    if marker is None and common_nbytes is None and not arrays and not objects:
        is_damaged = stale or MARKER_NAME in top.files or issues[2:]  # beyond both that are missing
        if what := other_contents(root) or ("" if is_damaged else "it has no file of one"):
            raise CheckpointNotFoundError(f"{root} is no checkpoint: {what}", path=str(root))
    issues += () if is_foreign else _emptied(folders, files)
    return Scan(
        root=root,
        backend=None if is_foreign else _FORMAT1,
        marker=marker,
        common_nbytes=common_nbytes,
        arrays=arrays,
        objects=objects,
        stale_files=tuple(sorted(stale, key=lambda one: one.path)),
        issues=sorted_by_key(issues),
        num_files=sum(len(folder.files) for folder in folders),
        nbytes=sum(folder.nbytes for folder in folders),
        checks=lambda: iter(checks),
        num_threads=_NUM_THREADS,
    )


def _folders(root: Path, watch: Watch | None) -> Iterator[Folder]:
    """The directories of a checkpoint, but for checkpoints of their own below it."""
    waiting, num_done = [""], 0
    while waiting:
        folder = read_folder(root, waiting.pop())
        if not _is_other_checkpoint(folder):
            yield folder
            links = (read_folder(root, folder.path_of(link)) for link in folder.links)
            yield from (link for link in links if not _is_other_checkpoint(link))  # no circles
            waiting += map(folder.path_of, folder.folders)
        num_done += 1
        if watch:
            watch(num_done, num_done + len(waiting))


def _is_other_checkpoint(folder: Folder) -> bool:
    return bool(folder.key) and MARKER_NAME in folder.files and _stale_kind(folder) is None


def _stale_kind(folder: Folder) -> StaleKind | None:
    """Why nothing in the directory counts, if so."""
    parts = folder.key.split("/")
    if any(part.startswith(REMOVED_PREFIX) for part in parts):
        return StaleKind.REMOVED
    if parts[0].startswith(PARTIAL_PREFIX):
        return StaleKind.PARTIAL
    if parts[-1].endswith(LOCKS_SUFFIX) and folder.files and not folder.nbytes:
        return StaleKind.LOCKS
    return None


def _look_into(
    folder: Folder, files: dict[str, int], stale: list[StaleFile], issues: list[Issue]
) -> None:
    """Add the files of a directory, those that killed processes left, and what is no file."""
    if kind := _stale_kind(folder):
        stale.append(StaleFile(kind, folder.key, folder.nbytes))
        return
    for name, size in folder.files.items():
        path = folder.path_of(name)
        if name.startswith(PARTIAL_PREFIX) or name.endswith(_TEMPORARY_SUFFIXES):
            stale.append(StaleFile(StaleKind.PARTIAL, path, size))
        else:
            files[path] = size
    issues += (
        unreadable(folder.key, path, "a directory, or something else that is no file")
        for path in map(folder.path_of, (*folder.folders, *folder.links, *folder.others))
        if shard_id(path) or path.endswith(_SUFFIX)
    )


def _emptied(folders: Iterable[Folder], files: Mapping[str, int]) -> Iterator[Issue]:
    """An issue for each empty directory: no save makes one, so its files may be lost."""
    for folder in folders:
        key = folder.key
        has_some = folder.files or folder.folders or folder.links or folder.others or folder.failure
        is_known = (  # of an array whose chunks are compared; in place of a file; of locks
            _CHUNK_FOLDERS.sub("", key) + _SUFFIX in files
            or shard_id(key) is not None
            or key.endswith(LOCKS_SUFFIX)
        )
        is_hidden = any(part.startswith(".") for part in key.split("/"))
        if key and not (has_some or is_known or is_hidden):
            expected = "files of an array or an object, which may be lost"
            yield Issue(Problem.UNEXPECTED_FILE, None, key, expected, "an empty directory")


def _compared_arrays(
    root: Path, files: Mapping[str, int], checks: list[FileCheck], issues: list[Issue]
) -> Iterator[ScannedArray]:
    """The arrays, sorted by key; checks of their chunks, and what is wrong, join the lists."""
    store, chunks = Directory(root), _chunks_by_key(files)
    for key in sorted(p.removesuffix(_SUFFIX) for p in files if p.endswith(_SUFFIX)):
        present, array = chunks.pop(key, {}), _read_metadata(root, key)
        if isinstance(array, Issue):
            issues.append(array)
            continue
        expected = nbytes_text(array.chunk_nbytes) if array.is_raw else "a compressed chunk"
        path_of = array.chunk_file
        found = list(_compared_grid(key, array.grid, path_of, present, expected, "chunks"))
        for path, nbytes in sorted(present.items()):
            size = array.chunk_nbytes if array.is_raw else max(nbytes, 1)
            run = partial(_check_readable, store, path, size)
            checks.append(FileCheck(key, path, size, run, expected))
            issues += compared(checks[-1], files)
        issues += found
        yield ScannedArray(array, len(present), sum(present.values()))
    known = {issue.path for issue in issues}
    for key, named in chunks.items():
        if key + _SUFFIX in known:
            continue
        text = f"{NO_FILE}; files that look like chunks: {len(named)}"
        expected = "the array's metadata"
        issues.append(Issue(Problem.MISSING_FILE, key, key + _SUFFIX, expected, text))


def _chunks_by_key(files: Mapping[str, int]) -> dict[str, dict[str, int]]:
    """Sizes of files that look like chunks, by the key of their array and by path."""
    found: dict[str, dict[str, int]] = defaultdict(dict)
    for path, nbytes in files.items():
        key, _, name = path.rpartition("/")
        if key and _CHUNK_NAME.fullmatch(name):
            if key + _SUFFIX not in files:  # w/0/1 belongs to the array above the numbers
                key = _CHUNK_FOLDERS.sub("", key)
            found[key][path] = nbytes
    return found


def _read_metadata(root: Path, key: str) -> ArraySpec | Issue:
    path = key + _SUFFIX
    try:
        return parse_metadata(key, path, read_file(f"{root}/{path}", MAX_JSON_NBYTES))
    except OSError as error:
        return unreadable(key, path, reason(error))
    except CheckpointError as error:
        found = error.message.removeprefix(f"{key}: {path}").lstrip(": ")
        return Issue(Problem.DAMAGED, key, path, "the metadata of a Zarr v2 array", found)


def _check_readable(store: Directory, path: str, nbytes: int) -> Iterator[Issue]:
    """Read a chunk, of which there is no digest: raises where that fails."""
    for at in range(0, nbytes, _READ_NBYTES):
        store.read_into(path, at, [np.empty(min(_READ_NBYTES, nbytes - at), np.uint8)])
    return iter(())


def _compared_objects(
    root: Path, files: Mapping[str, int], checks: list[FileCheck], issues: list[Issue]
) -> Iterator[ScannedObject]:
    """The grids that files of objects make up, one for each shape that the files of a key state."""
    by_grid: dict[tuple[str, Shape], dict[str, int]] = defaultdict(dict)
    last: dict[tuple[str, Shape], int] = defaultdict(int)
    for path, nbytes in files.items():
        if shard := shard_id(path):
            by_grid[shard.key, shard.shape][path] = nbytes
            last[shard.key, shard.shape] = max(last[shard.key, shard.shape], shard.offset[-1])
    for (key, stated), present in sorted(by_grid.items()):
        checks += (_archive(root, key, *one) for one in sorted(present.items()))
        file_nbytes = sum(present.values())
        # In names of the older form the last number is left out: the largest offset tells it.
        shape = (*stated[:-1], last[key, stated] + 1) if stated[-1] == UNKNOWN else stated
        num_shards = math.prod(shape)

        def path_of(offset: Shape, key: str = key, stated: Shape = stated) -> str:
            return ObjectId(key, offset, stated).unique_key + OBJECT_SUFFIX

        expected = f"one of {num_shards} shards"
        issues += _compared_grid(key, shape, path_of, present, expected, "shards")
        yield ScannedObject(key, shape, len(present), num_shards, file_nbytes)


def _compared_grid(
    key: str,
    grid: Shape,
    path_of: Callable[[Shape], str],
    present: dict[str, int],
    expected: str,
    what: str,
) -> Iterator[Issue]:
    """Issues for the files of a grid that are not there; files outside of it leave ``present``."""
    num_missing = math.prod(grid) - len(present)
    if num_missing > MAX_LISTED:  # a damaged grid may be of any size
        found = f"{len(present)}; {num_missing} are missing"
        yield Issue(Problem.MISSING_FILE, key, key, f"{math.prod(grid)} files", found)
        return
    paths = list(map(path_of, product(*map(range, grid))))
    for path in paths:
        if path not in present:
            yield Issue(Problem.MISSING_FILE, key, path, expected, NO_FILE)
    only = f"{what} of the grid {' x '.join(map(str, grid)) or '1'} only"
    for path in sorted(present.keys() - set(paths)):
        del present[path]
        yield Issue(Problem.UNEXPECTED_FILE, key, path, only, "a file outside of it")


def _archive(root: Path, key: str | None, path: str, nbytes: int) -> FileCheck:
    """A ``.pt`` file, to be compared with its own checksums; nothing is unpickled."""

    def run() -> Iterator[Issue]:
        with (root / path).open("rb") as file:
            damage = file_damage(file)
        if damage is not None:
            expected = "an archive that fits its own checksums"
            yield Issue(Problem.DAMAGED, key, path, expected, damage)

    return FileCheck(key, path, nbytes, run)
