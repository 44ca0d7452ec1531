"""What a checkpoint directory holds, and what is wrong with it, without loading anything.

One pass over the directories reads names, sizes and the small metadata files; torch is not
imported. Reading the objects as well, to verify their own checksums, is a second step.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

from dist_ckpt_strategies.errors import CheckpointNotFoundError
from dist_ckpt_strategies.spec.marker import CheckpointMarker
from dist_ckpt_strategies.storage.disk.files import COMMON_NAME, MARKER_NAME, require_directory
from dist_ckpt_strategies.storage.disk.folders import Folder, read_folder
from dist_ckpt_strategies.storage.findings import NO_FILE, Finding, Leftover, Problem, Watch
from dist_ckpt_strategies.storage.format1.contents import (
    FolderContents,
    count_contents,
    read_contents,
)
from dist_ckpt_strategies.storage.format1.layout import METADATA_NAME
from dist_ckpt_strategies.storage.format1.stored_arrays import StoredArray
from dist_ckpt_strategies.storage.lifecycle.marker_file import marker_or_finding
from dist_ckpt_strategies.storage.lifecycle.model_files import HOLDS_SAFETENSORS, are_safetensors
from dist_ckpt_strategies.storage.objects.stored import (
    StoredArchive,
    StoredObject,
    check_archives,
    check_shards,
    stored_objects,
)

_SHARDED_BACKENDS = (("zarr", 1),)
_COMMON_BACKENDS = (("torch", 1),)
_MAX_BARE = 1000
"""Directories to look at before a place without marker and common state is given up."""

_CHUNK_FOLDERS = re.compile(r"(?:/\d+)+\Z", re.ASCII)


@dataclass(frozen=True, slots=True)
class Survey:
    """What a checkpoint directory holds.

    Attributes:
        root: the directory, absolute.
        marker: None where it is missing or cannot be read.
        common: the file of the common state; None where it is missing.
        arrays: sorted by key.
        objects: sorted by key.
        leftovers: sorted by path; harmless, and only mentioned.
        findings: what names, sizes and metadata show to be wrong, sorted by key.
        num_files: all files below the directory.
        nbytes: their bytes.
    """

    root: Path
    marker: CheckpointMarker | None
    common: StoredArchive | None
    arrays: tuple[StoredArray, ...]
    objects: tuple[StoredObject, ...]
    leftovers: tuple[Leftover, ...]
    findings: tuple[Finding, ...]
    num_files: int
    nbytes: int

    @property
    def is_foreign(self) -> bool:
        """Whether another backend wrote the arrays, so that they were not looked for."""
        return self.marker is not None and not _is_known(self.marker)

    @property
    def archives(self) -> tuple[StoredArchive, ...]:
        """Every ``.pt`` file, the common state first."""
        shards = (shard for stored in self.objects for shard in stored.shards)
        archives = (StoredArchive(shard.id.key, shard.path, shard.nbytes) for shard in shards)
        return (*([self.common] if self.common else []), *archives)


def survey_checkpoint(root: Path, watch: Watch | None = None) -> Survey:
    """Look at every file of a checkpoint, without reading arrays or objects.

    A checkpoint of another sharded backend is counted, and not looked into.

    Args:
        root: the checkpoint directory.
        watch: told about directories, done and known so far.

    Raises:
        CheckpointNotFoundError: the directory does not exist, or is no checkpoint itself but
            holds some, or nothing of one was found in many directories.
    """
    root = root.absolute()
    require_directory(root)
    top, marker = read_folder(root, ""), marker_or_finding(root)
    foreign = isinstance(marker, CheckpointMarker) and not _is_known(marker)
    look = count_contents if foreign else partial(read_contents, root)
    is_bare = not {MARKER_NAME, COMMON_NAME} & top.files.keys()
    looked_at = _look_at_all(root, look, watch)
    contents = tuple(_given_up(root, looked_at) if is_bare else looked_at)
    common = top.files.get(COMMON_NAME)
    arrays = chain.from_iterable(found.arrays for found in contents)
    objects = stored_objects(chain.from_iterable(found.shards for found in contents))
    leftovers = chain.from_iterable(found.leftovers for found in contents)
    survey = Survey(
        root,
        marker if isinstance(marker, CheckpointMarker) else None,
        None if common is None else StoredArchive(None, COMMON_NAME, common),
        tuple(sorted(arrays, key=lambda stored: stored.array.key)),
        objects,
        tuple(sorted(leftovers, key=lambda leftover: leftover.path)),
        _by_key(chain(_check_top(marker, top), _check_all(contents, objects))),
        sum(found.num_files for found in contents),
        sum(found.nbytes for found in contents),
    )
    _require_checkpoint(survey, top)
    return survey


def check_survey(survey: Survey, watch: Watch | None = None) -> tuple[Finding, ...]:
    """Everything that can be told to be wrong with a checkpoint, by key; empty where it is whole.

    Every chunk file is there and of the right size, every grid of objects is complete, every
    ``.pt`` file fits its own checksums, the marker is there and known. The elements of arrays
    are not read: format 1 keeps no checksum of them, nor a list of the arrays.

    Args:
        survey: of the checkpoint.
        watch: told about bytes of objects.
    """
    return _by_key((*survey.findings, *check_archives(survey.root, survey.archives, watch)))


def _by_key(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    return tuple(sorted(findings, key=lambda finding: finding.key or ""))


def _look_at_all(
    root: Path, look: Callable[[Folder], FolderContents], watch: Watch | None
) -> Iterator[FolderContents]:
    waiting, done = [""], 0
    while waiting:
        contents = look(read_folder(root, waiting.pop()))
        yield contents
        yield from (look(read_folder(root, link)) for link in contents.links)
        waiting.extend(contents.folders)
        done += 1
        if watch:
            watch(done, done + len(waiting))


def _given_up(root: Path, contents: Iterable[FolderContents]) -> Iterator[FolderContents]:
    """The same; an error once many of them hold nothing of a checkpoint."""
    has_some = False
    for number, found in enumerate(contents):
        has_some = has_some or bool(found.arrays or found.shards)
        if number == _MAX_BARE and not has_some:
            raise CheckpointNotFoundError(
                f"{root} is no checkpoint: expected {MARKER_NAME} and {COMMON_NAME}, found "
                f"neither, and no array or object in the first {_MAX_BARE} directories below it",
                path=str(root),
            )
        yield found


def _require_checkpoint(survey: Survey, top: Folder) -> None:
    """Refuse a directory that only holds checkpoints, and say which; and one of a model's files."""
    if survey.marker or survey.common or survey.arrays or survey.objects:
        return
    if are_safetensors(top.files):
        raise CheckpointNotFoundError(
            f"{survey.root} is no checkpoint: {HOLDS_SAFETENSORS}", path=str(survey.root)
        )
    inner = [name for name in top.folders if (survey.root / name / MARKER_NAME).exists()]
    if inner:
        shown = ", ".join(inner[:3]) + (", ..." if len(inner) > len(inner[:3]) else "")
        raise CheckpointNotFoundError(
            f"{survey.root} is no checkpoint, but holds {len(inner)} ({shown}); name one of them",
            path=str(survey.root),
        )


