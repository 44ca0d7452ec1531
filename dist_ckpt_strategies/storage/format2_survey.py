"""What a checkpoint of format ("zarr", 2) holds, and what is wrong with it. Loads no torch.

One pass over the directories gives names and sizes, to be compared with the manifest. Comparing
every digest is a second step.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path

from dist_ckpt_strategies.errors import CheckpointError, IncompleteCheckpointError
from dist_ckpt_strategies.spec.array import ArraySpec
from dist_ckpt_strategies.spec.inner_grid import InnerGrid
from dist_ckpt_strategies.spec.manifest import ArrayRecord, ManifestIndex, ObjectRecord
from dist_ckpt_strategies.spec.marker import CheckpointMarker
from dist_ckpt_strategies.storage.contents import Leftover, LeftoverKind
from dist_ckpt_strategies.storage.files import (
    COMMON_NAME,
    MARKER_NAME,
    PARTIAL_PREFIX,
    REMOVED_PREFIX,
    read_file,
    require_directory,
)
from dist_ckpt_strategies.storage.findings import (
    NO_FILE,
    Finding,
    Problem,
    Watch,
    nbytes_text,
    unreadable,
)
from dist_ckpt_strategies.storage.folders import Folder, folders_below, read_folder, reason
from dist_ckpt_strategies.storage.format2_checks import (
    FileCheck,
    check_buffers,
    chunk_checks,
    common_check,
    metadata_check,
    object_check,
)
from dist_ckpt_strategies.storage.manifest import (
    INDEX_NAME,
    MANIFEST_NAME,
    OBJECTS_NAME,
    SAVE_NAME,
    Manifest,
)
from dist_ckpt_strategies.storage.marker_file import marker_or_finding
from dist_ckpt_strategies.storage.places import Directory
from dist_ckpt_strategies.storage.zarr2 import MAX_JSON_NBYTES
from dist_ckpt_strategies.storage.zarr3 import ARRAYS_NAME, METADATA_NAME, array_directory

_MARKED = ("zarr", 2)
_COMMON = ("torch", 1)


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
class RecordedArray:
    """An array of the manifest, and what is there of its files.

    Attributes:
        record: what the manifest says.
        num_files: chunk files that are there, of whatever size.
        file_nbytes: their bytes.
    """

    record: ArrayRecord
    num_files: int
    file_nbytes: int

    @property
    def writers(self) -> tuple[int, ...]:
        """The global ranks that wrote its files, sorted."""
        return tuple(sorted({chunk.writer for chunk in self.record.chunks.values()}))


@dataclass(frozen=True, slots=True)
class Format2Survey:
    """What a directory holds.

    Attributes:
        root: the directory, absolute.
        marker: None where it is missing or cannot be read.
        begun: when the save began; None where that cannot be read.
        index: the manifest's table of contents; None where it is missing or damaged.
        arrays: sorted by key; without those of parts that are damaged.
        objects: sorted; without those of parts that are damaged.
        common_nbytes: size of the common state's file; None where it is missing.
        leftovers: what killed processes have left, sorted; harmless.
        others: names beside the checkpoint's own, which the manifest says nothing about.
        findings: what names and sizes show to be wrong, sorted by key.
        num_files: files of the checkpoint.
        nbytes: their bytes.
        files: size of each, by name.
    """

    root: Path
    marker: CheckpointMarker | None
    begun: SaveBegun | None
    index: ManifestIndex | None
    arrays: tuple[RecordedArray, ...]
    objects: tuple[ObjectRecord, ...]
    common_nbytes: int | None
    leftovers: tuple[Leftover, ...]
    others: tuple[str, ...]
    findings: tuple[Finding, ...]
    num_files: int
    nbytes: int
    files: Mapping[str, int] = field(repr=False)

    @property
    def is_unfinished(self) -> bool:
        """Whether the save has not come to its end: there is no marker."""
        return any(finding.problem is Problem.MISSING_MARKER for finding in self.findings)


def is_format2(root: Path) -> bool:
    """Whether a directory is of format 2: by its manifest, its first file, or its marker."""
    if any((root / name).is_file() for name in (SAVE_NAME, INDEX_NAME)):
        return True
    marker = marker_or_finding(root)
    return isinstance(marker, CheckpointMarker) and _sharded(marker) == _MARKED


def survey_format2(root: Path, watch: Watch | None = None) -> Format2Survey | None:
    """What a directory holds; None where it is not of format 2. Reads the manifest, and no data.

    Args:
        root: the directory.
        watch: told about parts of the manifest.

    Raises:
        CheckpointNotFoundError: it does not exist.
        IncompatibleVersionError: a later version of this package wrote it.
    """
    root = root.absolute()
    require_directory(root)
    if not is_format2(root):
        return None
    top = read_folder(root, "")
    files = dict(_files(root, top))
    marker = marker_or_finding(root)
    found = _ManifestRead(root, watch)
    names = {record.array.key: tuple(_names_of(record)) for record in found.arrays}
    recorded = tuple(_recorded(r, names[r.array.key], files) for r in found.arrays)
    leftovers = tuple(
        Leftover(LeftoverKind.PARTIAL, name, files[name]) for name in files if _is_remains(name)
    )
    findings = [*_check_marker(marker), *found.findings, *_check_common(found.index, files)]
    findings += chain.from_iterable(
        _check_array(r, names[r.array.key], files) for r in found.arrays
    )
    findings += _check_packs(found.objects, files)
    if found.is_whole:
        findings += _check_unexpected(found, names, files)
    return Format2Survey(
        root,
        marker if isinstance(marker, CheckpointMarker) else None,
        read_begun(root),
        found.index,
        recorded,
        found.objects,
        files.get(COMMON_NAME),
        tuple(sorted(leftovers, key=lambda leftover: leftover.path)),
        _others(top),
        tuple(sorted(findings, key=lambda finding: (finding.key or "", finding.path))),
        len(files),
        sum(files.values()),
        files,
    )


def check_format2(survey: Format2Survey, watch: Watch | None = None) -> tuple[Finding, ...]:
    """The findings of a survey, and those of comparing every digest; sorted by key.

    As many threads read as there are processors; each takes a few MiB of memory.

    Args:
        survey: of the checkpoint.
        watch: told about bytes.
    """
    named = {finding.path for finding in survey.findings}
    checks = [check for check in _checks(survey) if check.name not in named]
    total, done = sum(check.nbytes for check in checks), 0
    findings = list(survey.findings)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0)), "dist-ckpt-verify") as pool:
        for check, found in zip(checks, pool.map(_run, checks), strict=True):
            findings += found
            done += check.nbytes
            if watch:
                watch(done, total)
    return tuple(sorted(findings, key=lambda finding: (finding.key or "", finding.path)))


def read_begun(root: Path) -> SaveBegun | None:
    """When and where the save to a directory began; None where nothing says so."""
    try:
        fields = json.loads(read_file(root / SAVE_NAME, MAX_JSON_NBYTES))
        return SaveBegun(float(fields["time"]), str(fields["host"]))
    except (OSError, ValueError, LookupError, TypeError):
        return None


class _ManifestRead:
    """The manifest, as far as it can be read, and what is wrong with the rest."""

    def __init__(self, root: Path, watch: Watch | None) -> None:
        self.index: ManifestIndex | None = None
        self.arrays: tuple[ArrayRecord, ...] = ()
        self.objects: tuple[ObjectRecord, ...] = ()
        self.findings: list[Finding] = []
        try:
            manifest = Manifest(Directory(root))
        except IncompleteCheckpointError:
            expected = "the manifest's table of contents"
            self.findings.append(
                Finding(Problem.MISSING_MANIFEST, None, INDEX_NAME, expected, NO_FILE)
            )
            return
        except CheckpointError as error:
            if error.path is None:
                raise  # of a later version
            self.findings.append(_bad_manifest(INDEX_NAME, error))
            return
        self.index = manifest.index
        arrays: list[ArrayRecord] = []
        objects: list[ObjectRecord] = []
        for number, entry in enumerate(manifest.index.parts, 1):
            try:
                of_part = manifest.contents_of(entry)
            except CheckpointError as error:
                self.findings.append(_bad_manifest(entry.name, error))
                continue
            arrays += of_part[0]
            objects += of_part[1]
            if watch:
                watch(number, len(manifest.index.parts))
        self.arrays, self.objects = tuple(arrays), tuple(objects)

    @property
    def is_whole(self) -> bool:
        return self.index is not None and not self.findings


def _bad_manifest(name: str, error: CheckpointError) -> Finding:
    text = error.message.removeprefix(f"{error.path} ")
    return Finding(Problem.BAD_MANIFEST, None, name, "what the save wrote", text)


def _files(root: Path, top: Folder) -> Iterator[tuple[str, int]]:
    """The checkpoint's own files, and what lies among them."""
    mine = (MARKER_NAME, COMMON_NAME)
    yield from (one for one in top.files.items() if one[0] in mine or _is_remains(one[0]))
    below = [name for name in (ARRAYS_NAME, OBJECTS_NAME, MANIFEST_NAME) if name in top.folders]
    for folder in folders_below(root, below):
        yield from ((folder.path_of(name), nbytes) for name, nbytes in folder.files.items())


