"""Scan a checkpoint of format ("zarr", 1) without loading it, and give the checks of its files.

All directories are listed; the metadata of arrays and the names of objects say which files there
should be. No torch.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, product
from pathlib import Path

import numpy as np

from dist_ckpt_strategies.comm.shared_work import Watch
from dist_ckpt_strategies.core.array import UNKNOWN, ObjectId, Shape
from dist_ckpt_strategies.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    PlanError,
    StorageError,
)
from dist_ckpt_strategies.formats.issues import (
    COMMON_FORMAT,
    NO_FILE,
    FileCheck,
    Issue,
    Problem,
    Scan,
    Scanned,
    StaleFile,
    StaleKind,
    checked_marker,
    compared,
    missing_common,
    nbytes_text,
    sorted_by_key,
    unreadable,
)
from dist_ckpt_strategies.formats.locations import other_contents
from dist_ckpt_strategies.formats.objects import file_damage
from dist_ckpt_strategies.formats.zarr2 import (
    LOCKS_SUFFIX,
    METADATA_NAME,
    object_name,
    parse_metadata,
    shard_id,
)
from dist_ckpt_strategies.storage.files import (
    COMMON_NAME,
    MARKER_NAME,
    MAX_JSON_NBYTES,
    PARTIAL_PREFIX,
    REMOVED_PREFIX,
    Directory,
)
from dist_ckpt_strategies.storage.folders import Folder, read_folder

_FORMAT1 = ("zarr", 1)

_NUM_THREADS = 8
"""Threads that read objects of format 1: many small files, perhaps on a slow file system."""

_READ_NBYTES = 2 << 20
"""Bytes of one read; they stay in the processor's cache."""

_MAX_LISTED = 1000
"""Missing files of one key that have an issue each; one issue stands for more of them."""

_CHUNK_NAME = re.compile(r"\d+(?:\.\d+)*", re.ASCII)
_CHUNK_FOLDERS = re.compile(r"(?:/\d+)+\Z", re.ASCII)
_SUFFIX = f"/{METADATA_NAME}"

_TEMPORARY_SUFFIXES = (".__lock", ".partial")
"""Files that TensorStore and zarr-python rename once they are whole."""

Sizes = Mapping[str, int]
"""The bytes of files, by their paths below the checkpoint."""


_Part = tuple[Scanned | None, Sequence[FileCheck], Sequence[Issue]]
"""An array, or a grid of objects: what is there of it, its files, and what is wrong."""


def scan_zarr(root: Path, watch: Watch | None) -> Scan:
    """The contents and issues of a directory; see ``scan.scan``."""
    store = Directory(root)
    marker, issues = checked_marker(store, _FORMAT1)
    folders = list(_folders(root, watch))
    if folders[0].failure:
        raise StorageError(f"{root} cannot be listed: {folders[0].failure}", path=str(root))
    issues += (unreadable(None, f.key, f.failure) for f in folders if f.failure)
    is_foreign = marker is not None and marker.sharded_format != _FORMAT1
    files, stale = _split([] if is_foreign else folders)
    parts: list[_Part] = []
    if not is_foreign:
        issues += chain.from_iterable(map(_no_files, folders))
        with_issue = {issue.path for issue in issues}
        parts = [*_arrays(store, files, with_issue), *_objects(root, files)]
    listed = {folder.path_of(name): n for folder in folders for name, n in folder.files.items()}
    if COMMON_NAME in listed:
        parts.append((None, [_archive(root, None, COMMON_NAME, listed[COMMON_NAME])], ()))
    elif marker is None or marker.common_format == COMMON_FORMAT:
        issues.append(missing_common())
    issues += chain.from_iterable(found for _, _, found in parts)
    if marker is None and not parts:
        is_damaged = stale or MARKER_NAME in listed or issues[2:]  # beyond both that are missing
        if what := other_contents(root) or ("" if is_damaged else "it has no file of one"):
            raise CheckpointNotFoundError(f"{root} is no checkpoint: {what}", path=str(root))
    issues += [] if is_foreign else _emptied(folders, files)
    return Scan(
        root=root,
        backend=None if is_foreign else _FORMAT1,
        marker=marker,
        files=listed,
        arrays=tuple(one for one, *_ in parts if one and one.array),
        objects=tuple(one for one, *_ in parts if one and not one.array),
        stale_files=tuple(sorted(stale, key=lambda one: one.path)),
        issues=sorted_by_key(issues),
        checks=tuple(check for _, checks, _ in parts for check in checks),
        num_threads=_NUM_THREADS,
    )


def _split(folders: Iterable[Folder]) -> tuple[dict[str, int], list[StaleFile]]:
    """The files of a checkpoint, and what killed processes have left beside them."""
    files: dict[str, int] = {}
    stale: list[StaleFile] = []
    for folder in folders:
        if kind := _stale_kind(folder):
            stale.append(StaleFile(kind, folder.key, folder.nbytes))
            continue
        for name, nbytes in folder.files.items():
            if name.startswith(PARTIAL_PREFIX) or name.endswith(_TEMPORARY_SUFFIXES):
                stale.append(StaleFile(StaleKind.PARTIAL, folder.path_of(name), nbytes))
            else:
                files[folder.path_of(name)] = nbytes
    return files, stale


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


def _no_files(folder: Folder) -> Iterator[Issue]:
    """An issue for what has the name of a file, and is none."""
    if _stale_kind(folder):
        return
    for path in map(folder.path_of, (*folder.folders, *folder.links, *folder.others)):
        if shard_id(path) or path.endswith(_SUFFIX):
            yield unreadable(folder.key, path, "a directory, or something else that is no file")


