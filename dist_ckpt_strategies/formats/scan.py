"""Scan and verify a checkpoint of either format without loading it. Loads no torch.

A scan reads names, sizes and metadata. In format 1 it lists all directories; the metadata of arrays
and the names of objects say which files there should be. In format 2 the manifest lists all files.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple
from functools import partial
from itertools import groupby, product
from pathlib import Path
from typing import TYPE_CHECKING

from dist_ckpt_strategies.comm.shared_work import Count, Ranks, Watch
from dist_ckpt_strategies.config import Options
from dist_ckpt_strategies.core.array import UNKNOWN, ArraySpec, ObjectId, Shape
from dist_ckpt_strategies.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    IncompatibleVersionError,
    IncompleteCheckpointError,
    StorageError,
)
from dist_ckpt_strategies.formats.chunks import ZARR_JSON
from dist_ckpt_strategies.formats.file_checks import manifest_files
from dist_ckpt_strategies.formats.issues import (
    COMMON_FORMAT,
    MAX_LISTED,
    NO_ANSWER,
    NO_FILE,
    FileCheck,
    Issue,
    Problem,
    SaveBegun,
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
    CheckpointMarker,
    Location,
    current_place,
    holds_checkpoints,
    holds_packs,
    other_contents,
    require_something,
    visible_place,
)
from dist_ckpt_strategies.formats.manifest import (
    FOLDER_NAMES,
    INDEX_NAME,
    MANIFEST_NAME,
    SAVE_NAME,
    SCHEMA,
    ArrayRecord,
    Manifest,
    ObjectRecord,
)
from dist_ckpt_strategies.formats.objects import OBJECT_SUFFIX, file_damage, shard_id
from dist_ckpt_strategies.formats.pack_scan import scan_packs
from dist_ckpt_strategies.formats.zarr2 import LOCKS_SUFFIX, METADATA_NAME, parse_metadata
from dist_ckpt_strategies.storage.bucket import Bucket
from dist_ckpt_strategies.storage.files import (
    COMMON_NAME,
    MARKER_NAME,
    MAX_JSON_NBYTES,
    PARTIAL_PREFIX,
    REMOVED_PREFIX,
    Directory,
    Folder,
    block_sizes,
    file_errors,
    folders_below,
    nbytes_text,
    read_file,
    read_folder,
    reason,
    require_directory,
)
from dist_ckpt_strategies.storage.store import Store

if TYPE_CHECKING:  # torch takes a while to import
    from dist_ckpt_strategies.comm.base import Communicator

_FORMAT1, _FORMAT2 = ("zarr", 1), ("zarr", 2)

_NUM_THREADS = 8
"""That read objects of format 1: many small files, on a file system that may be far away."""

_CHUNK_NAME = re.compile(r"\d+(?:\.\d+)*", re.ASCII)
_CHUNK_FOLDERS = re.compile(r"(?:/\d+)+\Z", re.ASCII)
_SUFFIX = f"/{METADATA_NAME}"

_TEMPORARY_SUFFIXES = (".__lock", ".partial")
"""Files that TensorStore and zarr-python rename once they are whole."""

_TOP_NAMES = (MARKER_NAME, COMMON_NAME)
_FOLDERS = tuple(f"{name}/" for name in FOLDER_NAMES)
_UNLISTED_NAMES = (MARKER_NAME, COMMON_NAME, SAVE_NAME, INDEX_NAME)
"""Files that belong to a checkpoint of format 2, though the manifest may not list them."""


def scan(place: Location, watch: Watch | None = None) -> Scan:
    """What a checkpoint holds, and what is wrong with it, by names, sizes and metadata.

    Reads no array and no object; ``verify`` compares their bytes. A checkpoint of another sharded
    backend is counted, and not looked into. In format 1 ``watch`` is called with the directories
    done and known so far.

    Raises:
        CheckpointNotFoundError: it does not exist, or there is nothing of a checkpoint; says which
            ones it holds.
        IncompatibleVersionError: a later version of this package wrote it, or an object store
            holds something else than format ("zarr", 2).
        BucketNotFoundError, StoreAccessError, StoreUnreachableError: the store does not answer.
    """
    if isinstance(place, Path):
        place = place.absolute()
        require_directory(place)
    if holds_packs(place):
        return scan_packs(place, Options())
    if isinstance(place, Path):
        listed = _files_of_directory(place)
        return _scan_format1(place, watch) if listed is None else _scan_format2(place, *listed)
    return _scan_format2(place, *_files_of_bucket(place))


def verify(
    scan: Scan, watch: Watch | None = None, *, comm: Communicator | None = None
) -> tuple[Issue, ...]:
    """The issues of a scan, and those of comparing every byte with its digest; sorted by key.

    Format 1 keeps checksums of objects and the common state alone, and no list of its arrays: their
    files are read, and only names and sizes are compared. Each thread takes a few MiB of memory, or
    those of the object that it looks at. ``watch`` is called with bytes.

    Collective if ``comm`` has several ranks: each reads its share of the files, and all return the
    same.

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