def _is_remains(name: str) -> bool:
    return any(part.startswith((PARTIAL_PREFIX, REMOVED_PREFIX)) for part in name.split("/"))


def _others(top: Folder) -> tuple[str, ...]:
    mine = {MARKER_NAME, COMMON_NAME, ARRAYS_NAME, OBJECTS_NAME, MANIFEST_NAME}
    names = (*top.files, *top.folders, *top.links, *top.others)
    return tuple(sorted(name for name in names if name not in mine and not _is_remains(name)))


def _recorded(record: ArrayRecord, names: Sequence[str], files: Mapping[str, int]) -> RecordedArray:
    sizes = [files[name] for name in names[1:] if name in files]
    return RecordedArray(record, len(sizes), sum(sizes))


def _names_of(record: ArrayRecord) -> Iterator[str]:
    """The files of an array: its metadata, then its chunks in the order of their records."""
    directory = array_directory(record.array.key)
    yield f"{directory}/{METADATA_NAME}"
    for index in record.chunks:
        yield f"{directory}/{'.'.join(['c', *map(str, index)])}"


def _check_array(
    record: ArrayRecord, names: Sequence[str], files: Mapping[str, int]
) -> Iterator[Finding]:
    array = record.array
    if names[0] not in files:
        expected = "what other readers need to know"
        yield Finding(Problem.MISSING_METADATA, array.key, names[0], expected, NO_FILE)
    stored_nbytes, index_nbytes = _sizes(array)
    for (index, chunk), name in zip(record.chunks.items(), names[1:], strict=True):
        expected_nbytes = (chunk.num_digests - 1) * stored_nbytes + index_nbytes
        if files.get(name) == expected_nbytes:
            continue
        is_there = name in files
        yield Finding(
            Problem.WRONG_CHUNK_SIZE if is_there else Problem.MISSING_CHUNK,
            array.key,
            name,
            f"{nbytes_text(expected_nbytes)} (chunk {index}, written by rank {chunk.writer})",
            nbytes_text(files[name]) if is_there else NO_FILE,
        )


