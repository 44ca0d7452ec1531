"""Scan a ("zarr", 1) checkpoint: Zarr v2 arrays and ``.pt`` objects in directories. No torch.

One pass over the directories reads names, sizes and the small metadata files.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path

from dist_ckpt_strategies.core.array import UNKNOWN, ArraySpec, ObjectId
from dist_ckpt_strategies.core.region import Shape
from dist_ckpt_strategies.errors import CheckpointError, CheckpointNotFoundError
from dist_ckpt_strategies.formats.commit import HOLDS_SAFETENSORS, are_safetensors
from dist_ckpt_strategies.formats.issues import (
    NO_FILE,
    FileCheck,
    Issue,
    Problem,
    Scan,
    ScannedArray,
    ScannedObject,
    StaleFile,
    StaleKind,
    Watch,
    check_marker,
    has_own_common,
    marker_or_issue,
    missing_common,
    missing_files,
    require_no_inner,
    sharded_format,
    sorted_by_key,
    unreadable,
)
from dist_ckpt_strategies.formats.marker import CheckpointMarker
from dist_ckpt_strategies.formats.object_files import file_damage, shard_id, shard_path
from dist_ckpt_strategies.formats.zarr2 import METADATA_NAME, parse_metadata
from dist_ckpt_strategies.storage.files import (
    COMMON_NAME,
    MARKER_NAME,
    MAX_JSON_NBYTES,
    PARTIAL_PREFIX,
    REMOVED_PREFIX,
    Folder,
    read_file,
    read_folder,
    reason,
    require_directory,
)
from dist_ckpt_strategies.storage.store import Directory, nbytes_text

FORMAT1 = ("zarr", 1)

_MAX_BARE = 1000
"""Directories to look at before a place without marker and common state is given up."""

_NUM_THREADS = 8
"""That read objects: many small files, on a file system that may be far away."""

_CHUNK_NAME = re.compile(r"\d+(?:\.\d+)*", re.ASCII)
_CHUNK_FOLDERS = re.compile(r"(?:/\d+)+\Z", re.ASCII)
_LOCKS_SUFFIX = ".sync"
_TEMPORARY_SUFFIXES = (".__lock", ".partial")
"""Files that TensorStore and zarr-python rename once they are whole."""


def scan_format1(root: Path, watch: Watch | None = None) -> Scan:
    """What a directory holds that is not known to be of another format of ours; see ``scan``."""
    root = root.absolute()
    require_directory(root)
    top, marker = read_folder(root, ""), marker_or_issue(Directory(root))
    is_foreign = isinstance(marker, CheckpointMarker) and sharded_format(marker) != FORMAT1
    is_bare = not {MARKER_NAME, COMMON_NAME} & top.files.keys()
    found = _Contents(root)
    for number, folder in enumerate(_folders(root, watch)):
        if is_bare and number == _MAX_BARE and found.is_empty():
            raise CheckpointNotFoundError(
                f"{root} is no checkpoint: expected {MARKER_NAME} and {COMMON_NAME}, found "
                f"neither, and no array or object in the first {_MAX_BARE} directories below it",
                path=str(root),
            )
        found.count(folder)
        if not is_foreign:
            found.look_into(folder)
    common_nbytes = top.files.get(COMMON_NAME)
    issues = [*check_marker(marker, FORMAT1), *found.issues]
    arrays = tuple(_compared_arrays(found, issues))
    objects = tuple(_compared_objects(found.shards, issues))
    if common_nbytes is None and has_own_common(marker):
        issues.append(missing_common())
    if not (isinstance(marker, CheckpointMarker) or common_nbytes is not None or arrays or objects):
        _require_no_other(root, top)
    return Scan(
        root=root,
        version=None if is_foreign else 1,
        marker=marker if isinstance(marker, CheckpointMarker) else None,
        common_nbytes=common_nbytes,
        arrays=arrays,
        objects=objects,
        stale_files=tuple(sorted(found.stale_files, key=lambda stale: stale.path)),
        issues=sorted_by_key(issues),
        num_files=found.num_files,
        nbytes=found.nbytes,
        checks=partial(_archive_checks, root, common_nbytes, found.shards),
        num_threads=_NUM_THREADS,
    )


def _folders(root: Path, watch: Watch | None) -> Iterator[Folder]:
    """The directories of a checkpoint, but for checkpoints of their own below it.

    Of links to directories nothing below is looked at: they may lead in a circle.
    """
    waiting, num_done = [""], 0
    while waiting:
        folder = read_folder(root, waiting.pop())
        if not _is_other_checkpoint(folder):
            yield folder
            links = (read_folder(root, folder.path_of(link)) for link in folder.links)
            yield from (link for link in links if not _is_other_checkpoint(link))
            waiting += map(folder.path_of, folder.folders)
        num_done += 1
        if watch:
            watch(num_done, num_done + len(waiting))


def _is_other_checkpoint(folder: Folder) -> bool:
    return bool(folder.key) and MARKER_NAME in folder.files and _stale_kind(folder) is None


class _Contents:
    """What the directories of a checkpoint hold, as far as they were looked at.

    Attributes:
        arrays: what the metadata of each array says, or what is wrong with it.
        chunks: for each key, the files with names of chunks, and their sizes.
        shards: files of objects, and their sizes.
        stale_files: harmless.
        issues: of what cannot be read.
        num_files: all of them.
        nbytes: their bytes.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self.arrays: dict[str, ArraySpec | Issue] = {}
        self.chunks: dict[str, dict[str, int]] = defaultdict(dict)
        self.shards: dict[ObjectId, int] = {}
        self.stale_files: list[StaleFile] = []
        self.issues: list[Issue] = []
        self.num_files = self.nbytes = 0

    def is_empty(self) -> bool:
        """Whether there was nothing of a checkpoint so far."""
        return not (self.arrays or self.shards or self.stale_files)

    def count(self, folder: Folder) -> None:
        """Count a directory's files."""
        self.num_files += len(folder.files)
        self.nbytes += folder.nbytes
        if folder.failure:
            self.issues.append(unreadable(None, folder.key or ".", folder.failure))

    def look_into(self, folder: Folder) -> None:
        """Add the stale files, the array's metadata, chunks and objects of a directory."""
        if kind := _stale_kind(folder):
            self.stale_files.append(StaleFile(kind, folder.key, folder.nbytes))
            return
        self.stale_files += (
            StaleFile(StaleKind.PARTIAL, folder.path_of(name), nbytes)
            for name, nbytes in folder.files.items()
            if name.startswith(PARTIAL_PREFIX) or name.endswith(_TEMPORARY_SUFFIXES)
        )
        if not folder.key:
            return
        key, prefix = folder.key, ""
        if METADATA_NAME in folder.files:
            self.arrays[key] = _read_metadata(self._root, folder)
        else:  # chunks in numbered directories, w/0/1, belong to the one above the numbers
            key = _CHUNK_FOLDERS.sub("", folder.key)
            prefix = f"{folder.key}/".removeprefix(f"{key}/")
        for name, nbytes in folder.files.items():
            if _CHUNK_NAME.fullmatch(name):
                self.chunks[key][prefix + name] = nbytes
            elif shard := shard_id(folder.path_of(name)):
                self.shards[shard] = nbytes
        self.issues += (
            unreadable(folder.key, path, "a directory, or something else that is no file")
            for path in map(folder.path_of, (*folder.folders, *folder.links, *folder.others))
            if shard_id(path)
        )


