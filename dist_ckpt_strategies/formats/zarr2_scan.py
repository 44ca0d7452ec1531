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
    is_foreign = isinstance(marker, CheckpointMarker) and marker.sharded_format != FORMAT1
    found = _Contents(root)
    for folder in _folders(root, watch):
        found.count(folder)
        if not is_foreign:
            found.look_into(folder)
    found.issues[:0] = check_marker(marker, FORMAT1)
    arrays, objects = tuple(found.compared_arrays()), tuple(found.compared_objects())
    common_nbytes = top.files.get(COMMON_NAME)
    if common_nbytes is None and has_own_common(marker):
        found.issues.append(missing_common())
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
        issues=sorted_by_key(found.issues),
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
        shards: files of objects, and their sizes.
        stale_files: harmless.
        issues: what is wrong.
        num_files: all of them.
        nbytes: their bytes.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._arrays: dict[str, ArraySpec | Issue] = {}
        self._chunks: dict[str, dict[str, int]] = defaultdict(dict)
        self.shards: dict[ObjectId, int] = {}
        self.stale_files: list[StaleFile] = []
        self.issues: list[Issue] = []
        self.num_files = self.nbytes = 0

    def count(self, folder: Folder) -> None:
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
            self._arrays[key] = _read_metadata(self._root, folder)
        else:  # chunks in numbered directories, w/0/1, belong to the one above the numbers
            key = _CHUNK_FOLDERS.sub("", folder.key)
            prefix = f"{folder.key}/".removeprefix(f"{key}/")
        for name, nbytes in folder.files.items():
            if _CHUNK_NAME.fullmatch(name):
                self._chunks[key][prefix + name] = nbytes
            elif shard := shard_id(folder.path_of(name)):
                self.shards[shard] = nbytes
        self.issues += (
            unreadable(folder.key, path, "a directory, or something else that is no file")
            for path in map(folder.path_of, (*folder.folders, *folder.links, *folder.others))
            if shard_id(path)
        )

    def compared_arrays(self) -> Iterator[ScannedArray]:
        """The arrays, sorted by key; what is wrong with them joins the issues."""
        for key, array in sorted(self._arrays.items()):
            named = self._chunks.pop(key, {})
            if isinstance(array, Issue):
                self.issues.append(array)
                continue
            indices = {name: _chunk_index(array, name) for name in sorted(named)}
            chunks = {index: named[n] for n, index in indices.items() if index is not None}
            outside = [f"{key}/{name}" for name, index in indices.items() if index is None]
            yield ScannedArray(array, len(chunks), sum(chunks.values()))
            expected = nbytes_text(array.chunk_nbytes) if array.is_raw else "a compressed chunk"
            path_of = partial(_chunk_path, array)
            for index, nbytes in sorted(chunks.items()):
                if nbytes != array.chunk_nbytes if array.is_raw else nbytes == 0:
                    found, path = nbytes_text(nbytes), path_of(index)
                    self.issues.append(Issue(Problem.WRONG_SIZE, key, path, expected, found))
            self.issues += missing_files(key, array.grid, chunks, path_of, expected)
            self.issues += _unexpected(key, outside, "chunks", array.grid)
        for key, named in self._chunks.items():
            text = f"{NO_FILE}; files that look like chunks: {len(named)}"
            path, expected = f"{key}/{METADATA_NAME}", "the array's metadata"
            self.issues.append(Issue(Problem.MISSING_FILE, key, path, expected, text))

    def compared_objects(self) -> Iterator[ScannedObject]:
        """The grids that files of objects make up, sorted by key; what is wrong joins the issues.

        Shards of one key that state different shapes make up a grid each. One of the older form,
        with the last number of its shape left out, ends at the largest offset that is there.
        """
        by_grid: dict[tuple[str, Shape], list[ObjectId]] = defaultdict(list)
        for shard in sorted(self.shards):
            by_grid[shard.key, shard.shape].append(shard)
        for (key, stated), some in sorted(by_grid.items()):
            last = 1 + max(shard.offset[-1] for shard in some)
            shape = (*stated[:-1], last) if stated[-1] == UNKNOWN else stated
            present = {s.offset for s in some if all(map(int.__lt__, s.offset, shape))}
            num_shards, nbytes = math.prod(shape), sum(self.shards[shard] for shard in some)
            yield ScannedObject(key, shape, len(present), num_shards, nbytes)
            path_of, expected = partial(_shard_path, key, stated), f"one of {num_shards} shards"
            self.issues += missing_files(key, shape, present, path_of, expected)
            outside = [shard_path(shard) for shard in some if shard.offset not in present]
            self.issues += _unexpected(key, outside, "shards", shape)


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


def _chunk_index(array: ArraySpec, name: str) -> Shape | None:
    """The chunk that a file of that name holds; None where the array has no such chunk."""
    parts = name.split(array.separator)
    if not all(map(str.isdecimal, parts)) or not name.isascii():
        return None
    index = tuple(map(int, parts)) if array.shape else ()
    fits = len(index) == len(array.shape) and all(map(int.__lt__, index, array.grid))
    return index if fits and array.chunk_name(index) == name else None


def _chunk_path(array: ArraySpec, index: Shape) -> str:
    return f"{array.key}/{array.chunk_name(index)}"


def _shard_path(key: str, stated: Shape, offset: Shape) -> str:
    return shard_path(ObjectId(key, offset, stated))


def _unexpected(key: str, paths: Iterable[str], what: str, grid: Shape) -> Iterator[Issue]:
    expected = f"{what} of the grid {' x '.join(map(str, grid)) or '1'} only"
    for path in paths:
        yield Issue(Problem.UNEXPECTED_FILE, key, path, expected, "a file outside of it")


def _archive_checks(
    root: Path, common_nbytes: int | None, shards: Mapping[ObjectId, int]
) -> Iterator[FileCheck]:
    """Checks of the common state and of all objects: each archive has checksums of its own."""
    files: list[tuple[str | None, str, int]]
    files = [] if common_nbytes is None else [(None, COMMON_NAME, common_nbytes)]
    files += [(shard.key, shard_path(shard), shards[shard]) for shard in sorted(shards)]
    for key, path, nbytes in files:
        yield FileCheck(key, path, nbytes, partial(_check_archive, root, key, path))


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
