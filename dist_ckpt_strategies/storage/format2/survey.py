"""What a checkpoint of format ("zarr", 2) holds, and what is wrong with it. Loads no torch.

One pass over the directories gives names and sizes, to be compared with the manifest. Comparing
every digest is a second step.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from dist_ckpt_strategies.errors import (
    BucketNotFoundError,
    CheckpointError,
    StoreAccessError,
    StoreUnreachableError,
)
from dist_ckpt_strategies.spec.manifest import ArrayRecord, ManifestIndex, ObjectRecord
from dist_ckpt_strategies.spec.marker import CheckpointMarker
from dist_ckpt_strategies.storage.disk.files import COMMON_NAME, MARKER_NAME
from dist_ckpt_strategies.storage.disk.folders import reason
from dist_ckpt_strategies.storage.file_store import Directory, FileStore
from dist_ckpt_strategies.storage.findings import (
    Finding,
    Leftover,
    LeftoverKind,
    Problem,
    Watch,
    unreadable,
)
from dist_ckpt_strategies.storage.format2.checks import (
    FileCheck,
    check_buffers,
    chunk_checks,
    common_check,
    metadata_check,
    object_check,
    pack_ends,
)
from dist_ckpt_strategies.storage.format2.files import (
    FORMAT2,
    FoundFiles,
    SaveBegun,
    files_of_directory,
    is_remains,
    read_begun,
    sharded_format,
)
from dist_ckpt_strategies.storage.format2.listed_files import check_files, names_of, sized_files
from dist_ckpt_strategies.storage.format2.readable_manifest import ReadableManifest

if TYPE_CHECKING:  # TensorStore takes a while to import, and directories go without
    from dist_ckpt_strategies.storage.buckets.bucket import Bucket

    Location = Path | Bucket

_ChunkChecks = Callable[[ArrayRecord], Iterator[FileCheck]]

_COMMON = ("torch", 1)


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
        root: the directory, absolute, or the place in an object store.
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
        nbytes: their bytes; of an object store, of those whose size the manifest lists.
        files: size of each, by name; None where only reading would tell.
    """

    root: Location
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
    files: Mapping[str, int | None] = field(repr=False)

    @property
    def has_sizes(self) -> bool:
        """Whether the sizes of files were compared; an object store's list has names alone."""
        return isinstance(self.root, Path)

    @property
    def is_unfinished(self) -> bool:
        """Whether the save has not come to its end: there is no marker."""
        return any(finding.problem is Problem.MISSING_MARKER for finding in self.findings)


def survey_format2(root: Location) -> Format2Survey | None:
    """What a place holds; None where it is not of format 2. Reads the manifest, and no data.

    Args:
        root: the directory, or the place in an object store. That tells names, and no sizes.

    Raises:
        CheckpointNotFoundError: it does not exist; in an object store also where it is no
            checkpoint itself but holds some.
        IncompatibleVersionError: a later version of this package wrote it.
        BucketNotFoundError, StoreAccessError, StoreUnreachableError: nothing can be told.
    """
    there = files_of_directory(root.absolute()) if isinstance(root, Path) else _of_bucket(root)
    if there is None:
        return None
    found = ReadableManifest(there.file_store)
    names = {record.array.key: tuple(names_of(record)) for record in found.arrays}
    files = sized_files(there.files, found, names)
    leftovers = (
        Leftover(LeftoverKind.PARTIAL, name, nbytes or 0)
        for name, nbytes in files.items()
        if is_remains(name)
    )
    marker = there.marker
    return Format2Survey(
        root.absolute() if isinstance(root, Path) else root,
        marker if isinstance(marker, CheckpointMarker) else None,
        read_begun(there.file_store),
        found.index,
        tuple(_recorded(r, names[r.array.key], files) for r in found.arrays),
        found.objects,
        files.get(COMMON_NAME),
        tuple(sorted(leftovers, key=lambda leftover: leftover.path)),
        there.others,
        _sorted((*_check_marker(marker), *found.findings, *check_files(found, names, files))),
        len(files),
        sum(nbytes or 0 for nbytes in files.values()),
        files,
    )