def _sizes(array: ArraySpec) -> tuple[int, int]:
    """Bytes of one inner chunk, and of the index of each chunk's file.

    Each inner chunk has a digest, and so has the index: the manifest was refused otherwise.
    """
    if not array.num_chunks:
        return 0, 0
    grid = InnerGrid.of(array, (0,) * len(array.shape))
    return grid.stored_nbytes, grid.index_nbytes


def _check_packs(objects: Sequence[ObjectRecord], files: Mapping[str, int]) -> Iterator[Finding]:
    ends: dict[str, int] = {}
    for span in (record.span for record in objects):
        if span is not None:
            ends[span.name] = max(ends.get(span.name, 0), span.byte_offset + span.nbytes)
    for name, end in ends.items():
        if files.get(name) != end:
            found = nbytes_text(files[name]) if name in files else NO_FILE
            problem = Problem.WRONG_FILE_SIZE if name in files else Problem.MISSING_OBJECT
            yield Finding(problem, None, name, f"{nbytes_text(end)} of objects", found)


def _check_common(index: ManifestIndex | None, files: Mapping[str, int]) -> Iterator[Finding]:
    listed = None if index is None else index.common
    if COMMON_NAME not in files:
        expected = "the state that all ranks share"
        yield Finding(Problem.MISSING_COMMON, None, COMMON_NAME, expected, NO_FILE)
    elif listed is not None and files[COMMON_NAME] != listed.nbytes:
        found = nbytes_text(files[COMMON_NAME])
        expected = nbytes_text(listed.nbytes)
        yield Finding(Problem.DAMAGED_COMMON, None, COMMON_NAME, expected, found)


def _check_unexpected(
    found: _ManifestRead, names: Mapping[str, Sequence[str]], files: Mapping[str, int]
) -> Iterator[Finding]:
    assert found.index is not None  # noqa: S101 - the manifest is whole
    listed = {MARKER_NAME, COMMON_NAME, SAVE_NAME, INDEX_NAME}
    listed.update(entry.name for entry in found.index.parts)
    listed.update(record.span.name for record in found.objects if record.span is not None)
    for record in found.arrays:
        listed.update(names[record.array.key])
    for name, nbytes in files.items():
        if name not in listed and not _is_remains(name):
            expected = "no file that the manifest does not list"
            yield Finding(Problem.UNEXPECTED_FILE, None, name, expected, nbytes_text(nbytes))


def _sharded(marker: CheckpointMarker) -> tuple[str, int]:
    return marker.sharded_backend, marker.sharded_backend_version


def _check_marker(marker: CheckpointMarker | Finding) -> Iterator[Finding]:
    if isinstance(marker, Finding):
        yield marker
        return
    common = marker.common_backend, marker.common_backend_version
    for which, found, expected in (
        ("sharded", _sharded(marker), _MARKED),
        ("common", common, _COMMON),
    ):
        if found != expected:
            yield Finding(
                Problem.UNKNOWN_BACKEND,
                None,
                MARKER_NAME,
                f"{which} backend {expected[0]} version {expected[1]}",
                f"{found[0]} version {found[1]}",
            )


def _checks(survey: Format2Survey) -> Iterator[FileCheck]:
    place, buffers = Directory(survey.root), check_buffers()
    for stored in survey.arrays:
        yield metadata_check(place, stored.record.array)
        yield from chunk_checks(place, stored.record, buffers)
    yield from filter(None, map(partial(object_check, place), survey.objects))
    if survey.index is not None and survey.index.common is not None:
        yield common_check(place, survey.index.common)


def _run(check: FileCheck) -> list[Finding]:
    try:
        return check.run()
    except CheckpointError as error:
        return [unreadable(check.key, check.name, error.message)]
    except OSError as error:
        return [unreadable(check.key, check.name, reason(error))]
