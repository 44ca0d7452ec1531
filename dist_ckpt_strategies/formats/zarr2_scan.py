"""Scan a ("zarr", 1) checkpoint: Zarr v2 arrays and ``.pt`` objects in directories. No torch.

One pass over the directories reads names, sizes and the small metadata files.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import chain
from pathlib import Path

from dist_ckpt_strategies.core.array import UNKNOWN, ArraySpec, ObjectId
from dist_ckpt_strategies.core.region import Extent
from dist_ckpt_strategies.errors import CheckpointError, CheckpointNotFoundError
from dist_ckpt_strategies.formats.finished import HOLDS_SAFETENSORS, are_safetensors
from dist_ckpt_strategies.formats.issues import (
    NO_FILE,
    Issue,
    Problem,
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
from dist_ckpt_strategies.formats.scanned import FileCheck, Scan, ScannedArray, ScannedObject
from dist_ckpt_strategies.formats.zarr2 import METADATA_NAME, parse_metadata
from dist_ckpt_strategies.storage.file_store import Directory, nbytes_text
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
    found = _Contents()
    for number, folder in enumerate(_folders(root, watch)):
        if is_bare and number == _MAX_BARE and found.is_empty():
            raise _no_checkpoint(root)
        found.count(folder)
        if not is_foreign:
            found.look_into(root, folder)
    common_nbytes = top.files.get(COMMON_NAME)
    arrays, of_arrays = found.compared_arrays()
    objects, of_objects = _grids(found.shards)
    issues = [*check_marker(marker, FORMAT1), *found.issues, *of_arrays, *of_objects]
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
        issues=sorted_by_key(issues, then_by_path=False),
        num_files=found.num_files,
        nbytes=found.nbytes,
        checks=partial(_checks, root, common_nbytes, found.shards),
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
        issues: of what cannot be read.
        num_files: all of them.
        nbytes: their bytes.
    """

    def __init__(self) -> None:
        self._arrays: dict[str, ArraySpec | Issue] = {}
        self._chunks: dict[str, dict[str, int]] = defaultdict(dict)
        self.shards: dict[ObjectId, int] = {}
        self.stale_files: list[StaleFile] = []
        self.issues: list[Issue] = []
        self.num_files = self.nbytes = 0

    def is_empty(self) -> bool:
        """Whether there was nothing of a checkpoint so far."""
        return not (self._arrays or self.shards or self.stale_files)

    def count(self, folder: Folder) -> None:
        """Count a directory's files."""
        self.num_files += len(folder.files)
        self.nbytes += folder.nbytes
        if folder.failure:
            self.issues.append(unreadable(None, folder.key or ".", folder.failure))

    def look_into(self, root: Path, folder: Folder) -> None:
        """Add the stale files, the array's metadata, chunks and objects of a directory."""
        if kind := _stale_kind(folder):
            self.stale_files.append(StaleFile(kind, folder.key, folder.nbytes))
            return
        self.stale_files += _partial_files(folder)
        if not folder.key:
            return
        key, prefix = folder.key, ""
        if METADATA_NAME in folder.files:
            self._arrays[key] = _read_metadata(root, folder)
        else:  # chunks in numbered directories, w/0/1, belong to the one above the numbers
            key = _CHUNK_FOLDERS.sub("", folder.key)
            prefix = f"{folder.key}/".removeprefix(f"{key}/")
        for name, nbytes in folder.files.items():
            if _CHUNK_NAME.fullmatch(name):
                self._chunks[key][prefix + name] = nbytes
            elif shard := shard_id(folder.path_of(name)):
                self.shards[shard] = nbytes
        self.issues += _check_shard_names(folder)

    def compared_arrays(self) -> tuple[tuple[ScannedArray, ...], list[Issue]]:
        """The arrays, sorted by key, and what is wrong with their chunks or metadata."""
        arrays, issues = [], []
        for key, array in sorted(self._arrays.items()):
            if isinstance(array, Issue):
                issues.append(array)
                continue
            named = self._chunks.get(key, {})
            indices = {name: _chunk_index(array, name) for name in named}
            chunks = {index: named[name] for name, index in indices.items() if index is not None}
            arrays.append(ScannedArray(array, len(chunks), sum(chunks.values())))
            outside = sorted(name for name, index in indices.items() if index is None)
            issues += _check_chunks(array, chunks, outside)
        for key in self._chunks.keys() - self._arrays.keys():
            path, expected = f"{key}/{METADATA_NAME}", "the array's metadata"
            found = f"{NO_FILE}; files that look like chunks: {len(self._chunks[key])}"
            issues.append(Issue(Problem.MISSING_METADATA, key, path, expected, found))
        return tuple(arrays), issues


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


def _partial_files(folder: Folder) -> Iterator[StaleFile]:
    for name, nbytes in folder.files.items():
        if name.startswith(PARTIAL_PREFIX) or name.endswith(_TEMPORARY_SUFFIXES):
            yield StaleFile(StaleKind.PARTIAL, folder.path_of(name), nbytes)


def _check_shard_names(folder: Folder) -> Iterator[Issue]:
    """Issues of what has the name of an object's file, and is none."""
    for path in map(folder.path_of, (*folder.folders, *folder.links, *folder.others)):
        if shard_id(path):
            found = "a directory, or something else that is no file"
            yield unreadable(folder.key, path, found)


def _read_metadata(root: Path, folder: Folder) -> ArraySpec | Issue:
    path = folder.path_of(METADATA_NAME)
    try:
        content = read_file(f"{root}/{path}", MAX_JSON_NBYTES)
        return parse_metadata(folder.key, path, content)
    except OSError as error:
        return unreadable(folder.key, path, reason(error))
    except CheckpointError as error:
        expected = "the metadata of a Zarr v2 array"
        return Issue(Problem.BAD_METADATA, folder.key, path, expected, _cause(error))