def _of_bucket(bucket: Bucket) -> FoundFiles | None:
    from dist_ckpt_strategies.storage.buckets.files import files_of_bucket  # noqa: PLC0415

    return files_of_bucket(bucket)


def _sorted(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    return tuple(sorted(findings, key=lambda finding: (finding.key or "", finding.path)))


def check_format2(survey: Format2Survey, watch: Watch | None = None) -> tuple[Finding, ...]:
    """The findings of a survey, and those of comparing every digest; sorted by key.

    As many threads read as there are processors, and from an object store 16; each takes a few MiB
    of memory, or those of the object that it looks at.

    Args:
        survey: of the checkpoint.
        watch: told about bytes.

    Raises:
        StoreAccessError, StoreUnreachableError: an object store does not answer any more.
    """
    findings = [*survey.findings, *_check_pack_sizes(survey)]
    named = {finding.path for finding in findings}
    checks = [check for check in _checks(survey) if check.name not in named]
    total, done = sum(check.nbytes for check in checks), 0
    with ThreadPoolExecutor(_num_threads(survey), "dist-ckpt-verify") as pool:
        for check, found in zip(checks, pool.map(_run, checks), strict=True):
            findings += found
            done += check.nbytes
            if watch:
                watch(done, total)
    return _sorted(findings)


def _num_threads(survey: Format2Survey) -> int:
    if isinstance(survey.root, Path):
        return len(os.sched_getaffinity(0))
    from dist_ckpt_strategies.storage.buckets.files import NUM_THREADS  # noqa: PLC0415

    return NUM_THREADS


def _recorded(
    record: ArrayRecord, names: Sequence[str], files: Mapping[str, int | None]
) -> RecordedArray:
    sizes = [files[name] or 0 for name in names[1:] if name in files]
    return RecordedArray(record, len(sizes), sum(sizes))


def _check_pack_sizes(survey: Format2Survey) -> Iterator[Finding]:
    """What only asking for sizes shows: an object store's list does not tell them."""
    if isinstance(survey.root, Path):
        return
    from dist_ckpt_strategies.storage.buckets.files import size_finding  # noqa: PLC0415

    for name, end in pack_ends(survey.objects).items():
        found = size_finding(survey.root, name, end) if name in survey.files else None
        if found is not None:
            yield found


def _check_marker(marker: CheckpointMarker | Finding) -> Iterator[Finding]:
    if isinstance(marker, Finding):
        yield marker
        return
    common = marker.common_backend, marker.common_backend_version
    for which, found, expected in (
        ("sharded", sharded_format(marker), FORMAT2),
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
    root = survey.root
    file_store, chunks = (_on_disk(root)) if isinstance(root, Path) else _in_bucket(root)
    for stored in survey.arrays:
        yield metadata_check(file_store, stored.record.array)
        yield from chunks(stored.record)
    yield from filter(None, map(partial(object_check, file_store), survey.objects))
    if survey.index is not None and survey.index.common is not None:
        yield common_check(file_store, survey.index.common)


def _on_disk(root: Path) -> tuple[FileStore, _ChunkChecks]:
    file_store = Directory(root)
    return file_store, partial(chunk_checks, file_store, buffers=check_buffers())


def _in_bucket(bucket: Bucket) -> tuple[FileStore, _ChunkChecks]:
    from dist_ckpt_strategies.storage.buckets.files import bucket_chunk_checks  # noqa: PLC0415

    return bucket, partial(bucket_chunk_checks, bucket)


def _run(check: FileCheck) -> list[Finding]:
    try:
        return check.run()
    except (StoreAccessError, StoreUnreachableError, BucketNotFoundError):
        raise  # no other object would be read either
    except CheckpointError as error:
        return [unreadable(check.key, check.name, error.message)]
    except OSError as error:
        return [unreadable(check.key, check.name, reason(error))]
