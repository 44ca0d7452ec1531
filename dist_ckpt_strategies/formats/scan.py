"""Scan and verify a checkpoint of either format without loading it; the scan of format 1. No torch.

One pass over the directories reads names, sizes and the small metadata files.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from dist_ckpt_strategies.comm.shared_work import Count, Ranks
from dist_ckpt_strategies.core.array import UNKNOWN, ArraySpec, ObjectId, Shape
from dist_ckpt_strategies.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    IncompatibleVersionError,
)
from dist_ckpt_strategies.formats.issues import (
    NO_ANSWER,
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
    compared,
    has_own_common,
    marker_or_issue,
    missing_common,
    missing_files,
    require_no_inner,
    sorted_by_key,
    unreadable,
)
from dist_ckpt_strategies.formats.locations import (
    HOLDS_SAFETENSORS,
    CheckpointMarker,
    are_safetensors,
)
from dist_ckpt_strategies.formats.object_files import file_damage, shard_id, shard_path
from dist_ckpt_strategies.formats.zarr2 import METADATA_NAME, parse_metadata
from dist_ckpt_strategies.formats.zarr3_scan import scan_format2
from dist_ckpt_strategies.storage.files import (
    COMMON_NAME,
    MARKER_NAME,
    MAX_JSON_NBYTES,
    PARTIAL_PREFIX,
    REMOVED_PREFIX,
    Folder,
    nbytes_text,
    read_file,
    read_folder,
    reason,
    require_directory,
)
from dist_ckpt_strategies.storage.store import Directory, Store, block_sizes

if TYPE_CHECKING:  # TensorStore takes a while to import, and directories go without
    from dist_ckpt_strategies.comm.base import Communicator
    from dist_ckpt_strategies.storage.bucket import Bucket

_FORMAT1 = ("zarr", 1)

_NUM_THREADS = 8
"""That read objects: many small files, on a file system that may be far away."""

_CHUNK_NAME = re.compile(r"\d+(?:\.\d+)*", re.ASCII)
_CHUNK_FOLDERS = re.compile(r"(?:/\d+)+\Z", re.ASCII)
_SUFFIX = f"/{METADATA_NAME}"
_LOCKS_SUFFIX = ".sync"
_TEMPORARY_SUFFIXES = (".__lock", ".partial")
"""Files that TensorStore and zarr-python rename once they are whole."""


def scan(place: Path | Bucket, watch: Watch | None = None) -> Scan:
    """What a checkpoint holds, and what is wrong with it, by names, sizes and metadata.

    Reads no array and no object; ``verify`` compares their bytes. A checkpoint of another sharded
    backend is counted, and not looked into.

    Args:
        place: the directory, or the place in an object store.
        watch: called with directories, done and known so far, in format 1.

    Raises:
        CheckpointNotFoundError: it does not exist, or is no checkpoint itself but holds some, or
            nothing of one was found in many directories.
        IncompatibleVersionError: a later version of this package wrote it, or an object store
            holds something else than format ("zarr", 2).
        BucketNotFoundError, StoreAccessError, StoreUnreachableError: the store does not answer.
    """
    found = scan_format2(place)
    if found is not None:
        return found
    if isinstance(place, Path):
        return _scan_format1(place, watch)
    raise IncompatibleVersionError(
        f"{place}: there is something, but no checkpoint of format ('zarr', 2); object stores "
        "have no others"
    )


def verify(
    scan: Scan, watch: Watch | None = None, *, comm: Communicator | None = None
) -> tuple[Issue, ...]:
    """The issues of a scan, and those of comparing every byte with its digest; sorted by key.

    Format 1 keeps checksums of objects and the common state alone, and no list of its arrays: their
    files are read, and only names and sizes are compared. Each thread takes a few MiB of memory, or
    those of the object that it looks at.

    Collective if ``comm`` has several ranks: each reads its share of the files, and all return the
    same.

    Args:
        scan: of the checkpoint.
        watch: called with bytes.
        comm: ranks that share the work; None: this process does it alone.

    Raises:
        StoreAccessError, StoreUnreachableError: an object store does not answer any more.
        PlanError: the ranks see different files.
    """
    return sorted_by_key(run_checks(scan.issues, scan.checks(), scan.num_threads, watch, comm))


def run_checks(
    issues: Sequence[Issue],
    checks: Iterable[FileCheck],
    num_threads: int,
    watch: Watch | None,
    comm: Communicator | None,
) -> list[Issue]:
    """The issues of a scan, then those of all checks but of files that have an issue already.

    Collective if ``comm`` has several ranks.
    """
    known = {issue.path for issue in issues}
    left = [check for check in checks if check.name not in known]
    ranks = Ranks(comm)
    results = ranks.share(
        left, lambda check: check.nbytes, _run, num_threads=num_threads, watch=watch
    )
    own = [[number, list(map(astuple, some))] for number, some in results.items() if some]
    rows = sorted(row for of_rank in ranks.gather(lambda: own) for row in of_rank)
    texts = (fields for _, some in rows for fields in some)
    return [*issues, *(Issue(Problem(problem), *fields) for problem, *fields in texts)]


def _run(check: FileCheck, count: Count) -> list[Issue]:
    try:
        found = list(check.run())
    except NO_ANSWER:
        raise  # no other object would be read either
    except CheckpointError as error:
        found = [unreadable(check.key, check.name, error.message)]
    except OSError as error:
        found = [unreadable(check.key, check.name, reason(error))]
    count(check.nbytes)
    return found


def _scan_format1(root: Path, watch: Watch | None = None) -> Scan:
    """What a directory holds that is not known to be of another format of ours; see ``scan``."""
    root = root.absolute()
    require_directory(root)
    top, marker = read_folder(root, ""), marker_or_issue(Directory(root))
    is_foreign = isinstance(marker, CheckpointMarker) and marker.sharded_format != _FORMAT1
    folders = list(_folders(root, watch))
    issues = list(check_marker(marker, _FORMAT1))
    issues += (unreadable(None, f.key or ".", f.failure) for f in folders if f.failure)
    files: dict[str, int] = {}
    stale: list[StaleFile] = []
    for folder in () if is_foreign else folders:
        _look_into(folder, files, stale, issues)
    checks: list[FileCheck] = []
    common_nbytes = top.files.get(COMMON_NAME)
    if common_nbytes is not None:
        checks.append(_archive(root, None, COMMON_NAME, common_nbytes))
    elif has_own_common(marker):
        issues.append(missing_common())
    arrays = tuple(_compared_arrays(root, files, checks, issues))
    objects = tuple(_compared_objects(root, files, checks, issues))
    if not (isinstance(marker, CheckpointMarker) or common_nbytes is not None or arrays or objects):
        _require_no_other(root, top)
    return Scan(
        root=root,
        version=None if is_foreign else 1,
        marker=marker if isinstance(marker, CheckpointMarker) else None,
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
        if shard_id(path)
    )


def _compared_arrays(
    root: Path, files: Mapping[str, int], checks: list[FileCheck], issues: list[Issue]
) -> Iterator[ScannedArray]:
    """The arrays, sorted by key; checks of their chunks, and what is wrong, join the lists."""
    store, chunks = Directory(root), _chunks_by_key(files)
    for key in sorted(p.removesuffix(_SUFFIX) for p in files if p.endswith(_SUFFIX)):
        named, array = chunks.pop(key, {}), _read_metadata(root, key)
        if isinstance(array, Issue):
            issues.append(array)
            continue
        present: dict[Shape, int] = {}
        expected = nbytes_text(array.chunk_nbytes) if array.is_raw else "a compressed chunk"
        outside = []
        for name, nbytes in sorted(named.items()):
            index, path = _chunk_index(array, name), f"{key}/{name}"
            if index is None:
                outside.append(path)
                continue
            present[index] = nbytes
            size = array.chunk_nbytes if array.is_raw else max(nbytes, 1)
            run = partial(_check_readable, store, path, size)
            checks.append(FileCheck(key, path, size, run, expected))
            issues += compared(checks[-1], files)
        yield ScannedArray(array, len(present), sum(present.values()))
        path_of = partial(_chunk_path, array)
        issues += missing_files(key, array.grid, present, path_of, expected)
        issues += _unexpected(key, outside, "chunks", array.grid)
    for key, named in chunks.items():
        text = f"{NO_FILE}; files that look like chunks: {len(named)}"
        expected = "the array's metadata"
        issues.append(Issue(Problem.MISSING_FILE, key, key + _SUFFIX, expected, text))


def _chunks_by_key(files: Mapping[str, int]) -> dict[str, dict[str, int]]:
    """Sizes of files that look like chunks, by the key of their array and name below that."""
    found: dict[str, dict[str, int]] = defaultdict(dict)
    for path, nbytes in files.items():
        key, _, name = path.rpartition("/")
        if key and _CHUNK_NAME.fullmatch(name):
            if key + _SUFFIX not in files:  # w/0/1 belongs to the array above the numbers
                key = _CHUNK_FOLDERS.sub("", key)
            found[key][path.removeprefix(f"{key}/")] = nbytes
    return found


def _check_readable(store: Store, path: str, nbytes: int) -> Iterator[Issue]:
    """Read a chunk, of which there is no digest: raises where that fails."""
    for _ in store.read_blocks(path, block_sizes(nbytes, store.block_nbytes)):
        pass
    return iter(())


def _compared_objects(
    root: Path, files: Mapping[str, int], checks: list[FileCheck], issues: list[Issue]
) -> Iterator[ScannedObject]:
    """The grids that files of objects make up, sorted by key; see ``_compared_arrays``.

    Shards of one key that state different shapes make up a grid each. One of the older form,
    with the last number of its shape left out, ends at the largest offset that is there.
    """
    by_grid: dict[tuple[str, Shape], dict[Shape, int]] = defaultdict(dict)
    for path, nbytes in files.items():
        if shard := shard_id(path):
            by_grid[shard.key, shard.shape][shard.offset] = nbytes
    for (key, stated), sizes in sorted(by_grid.items()):
        path_of = partial(_shard_path, key, stated)
        checks += (_archive(root, key, path_of(o), nbytes) for o, nbytes in sorted(sizes.items()))
        last = 1 + max(offset[-1] for offset in sizes)
        shape = (*stated[:-1], last) if stated[-1] == UNKNOWN else stated
        present = {offset for offset in sizes if all(map(int.__lt__, offset, shape))}
        num_shards = math.prod(shape)
        yield ScannedObject(key, shape, len(present), num_shards, sum(sizes.values()))
        issues += missing_files(key, shape, present, path_of, f"one of {num_shards} shards")
        outside = map(path_of, sizes.keys() - present)
        issues += _unexpected(key, outside, "shards", shape)


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


def _read_metadata(root: Path, key: str) -> ArraySpec | Issue:
    path = key + _SUFFIX
    try:
        return parse_metadata(key, path, read_file(f"{root}/{path}", MAX_JSON_NBYTES))
    except OSError as error:
        return unreadable(key, path, reason(error))
    except CheckpointError as error:
        expected = "the metadata of a Zarr v2 array"
        return Issue(Problem.DAMAGED, key, path, expected, _cause(error))


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
    for path in sorted(paths):
        yield Issue(Problem.UNEXPECTED_FILE, key, path, expected, "a file outside of it")


def _archive(root: Path, key: str | None, path: str, nbytes: int) -> FileCheck:
    return FileCheck(key, path, nbytes, partial(_check_archive, root, key, path))


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