def _stale_kind(folder: Folder) -> StaleKind | None:
    """Why nothing in the directory counts, if so.

    Megatron-Core <= 0.15 kept locks of the array ``w`` in ``w.sync``, one empty file each.
    """
    parts = folder.key.split("/")
    if any(part.startswith(REMOVED_PREFIX) for part in parts):
        return StaleKind.REMOVED
    if parts[0].startswith(PARTIAL_PREFIX):
        return StaleKind.PARTIAL
    if parts[-1].endswith(_LOCKS_SUFFIX) and folder.files and not folder.nbytes:
        return StaleKind.LOCKS
    return None


def _read_metadata(root: Path, folder: Folder) -> ArraySpec | Issue:
    path = folder.path_of(METADATA_NAME)
    try:
        content = read_file(f"{root}/{path}", MAX_JSON_NBYTES)
        return parse_metadata(folder.key, path, content)
    except OSError as error:
        return unreadable(folder.key, path, reason(error))
    except CheckpointError as error:
        expected = "the metadata of a Zarr v2 array"
        return Issue(Problem.DAMAGED, folder.key, path, expected, _cause(error))


def _cause(error: CheckpointError) -> str:
    """The cause alone: the issue names key and file."""
    cause = error.__cause__
    if isinstance(cause, KeyError):
        return f"no field {cause}"
    return str(cause) if cause else error.message.removeprefix(f"{error.key}: ")


def _compared_arrays(found: _Contents, issues: list[Issue]) -> Iterator[ScannedArray]:
    """The arrays, sorted by key; what is wrong with their chunks or metadata joins ``issues``."""
    for key, array in sorted(found.arrays.items()):
        if isinstance(array, Issue):
            issues.append(array)
            continue
        chunks: dict[Shape, int] = {}
        outside = []
        for name, nbytes in sorted(found.chunks.get(key, {}).items()):
            index = _chunk_index(array, name)
            if index is None:
                outside.append(f"{key}/{name}")
            else:
                chunks[index] = nbytes
        yield ScannedArray(array, len(chunks), sum(chunks.values()))
        issues += _check_chunks(array, chunks)
        issues += _unexpected(key, outside, f"chunks of the grid {_grid_text(array.grid)} only")
    for key in found.chunks.keys() - found.arrays.keys():
        text = f"{NO_FILE}; files that look like chunks: {len(found.chunks[key])}"
        path, expected = f"{key}/{METADATA_NAME}", "the array's metadata"
        issues.append(Issue(Problem.MISSING_FILE, key, path, expected, text))


