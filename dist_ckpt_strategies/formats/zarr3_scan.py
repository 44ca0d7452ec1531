"""Scan a ("zarr", 2) checkpoint, in a directory or an object store. Loads no torch.

The names of the files that are there, and their sizes where a list tells them, are compared with
the manifest. The digests are compared in a second step: zarr3_checks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from dist_ckpt_strategies.core.inner_grid import InnerGrid
from dist_ckpt_strategies.errors import (
    CheckpointError,
    IncompleteCheckpointError,
    StorageError,
)
from dist_ckpt_strategies.formats.issues import (
    NO_ANSWER,
    NO_FILE,
    Issue,
    Problem,
    StaleFile,
    StaleKind,
    check_marker,
    marker_or_issue,
    missing_common,
    require_no_inner,
    sharded_format,
    sorted_by_key,
)
from dist_ckpt_strategies.formats.manifest import (
    INDEX_NAME,
    MANIFEST_NAME,
    OBJECTS_NAME,
    SAVE_NAME,
    SCHEMA,
    ArrayRecord,
    FileDigest,
    ManifestIndex,
    ObjectRecord,
)
from dist_ckpt_strategies.formats.manifest_reader import Manifest
from dist_ckpt_strategies.formats.marker import CheckpointMarker
from dist_ckpt_strategies.formats.scanned import SaveBegun, Scan, ScannedArray, ScannedObject
from dist_ckpt_strategies.formats.zarr3 import (
    ARRAYS_NAME,
    METADATA_NAME,
    array_directory,
    metadata_content,
)
from dist_ckpt_strategies.formats.zarr3_checks import manifest_checks, pack_nbytes, packs_of
from dist_ckpt_strategies.storage.file_store import Directory, FileStore, nbytes_text
from dist_ckpt_strategies.storage.files import (
    COMMON_NAME,
    MARKER_NAME,
    MAX_JSON_NBYTES,
    PARTIAL_PREFIX,
    REMOVED_PREFIX,
    file_errors,
    folders_below,
    read_folder,
    require_directory,
)

if TYPE_CHECKING:  # TensorStore takes a while to import, and directories go without
    from dist_ckpt_strategies.storage.bucket import Bucket

FORMAT2 = ("zarr", 2)

_FOLDER_NAMES = (ARRAYS_NAME, OBJECTS_NAME, MANIFEST_NAME)
"""Directories, or the first parts of names, that hold all files but two."""

_TOP_NAMES = (MARKER_NAME, COMMON_NAME)
_CHUNK_PROBLEMS = Problem.MISSING_CHUNK, Problem.WRONG_CHUNK_SIZE
_COMMON_PROBLEMS = Problem.MISSING_COMMON, Problem.DAMAGED_COMMON
_MANIFEST_PROBLEMS = Problem.MISSING_MANIFEST, Problem.BAD_MANIFEST
_METADATA_PROBLEMS = Problem.MISSING_METADATA, Problem.BAD_METADATA
_PACK_PROBLEMS = Problem.MISSING_OBJECT, Problem.WRONG_FILE_SIZE
"""Of a file that is missing, and of one that has another size."""

_MISSING = -1


def scan_format2(place: Path | Bucket) -> Scan | None:
    """What a place holds; None where it is not of format 2. Reads the manifest, and no data.

    Args:
        place: the directory, or the place in an object store; errors as for ``scan``.
    """
    if isinstance(place, Path):
        place = place.absolute()
        there = _files_of_directory(place)
    else:
        there = _files_of_bucket(place)
    if there is None:
        return None
    store = there.file_store
    index, arrays, objects, of_manifest = _read_manifest(store)
    common = None if index is None else index.common
    files = _Comparison(there.files)
    common_nbytes = files.compare_common(common)
    scanned = tuple(map(files.compare_array, arrays))
    for name, records in packs_of(objects).items():
        nbytes = pack_nbytes(records)
        expected = f"{nbytes_text(nbytes)} of objects"
        files.expect(None, name, nbytes, _PACK_PROBLEMS, expected)
    if index is not None and not of_manifest:
        for entry in index.parts:
            expected = nbytes_text(entry.nbytes)
            files.expect(None, entry.name, entry.nbytes, _MANIFEST_PROBLEMS, expected)
        files.add_unexpected()
    stale = (
        StaleFile(StaleKind.PARTIAL, name, nbytes or 0)
        for name, nbytes in sorted(there.files.items())
        if _is_stale(name)
    )
    issues = (*check_marker(there.marker, FORMAT2), *of_manifest, *files.issues)
    return Scan(
        root=place,
        version=2,
        marker=there.marker if isinstance(there.marker, CheckpointMarker) else None,
        common_nbytes=common_nbytes,
        arrays=scanned,
        objects=tuple(_grids(objects)),
        stale_files=tuple(stale),
        issues=sorted_by_key(issues, then_by_path=True),
        num_files=len(there.files),
        nbytes=files.nbytes,
        checks=partial(manifest_checks, store, arrays, objects, common),
        num_threads=store.num_readers,
        begun=read_begun(store),
        index=index,
        others=there.others,
    )


def read_begun(file_store: FileStore) -> SaveBegun | None:
    """When and where the save to a place began; None where no file of a save says so."""
    try:
        fields = json.loads(file_store.read(SAVE_NAME)[:MAX_JSON_NBYTES])
        if fields["schema"] != SCHEMA:
            return None
        return SaveBegun(float(fields["time"]), str(fields["host"]))
    except NO_ANSWER:
        raise
    except (StorageError, ValueError, LookupError, TypeError):
        return None


@dataclass(frozen=True, slots=True)
class _Found:
    """What is there.

    Attributes:
        file_store: gives the content of the files.
        marker: of the checkpoint, or what is wrong with it.
        files: size of each of its files, by name; None where that is not known yet.
        others: names beside them, which are no part of it.
    """

    file_store: FileStore
    marker: CheckpointMarker | Issue
    files: Mapping[str, int | None]
    others: tuple[str, ...]


def _files_of_directory(root: Path) -> _Found | None:
    require_directory(root)
    file_store = Directory(root)
    marker = marker_or_issue(file_store)
    with file_errors(None, root / MANIFEST_NAME):  # which may not be looked into
        is_known = any((root / name).is_file() for name in (SAVE_NAME, INDEX_NAME))
    if not is_known and not _is_format2(marker):
        return None
    top = read_folder(root, "")
    files = {n: nbytes for n, nbytes in top.files.items() if n in _TOP_NAMES or _is_stale(n)}
    for folder in folders_below(root, [name for name in _FOLDER_NAMES if name in top.folders]):
        files |= {folder.path_of(name): nbytes for name, nbytes in folder.files.items()}
    names = {*top.files, *top.folders, *top.links, *top.others}
    others = sorted(n for n in names.difference(files, _FOLDER_NAMES) if not _is_stale(n))
    return _Found(file_store, marker, files, tuple(others))


def _files_of_bucket(bucket: Bucket) -> _Found | None:
    """One list of all names below the URL: those of the last save, and what is beside it."""
    from dist_ckpt_strategies.formats.bucket_commit import (  # noqa: PLC0415
        current_place,
        require_something,
        visible_place,
    )

    names = list(bucket.names(""))
    if not names:
        require_something(bucket)
    place = visible_place(bucket)
    prefix = str(place).removeprefix(str(bucket)).removeprefix("/")
    inner = [n.removeprefix(f"{prefix}/") for n in names if n.startswith(prefix and f"{prefix}/")]
    is_current = str(place) == str(current_place(bucket))
    marker = marker_or_issue(place if is_current else bucket)
    if not {SAVE_NAME, INDEX_NAME} & set(inner) and not _is_format2(marker):
        ends = (f"/{MARKER_NAME}", f"/{SAVE_NAME}")
        inner = sorted({n.partition("/")[0] for n in names if n[n.find("/") :] in ends})
        require_no_inner(bucket, inner)
        return None
    mine = [name for name in inner if _is_of_checkpoint(name)]
    others = {name.partition("/")[0] for name in inner if not _is_of_checkpoint(name)}
    if prefix:
        beside = {name.partition("/")[0] for name in names}
        others |= beside.difference({prefix, MARKER_NAME})
    return _Found(place, marker, dict.fromkeys(mine), tuple(sorted(others)))


def _is_format2(marker: CheckpointMarker | Issue) -> bool:
    return isinstance(marker, CheckpointMarker) and sharded_format(marker) == FORMAT2


def _is_stale(name: str) -> bool:
    """Whether a file was being written, or removed, when a process was killed."""
    return any(part.startswith((PARTIAL_PREFIX, REMOVED_PREFIX)) for part in name.split("/"))


def _is_of_checkpoint(name: str) -> bool:
    top, slash, _ = name.partition("/")
    return name in _TOP_NAMES or _is_stale(name) or (bool(slash) and top in _FOLDER_NAMES)


def _read_manifest(
    file_store: FileStore,
) -> tuple[ManifestIndex | None, list[ArrayRecord], list[ObjectRecord], list[Issue]]:
    """The manifest as far as it can be read, and what is missing or damaged.

    Returns:
        Its table of contents, if that can be read; the arrays and objects of the segments that can
        be read, sorted by key; the issues.

    Raises:
        IncompatibleVersionError: a later version of this package wrote it.
    """
    try:
        manifest = Manifest(file_store)
    except IncompleteCheckpointError:
        expected = "the manifest's table of contents"
        issue = Issue(Problem.MISSING_MANIFEST, None, INDEX_NAME, expected, NO_FILE)
        return None, [], [], [issue]
    except CheckpointError as error:
        if error.path is None:
            raise  # of a later version
        return None, [], [], [_bad_manifest(INDEX_NAME, error)]
    arrays: list[ArrayRecord] = []
    objects: list[ObjectRecord] = []
    issues: list[Issue] = []
    for entry in manifest.index.parts:
        try:
            of_entry = manifest.contents_of(entry)
        except CheckpointError as error:
            issues.append(_bad_manifest(entry.name, error))
        else:
            arrays += of_entry[0]
            objects += of_entry[1]
    return manifest.index, arrays, objects, issues


def _bad_manifest(name: str, error: CheckpointError) -> Issue:
    text = error.message.removeprefix(f"{error.path} ")
    return Issue(Problem.BAD_MANIFEST, None, name, "what the save wrote", text)


class _Comparison:
    """The files that are there, compared with those that the manifest lists.

    Args:
        files: size of each, by name; None where it is not known: the listed size counts then.

    Attributes:
        issues: what the comparison shows.
        nbytes: of all files whose size is known or listed.
    """

    def __init__(self, files: Mapping[str, int | None]) -> None:
        self._files = files
        self._listed: set[str] = set()
        self.issues: list[Issue] = []
        self.nbytes = sum(nbytes or 0 for nbytes in files.values())

    def expect(
        self,
        key: str | None,
        name: str,
        nbytes: int,
        problems: tuple[Problem, Problem],
        expected: str,
    ) -> int | None:
        """The size of a file that the manifest lists; None, and an issue, where it is missing."""
        self._listed.add(name)
        found = self._files.get(name, _MISSING)
        if found is None:
            self.nbytes += nbytes
            return nbytes
        if found == _MISSING:
            self.issues.append(Issue(problems[0], key, name, expected, NO_FILE))
            return None
        if found != nbytes:
            self.issues.append(Issue(problems[1], key, name, expected, nbytes_text(found)))
        return found

    def compare_common(self, listed: FileDigest | None) -> int | None:
        """The size of the common state's file; None where it is missing, or not known."""
        expected = "the state that all ranks share"
        if listed is not None:
            expected = f"{expected}, {nbytes_text(listed.nbytes)}"
            return self.expect(None, COMMON_NAME, listed.nbytes, _COMMON_PROBLEMS, expected)
        self._listed.add(COMMON_NAME)
        if COMMON_NAME not in self._files:
            self.issues.append(missing_common())
        return self._files.get(COMMON_NAME)

    def compare_array(self, record: ArrayRecord) -> ScannedArray:
        """The array, and what is there of its files."""
        array = record.array
        directory = array_directory(array.key)
        name, expected = f"{directory}/{METADATA_NAME}", "what other readers need to know"
        # Of any size: a load does without it. Its content is compared by its check.
        found = self._files.get(name)
        nbytes = len(metadata_content(array)) if found is None else found
        self.expect(array.key, name, nbytes, _METADATA_PROBLEMS, expected)
        grid = InnerGrid.of(array, (0,) * len(array.shape))
        sizes = []
        for index, chunk in record.chunks.items():
            nbytes = (chunk.num_digests - 1) * grid.stored_nbytes + grid.index_nbytes
            expected = f"{nbytes_text(nbytes)} (chunk {index}, written by rank {chunk.writer})"
            name = f"{directory}/{'.'.join(['c', *map(str, index)])}"
            sizes.append(self.expect(array.key, name, nbytes, _CHUNK_PROBLEMS, expected))
        there = [nbytes for nbytes in sizes if nbytes is not None]
        writers = tuple(sorted({chunk.writer for chunk in record.chunks.values()}))
        return ScannedArray(array, len(there), sum(there), writers)

    def add_unexpected(self) -> None:
        """Add an issue for each file that was not expected."""
        listed = {MARKER_NAME, SAVE_NAME, INDEX_NAME}
        for name in sorted(self._files.keys() - self._listed - listed):
            if not _is_stale(name):
                nbytes = self._files[name]
                expected = "no file that the manifest does not list"
                found = "an object" if nbytes is None else nbytes_text(nbytes)
                self.issues.append(Issue(Problem.UNEXPECTED_FILE, None, name, expected, found))


def _grids(objects: Sequence[ObjectRecord]) -> Iterator[ScannedObject]:
    by_key: dict[str, list[ObjectRecord]] = {}
    for record in objects:
        by_key.setdefault(record.id.key, []).append(record)
    for key, records in by_key.items():
        nbytes = sum(record.span.nbytes for record in records if record.span is not None)
        writers = tuple(sorted({record.writer for record in records}))
        shape = records[0].id.shape
        yield ScannedObject(key, shape, len(records), len(records), nbytes, writers)