def _scan_format1(root: Path, watch: Watch | None) -> Scan:
    top, (marker, issues) = read_folder(root, ""), checked_marker(Directory(root), _FORMAT1)
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


def _check_readable(store: Store, path: str, nbytes: int) -> Iterator[Issue]:
    """Read a chunk, of which there is no digest: raises where that fails."""
    for _ in store.read_blocks(path, block_sizes(nbytes, store.block_nbytes)):
        pass
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


_Listed = tuple[Store, CheckpointMarker | None, list[Issue], dict[str, int | None], tuple[str, ...]]
"""What gives the content of files; the marker, and what is wrong with it; the size of each of the
checkpoint's files by name, None where a listing has none; names beside them."""


def _files_of_directory(root: Path) -> _Listed | None:
    """None where the directory is not of format 2."""
    top, store = read_folder(root, ""), Directory(root)
    _require_listed(root, top)
    marker, issues = checked_marker(store, _FORMAT2)
    with file_errors(None, root / MANIFEST_NAME):  # which may not be looked into
        is_known = any((root / name).is_file() for name in (SAVE_NAME, INDEX_NAME))
    if not is_known and not (marker and marker.sharded_format == _FORMAT2):
        return None
    files: dict[str, int | None] = {n: size for n, size in top.files.items() if _is_own(n)}
    for folder in folders_below(root, [name for name in FOLDER_NAMES if name in top.folders]):
        _require_listed(root, folder)
        files |= {folder.path_of(name): nbytes for name, nbytes in folder.files.items()}
    names = {*top.files, *top.folders, *top.links, *top.others}
    others = sorted(n for n in names.difference(files, FOLDER_NAMES) if not _is_stale(n))
    return store, marker, issues, files, tuple(others)


def _require_listed(root: Path, folder: Folder) -> None:
    if folder.failure:
        path = root / folder.key
        raise StorageError(f"{path} cannot be listed: {folder.failure}", path=str(path))


def _files_of_bucket(bucket: Bucket) -> _Listed:
    """One list of all names below the URL: those of the last save, and what is beside it."""
    names = bucket.names()
    if not names:
        require_something(bucket)
    place = visible_place(bucket)
    prefix = str(place).removeprefix(str(bucket)).removeprefix("/")
    inner = [n.removeprefix(f"{prefix}/") for n in names if n.startswith(prefix and f"{prefix}/")]
    is_current = str(place) == str(current_place(bucket))
    marker, issues = checked_marker(place if is_current else bucket, _FORMAT2)
    is_known = bool({SAVE_NAME, INDEX_NAME} & set(inner))
    if not is_known and not (marker and marker.sharded_format == _FORMAT2):
        ends = (f"/{MARKER_NAME}", f"/{SAVE_NAME}")
        inner = sorted({n.partition("/")[0] for n in names if n[n.find("/") :] in ends})
        if inner:
            text = f"{bucket} is no checkpoint: {holds_checkpoints(inner)}"
            raise CheckpointNotFoundError(text, path=str(bucket))
        raise IncompatibleVersionError(
            f"{bucket} holds objects, but no checkpoint of format ('zarr', 2), the only format in "
            "object stores; check the URL"
        )
    own = filter(_is_own, inner)
    others = {name.partition("/")[0] for name in inner if not _is_own(name)}
    if prefix:
        beside = {name.partition("/")[0] for name in names}
        others |= beside.difference({prefix, MARKER_NAME})
    return place, marker, issues, dict.fromkeys(own), tuple(sorted(others))


def _is_stale(name: str) -> bool:
    """Whether a file was being written, or removed, when a process was killed."""
    return any(part.startswith((PARTIAL_PREFIX, REMOVED_PREFIX)) for part in name.split("/"))


def _is_own(name: str) -> bool:
    """Whether a file belongs to a checkpoint of format 2, or to what a killed save left of one."""
    return name in _TOP_NAMES or _is_stale(name) or name.startswith(_FOLDERS)