def _emptied(folders: Iterable[Folder], files: Sizes) -> Iterator[Issue]:
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


def _arrays(store: Directory, files: Sizes, known: set[str]) -> Iterator[_Part]:
    """The arrays, sorted by key. Paths that are ``known`` have an issue already."""
    chunks: dict[str, dict[str, int]] = defaultdict(dict)
    for path, nbytes in files.items():
        key, _, name = path.rpartition("/")
        if key and _CHUNK_NAME.fullmatch(name):
            if key + _SUFFIX not in files:  # w/0/1 belongs to the array above the numbers
                key = _CHUNK_FOLDERS.sub("", key)
            chunks[key][path] = nbytes
    for key in sorted(path.removesuffix(_SUFFIX) for path in files if path.endswith(_SUFFIX)):
        yield _array(store, key, chunks.pop(key, {}))
    for key, named in chunks.items():
        if key + _SUFFIX not in known:
            text = f"{NO_FILE}; files that look like chunks: {len(named)}"
            expected = "the array's metadata"
            yield None, (), [Issue(Problem.MISSING_FILE, key, key + _SUFFIX, expected, text)]


def _array(store: Directory, key: str, present: Sizes) -> _Part:
    """An array, of which these chunk files are there."""
    path = key + _SUFFIX
    try:
        array = parse_metadata(key, path, store.read(path, 0, MAX_JSON_NBYTES))
    except (CorruptCheckpointError, PlanError) as error:
        text = error.message.removeprefix(f"{key}: {path}").lstrip(": ")
        expected = "the metadata of a Zarr v2 array"
        return None, (), [Issue(Problem.DAMAGED, key, path, expected, text)]
    except StorageError as error:
        return None, (), [unreadable(key, path, error.message)]
    expected = nbytes_text(array.chunk_nbytes) if array.is_raw else "a compressed chunk"
    inside, issues = _compared_grid(key, array.grid, array.chunk_file, present, expected)
    checks = []
    for name, nbytes in inside.items():
        size = array.chunk_nbytes if array.is_raw else max(nbytes, 1)
        run = partial(_check_readable, store, name, size)
        checks.append(FileCheck(key, name, size, expected, run))
        issues += compared(checks[-1], present)
    scanned = Scanned(key, array.shape, len(inside), sum(inside.values()), array=array)
    return scanned, checks, issues


def _check_readable(store: Directory, path: str, nbytes: int) -> Iterator[Issue]:
    """Read a chunk, of which there is no digest: raises where that fails."""
    for at in range(0, nbytes, _READ_NBYTES):
        store.read_into(path, at, [np.empty(min(_READ_NBYTES, nbytes - at), np.uint8)])
    return iter(())


def _objects(root: Path, files: Sizes) -> Iterator[_Part]:
    """The grids that files of objects make up, one for each shape that the files of a key state."""
    by_grid: dict[tuple[str, Shape], dict[str, int]] = defaultdict(dict)
    last: dict[tuple[str, Shape], int] = defaultdict(int)
    for path, nbytes in files.items():
        if shard := shard_id(path):
            by_grid[shard.key, shard.shape][path] = nbytes
            last[shard.key, shard.shape] = max(last[shard.key, shard.shape], shard.offset[-1])
    for (key, stated), present in sorted(by_grid.items()):
        # In names of the older form the last number is left out: the largest offset tells it.
        shape = (*stated[:-1], last[key, stated] + 1) if stated[-1] == UNKNOWN else stated

        def path_of(offset: Shape, key: str = key, stated: Shape = stated) -> str:
            return object_name(ObjectId(key, offset, stated))

        expected = f"one of {math.prod(shape)} shards"
        inside, issues = _compared_grid(key, shape, path_of, present, expected)
        nbytes = sum(present.values())
        scanned = Scanned(key, shape, len(inside), nbytes)
        yield scanned, [_archive(root, key, *one) for one in sorted(present.items())], issues


def _compared_grid(
    key: str, grid: Shape, path_of: Callable[[Shape], str], present: Sizes, expected: str
) -> tuple[dict[str, int], list[Issue]]:
    """The files of a grid that are there, and issues for others that are not, or outside of it."""
    num_missing = math.prod(grid) - len(present)
    if num_missing > _MAX_LISTED:  # a damaged grid may be of any size
        counts = f"{len(present)}; {num_missing} are missing"
        issue = Issue(Problem.MISSING_FILE, key, key, f"{math.prod(grid)} files", counts)
        return dict(sorted(present.items())), [issue]
    paths = dict.fromkeys(map(path_of, product(*map(range, grid))))
    only = f"files of the grid {' x '.join(map(str, grid)) or '1'} only"
    issues = [
        Issue(Problem.MISSING_FILE, key, path, expected, NO_FILE)
        for path in paths
        if path not in present
    ]
    issues += (
        Issue(Problem.UNEXPECTED_FILE, key, path, only, "a file outside of it")
        for path in sorted(present)
        if path not in paths
    )
    return {path: nbytes for path, nbytes in sorted(present.items()) if path in paths}, issues


def _archive(root: Path, key: str | None, path: str, nbytes: int) -> FileCheck:
    """A ``.pt`` file, to be compared with its own checksums; nothing is unpickled."""
    expected = "an archive that fits its own checksums"

    def run() -> Iterator[Issue]:
        with (root / path).open("rb") as file:
            damage = file_damage(file)
        if damage is not None:
            yield Issue(Problem.DAMAGED, key, path, expected, damage)

    return FileCheck(key, path, nbytes, expected, run)