def _is_known(marker: CheckpointMarker) -> bool:
    return (marker.sharded_backend, marker.sharded_backend_version) in _SHARDED_BACKENDS


def _check_top(marker: CheckpointMarker | Finding, top: Folder) -> Iterator[Finding]:
    """Findings about the files that every checkpoint has."""
    if isinstance(marker, Finding):
        yield marker
    else:
        sharded = marker.sharded_backend, marker.sharded_backend_version
        yield from _check_backend("sharded", sharded, _SHARDED_BACKENDS)
        common = marker.common_backend, marker.common_backend_version
        yield from _check_backend("common", common, _COMMON_BACKENDS)
        if common not in _COMMON_BACKENDS:
            return
    if COMMON_NAME not in top.files:
        expected = "the state that all ranks share"
        yield Finding(Problem.MISSING_COMMON, None, COMMON_NAME, expected, NO_FILE)


def _check_backend(
    which: str, found: tuple[str, int], known: tuple[tuple[str, int], ...]
) -> Iterator[Finding]:
    if found not in known:
        expected = " or ".join(f"{name} version {version}" for name, version in known)
        yield Finding(
            Problem.UNKNOWN_BACKEND,
            None,
            MARKER_NAME,
            f"{which} backend {expected}",
            f"{found[0]} version {found[1]}",
        )


def _check_all(
    contents: Iterable[FolderContents], objects: Iterable[StoredObject]
) -> Iterator[Finding]:
    described = set()
    orphans: Counter[str] = Counter()
    for found in contents:
        yield from found.findings
        if found.arrays or found.findings:
            described.add(found.key)
        # Chunks in numbered directories, w/0/1, belong to the directory above the numbers.
        orphans[_CHUNK_FOLDERS.sub("", found.key)] += found.num_orphans
    yield from _check_orphans(orphans, described)
    for stored in objects:
        yield from check_shards(stored)


def _check_orphans(orphans: Counter[str], described: Container[str]) -> Iterator[Finding]:
    """Chunk files without the metadata that says what they are."""
    for key, count in orphans.items():
        if count and key not in described:
            path, found = (
                f"{key}/{METADATA_NAME}",
                f"{NO_FILE}; files that look like chunks: {count}",
            )
            yield Finding(Problem.MISSING_METADATA, key, path, "the array's metadata", found)