def _scan_format2(
    place: Location,
    store: Store,
    marker: CheckpointMarker | None,
    issues: list[Issue],
    files: dict[str, int | None],
    others: tuple[str, ...],
) -> Scan:
    """Compare the files of a checkpoint with its manifest; see ``_Listed``."""
    manifest, arrays, objects, of_manifest = _read_manifest(store)
    common = None if manifest is None else manifest.common
    checks = partial(manifest_files, store, arrays, objects, common)
    of_files: list[Issue] = []
    listed = set(_UNLISTED_NAMES)
    scanned = []
    chunks: dict[str, list[int]] = defaultdict(list)
    for check in checks():
        listed.add(check.name)
        of_files += compared(check, files)
        if check.name in files:
            nbytes = files[check.name]
            nbytes = files[check.name] = check.nbytes if nbytes is None else nbytes
            if check.key is not None and not check.name.endswith(ZARR_JSON):
                chunks[check.key].append(nbytes)
    for record in arrays:
        writers = tuple(sorted({chunk.writer for chunk in record.chunks.values()}))
        sizes = chunks[record.array.key]
        scanned.append(ScannedArray(record.array, len(sizes), sum(sizes), writers))
    if common is None and COMMON_NAME not in files:
        of_files.append(missing_common())
    if manifest is not None and not of_manifest:
        of_files += _unlisted(files, listed, manifest)
    stale = sorted((name, nbytes or 0) for name, nbytes in files.items() if _is_stale(name))
    of_files.sort(key=lambda issue: issue.path)
    return Scan(
        root=place,
        backend=_FORMAT2,
        marker=marker,
        common_nbytes=files.get(COMMON_NAME),
        arrays=tuple(scanned),
        objects=tuple(_grids(objects)),
        stale_files=tuple(StaleFile(StaleKind.PARTIAL, *one) for one in stale),
        issues=sorted_by_key([*issues, *of_manifest, *of_files]),
        num_files=len(files),
        nbytes=sum(nbytes or 0 for nbytes in files.values()),
        checks=checks,
        num_threads=store.num_readers,
        begun=read_begun(store),
        manifest=manifest,
        others=others,
    )


def _unlisted(
    files: dict[str, int | None], listed: set[str], manifest: Manifest
) -> Iterator[Issue]:
    """An issue for each file that the manifest, all of which was read, does not list."""
    for segment in manifest.segments:
        listed.add(segment.name)
        if files.get(segment.name, 0) is None:
            files[segment.name] = segment.nbytes
    for name in sorted(files.keys() - listed):
        if not _is_stale(name):
            nbytes = files[name]
            expected = "no file that the manifest does not list"
            found = "an object" if nbytes is None else nbytes_text(nbytes)
            yield Issue(Problem.UNEXPECTED_FILE, None, name, expected, found)


def read_begun(store: Store) -> SaveBegun | None:
    """When and where the save to a place began; None where no file of a save says so."""
    try:
        fields = json.loads(store.read(SAVE_NAME)[:MAX_JSON_NBYTES])
        if fields["schema"] != SCHEMA:
            return None
        return SaveBegun(float(fields["time"]), str(fields["host"]))
    except NO_ANSWER:
        raise
    except (StorageError, ValueError, LookupError, TypeError):
        return None


def _read_manifest(
    store: Store,
) -> tuple[Manifest | None, list[ArrayRecord], list[ObjectRecord], list[Issue]]:
    """The manifest as far as it can be read, sorted by key, and what is missing or damaged."""
    arrays: list[ArrayRecord] = []
    objects: list[ObjectRecord] = []
    issues: list[Issue] = []
    try:
        manifest = Manifest(store)
    except CheckpointError as error:
        if error.path is None:
            raise  # of a later version
        return None, [], [], [_bad_manifest(INDEX_NAME, error)]
    for segment in manifest.segments:
        try:
            of_segment = manifest.contents_of(segment)
        except CheckpointError as error:
            issues.append(_bad_manifest(segment.name, error))
        else:
            arrays += of_segment[0]
            objects += of_segment[1]
    return manifest, arrays, objects, issues


def _bad_manifest(name: str, error: CheckpointError) -> Issue:
    if isinstance(error, IncompleteCheckpointError):
        return Issue(Problem.MISSING_FILE, None, name, "a file of the manifest", NO_FILE)
    text = error.message.removeprefix(f"{error.path} ").removeprefix("is damaged: ")
    return Issue(Problem.DAMAGED, None, name, "what the save wrote", text)


def _grids(objects: Sequence[ObjectRecord]) -> Iterator[ScannedObject]:
    for key, group in groupby(objects, lambda record: record.id.key):
        records = list(group)
        nbytes = sum(record.span.nbytes for record in records if record.span is not None)
        writers = tuple(sorted({record.writer for record in records}))
        shape = records[0].id.shape
        yield ScannedObject(key, shape, len(records), len(records), nbytes, writers)