def _chunk_index(array: ArraySpec, name: str) -> Shape | None:
    """The chunk that a file of that name holds; None where the array has no such chunk."""
    parts = name.split(array.separator)
    if not all(map(str.isdecimal, parts)) or not name.isascii():
        return None
    index = tuple(map(int, parts)) if array.shape else ()
    fits = len(index) == len(array.shape) and all(map(int.__lt__, index, array.grid))
    return index if fits and array.chunk_name(index) == name else None


def _check_chunks(array: ArraySpec, chunks: Mapping[Shape, int]) -> Iterator[Issue]:
    """Issues of the sizes of an array's chunk files, and of those that are missing."""

    def path_of(index: Shape) -> str:
        return f"{array.key}/{array.chunk_name(index)}"

    expected = nbytes_text(array.chunk_nbytes) if array.is_raw else "a compressed chunk"
    for index, nbytes in sorted(chunks.items()):
        if nbytes != array.chunk_nbytes if array.is_raw else nbytes == 0:
            found = nbytes_text(nbytes)
            yield Issue(Problem.WRONG_SIZE, array.key, path_of(index), expected, found)
    yield from missing_files(array.key, array.grid, chunks.keys(), path_of, expected)


def _compared_objects(
    shards: Mapping[ObjectId, int], issues: list[Issue]
) -> Iterator[ScannedObject]:
    """The grids that files of objects make up, sorted by key; what is wrong joins ``issues``.

    Shards of one key that state different shapes make up a grid each. One of the older form, with
    the last number of its shape left out, ends at the largest offset that is there.
    """
    by_grid: dict[tuple[str, Shape], list[ObjectId]] = defaultdict(list)
    for shard in sorted(shards):
        by_grid[shard.key, shard.shape].append(shard)
    for (key, stated), some in sorted(by_grid.items()):
        last = 1 + max(shard.offset[-1] for shard in some)
        shape = (*stated[:-1], last) if stated[-1] == UNKNOWN else stated
        present = {s.offset for s in some if all(map(int.__lt__, s.offset, shape))}
        num_shards, nbytes = math.prod(shape), sum(shards[shard] for shard in some)
        yield ScannedObject(key, shape, len(present), num_shards, nbytes)

        def path_of(offset: Shape, key: str = key, stated: Shape = stated) -> str:
            return shard_path(ObjectId(key, offset, stated))

        issues += missing_files(key, shape, present, path_of, f"one of {num_shards} shards")
        outside = (shard_path(shard) for shard in some if shard.offset not in present)
        issues += _unexpected(key, outside, f"shards of the grid {_grid_text(shape)} only")


def _unexpected(key: str, paths: Iterable[str], expected: str) -> Iterator[Issue]:
    for path in paths:
        yield Issue(Problem.UNEXPECTED_FILE, key, path, expected, "a file outside of it")


def _grid_text(grid: Shape) -> str:
    """Such as ``2 x 4``; a scalar has the grid ``1``."""
    return " x ".join(map(str, grid)) or "1"


def _archive_checks(
    root: Path, common_nbytes: int | None, shards: Mapping[ObjectId, int]
) -> Iterator[FileCheck]:
    """Checks of the common state and of all objects: each archive has checksums of its own."""
    if common_nbytes is not None:
        run = partial(_check_archive, root, None, COMMON_NAME)
        yield FileCheck(None, COMMON_NAME, common_nbytes, run)
    for shard in sorted(shards):
        path = shard_path(shard)
        run = partial(_check_archive, root, shard.key, path)
        yield FileCheck(shard.key, path, shards[shard], run)


def _check_archive(root: Path, key: str | None, path: str) -> Iterator[Issue]:
    """Compare a ``.pt`` file with its own checksums; nothing is unpickled."""
    with (root / path).open("rb") as file:
        damage = file_damage(file)
    if damage is not None:
        yield Issue(Problem.DAMAGED, key, path, "an archive that fits its own checksums", damage)


def _require_no_other(root: Path, top: Folder) -> None:
    """Refuse a directory of a model's files, and one that only holds checkpoints."""
    if are_safetensors(top.files):
        raise CheckpointNotFoundError(
            f"{root} is no checkpoint: {HOLDS_SAFETENSORS}", path=str(root)
        )
    names = (name for name in top.folders if not name.startswith(PARTIAL_PREFIX))
    require_no_inner(root, [name for name in names if (root / name / MARKER_NAME).exists()])