def _cause(error: CheckpointError) -> str:
    """The cause alone: the issue names key and file."""
    cause = error.__cause__
    if isinstance(cause, KeyError):
        return f"no field {cause}"
    return str(cause) if cause else error.message.removeprefix(f"{error.key}: ")


def _chunk_index(array: ArraySpec, name: str) -> Extent | None:
    """The chunk that a file of that name holds; None where the array has no such chunk."""
    parts = name.split(array.separator)
    if not all(map(str.isdecimal, parts)) or not name.isascii():
        return None
    index = tuple(map(int, parts)) if array.shape else ()
    fits = len(index) == len(array.shape) and all(map(int.__lt__, index, array.grid))
    return index if fits and array.chunk_name(index) == name else None


def _check_chunks(
    array: ArraySpec, chunks: Mapping[Extent, int], outside: Iterable[str]
) -> Iterator[Issue]:
    """Issues of the chunk files of one array.

    Args:
        array: its metadata.
        chunks: size in bytes of the files of its chunks.
        outside: names that look like those of chunks, but of none in the grid.
    """
    key, nbytes = array.key, array.chunk_nbytes
    expected = nbytes_text(nbytes) if array.is_raw else "a compressed chunk"
    wrong = (i for i, size in chunks.items() if (size != nbytes if array.is_raw else size == 0))
    for index in sorted(wrong):
        path, found = f"{key}/{array.chunk_name(index)}", nbytes_text(chunks[index])
        yield Issue(Problem.WRONG_CHUNK_SIZE, key, path, expected, found)
    yield from missing_files(
        Problem.MISSING_CHUNK,
        key,
        array.grid,
        chunks.keys(),
        lambda index: f"{key}/{array.chunk_name(index)}",
        expected,
    )
    only = f"chunks of the grid {_grid_text(array.grid)} only"
    for name in outside:
        yield Issue(Problem.UNEXPECTED_CHUNK, key, f"{key}/{name}", only, "a file outside of it")


def _grid_text(grid: Extent) -> str:
    """Such as ``2 x 4``; a scalar has the grid ``1``."""
    return " x ".join(map(str, grid)) or "1"


def _grids(shards: Mapping[ObjectId, int]) -> tuple[tuple[ScannedObject, ...], list[Issue]]:
    """The grids that files of objects make up, sorted by key, and what is wrong with them.

    Shards of one key that state different shapes make up a grid each. One of the older form, with
    the last number of its shape left out, ends at the largest offset that is there.
    """
    by_grid: dict[tuple[str, Extent], list[ObjectId]] = defaultdict(list)
    for shard in sorted(shards):
        by_grid[shard.key, shard.shape].append(shard)
    objects: list[ScannedObject] = []
    issues: list[Issue] = []
    for (key, stated), some in sorted(by_grid.items()):
        last = 1 + max(shard.offset[-1] for shard in some)
        shape = (*stated[:-1], last) if stated[-1] == UNKNOWN else stated
        present = {s.offset for s in some if all(map(int.__lt__, s.offset, shape))}
        file_nbytes = sum(shards[shard] for shard in some)
        objects.append(ScannedObject(key, shape, len(present), math.prod(shape), file_nbytes))
        issues += _check_grid(key, stated, shape, some, present)
    return tuple(objects), issues


def _check_grid(
    key: str, stated: Extent, shape: Extent, shards: Iterable[ObjectId], present: set[Extent]
) -> Iterator[Issue]:
    yield from missing_files(
        Problem.MISSING_OBJECT,
        key,
        shape,
        present,
        lambda offset: shard_path(ObjectId(key, offset, stated)),
        f"one of {math.prod(shape)} shards",
    )
    only = f"shards of the grid {_grid_text(shape)} only"
    for shard in shards:
        if shard.offset not in present:
            path = shard_path(shard)
            yield Issue(Problem.UNEXPECTED_OBJECT, key, path, only, "one outside of it")


def _checks(
    root: Path, common_nbytes: int | None, shards: Mapping[ObjectId, int]
) -> Iterator[FileCheck]:
    """Checks of the common state and of all objects: each archive has checksums of its own."""
    common = [] if common_nbytes is None else [(None, COMMON_NAME, common_nbytes)]
    ordered = ((shard.key, shard_path(shard), shards[shard]) for shard in sorted(shards))
    for key, path, nbytes in chain(common, ordered):
        yield FileCheck(key, path, nbytes, partial(_check_archive, root, key, path))


def _check_archive(root: Path, key: str | None, path: str) -> Iterator[Issue]:
    """Compare a ``.pt`` file with its own checksums; nothing is unpickled."""
    with (root / path).open("rb") as file:
        damage = file_damage(file)
    if damage is not None:
        expected = "an archive that fits its own checksums"
        yield Issue(Problem.DAMAGED_ARCHIVE, key, path, expected, damage)


def _no_checkpoint(root: Path) -> CheckpointNotFoundError:
    return CheckpointNotFoundError(
        f"{root} is no checkpoint: expected {MARKER_NAME} and {COMMON_NAME}, found neither, and no "
        f"array or object in the first {_MAX_BARE} directories below it",
        path=str(root),
    )


def _require_no_other(root: Path, top: Folder) -> None:
    """Refuse a directory of a model's files, and one that only holds checkpoints."""
    if are_safetensors(top.files):
        raise CheckpointNotFoundError(
            f"{root} is no checkpoint: {HOLDS_SAFETENSORS}", path=str(root)
        )
    names = (name for name in top.folders if not name.startswith(PARTIAL_PREFIX))
    require_no_inner(root, [name for name in names if (root / name / MARKER_NAME).exists()])
