"""What a directory of local checkpoints holds, and what is wrong with it; torch is not imported.

One pass reads names, sizes and headers. Comparing every tensor with its digest is a second step.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from dist_ckpt_strategies.errors import CheckpointError
from dist_ckpt_strategies.spec.marker import CheckpointMarker
from dist_ckpt_strategies.spec.part import Part, PartId
from dist_ckpt_strategies.storage.disk.files import (
    COMMON_NAME,
    MARKER_NAME,
    MAX_JSON_NBYTES,
    PARTIAL_PREFIX,
    read_file,
    require_directory,
)
from dist_ckpt_strategies.storage.disk.folders import Folder, read_folder, reason
from dist_ckpt_strategies.storage.findings import (
    NO_FILE,
    Finding,
    Leftover,
    LeftoverKind,
    Problem,
    Watch,
    unreadable,
)
from dist_ckpt_strategies.storage.parts.files import SUFFIX, PartReader, is_being_written
from dist_ckpt_strategies.storage.parts.format import StoredPart

BACKEND = "local_replicated"

_RANK = re.compile(r"0|[1-9]\d*", re.ASCII)
_BLOCK_NBYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class StoredCopy:
    """A file that is named like a part.

    Attributes:
        part_id: what its name says.
        path: relative to the directory that was looked at, ``/`` between parts.
        holder: the global rank that keeps it.
        nbytes: its size.
        part: what its header describes; None where that is damaged.
    """

    part_id: PartId
    path: str
    holder: int
    nbytes: int
    part: Part | None


@dataclass(frozen=True, slots=True)
class PartSurvey:
    """What there is of local checkpoints.

    Attributes:
        root: the directory, absolute.
        copies: the newest save first; within it sorted by rank and path.
        leftovers: files that a save did not finish, sorted by path.
        findings: what names, sizes and headers show to be wrong, sorted by path.
    """

    root: Path
    copies: tuple[StoredCopy, ...]
    leftovers: tuple[Leftover, ...]
    findings: tuple[Finding, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all copies."""
        return sum(copy.nbytes for copy in self.copies)


def survey_parts(root: Path) -> PartSurvey | None:
    """Look at the parts of local checkpoints; None where there are none, nor remains of any.

    Args:
        root: what a manager was given, one session's directory in it, one rank's in that, or the
            directory of one checkpoint of the backend.

    Raises:
        CheckpointNotFoundError: the directory does not exist.
    """
    root = root.absolute()
    require_directory(root)
    top = read_folder(root, "")
    backend = _backend(root, top)
    if backend not in {None, BACKEND}:
        return None
    copies: list[StoredCopy] = []
    leftovers: list[Leftover] = []
    findings: list[Finding] = []
    for folder in _holder_folders(root, top):
        if folder.failure:
            findings.append(unreadable(None, folder.key or ".", folder.failure))
        leftovers.extend(_leftovers(root, folder))
        for copy, damage in _copies(root, folder):
            copies.append(copy)
            findings.extend(damage)
    is_local = backend or copies or (leftovers and COMMON_NAME not in top.files)
    if not is_local:
        return None
    if backend and not copies:
        expected = "a part of the checkpoint"
        findings.append(Finding(Problem.MISSING_PART, None, ".", expected, NO_FILE))
    findings.extend(_check_homes(root, copies))
    copies.sort(key=lambda copy: (copy.part_id.global_rank, copy.path))
    copies.sort(key=lambda copy: copy.part_id.save, reverse=True)
    return PartSurvey(
        root, tuple(copies), tuple(sorted(leftovers, key=lambda one: one.path)), _sorted(findings)
    )


def check_parts(survey: PartSurvey, watch: Watch | None = None) -> tuple[Finding, ...]:
    """The findings of a survey, and those of comparing every tensor with its digest.

    Args:
        survey: what there is.
        watch: told about bytes.
    """
    findings = list(survey.findings)
    done = 0
    for copy in survey.copies:
        if copy.part is not None:
            findings.extend(check_part(survey.root, copy.path))
        done += copy.nbytes
        if watch:
            watch(done, survey.nbytes)
    return _sorted(findings)


def check_part(root: Path, path: str) -> Iterator[Finding]:
    """What is wrong with the file of a part: its header, or tensors that are not as stored.

    Args:
        root: the directory that was looked at.
        path: the file, relative to it.
    """
    try:
        with PartReader(root / path) as reader:
            yield from _check_buffers(reader, path)
    except CheckpointError as error:
        yield _damaged(root, path, error)


def _check_buffers(reader: PartReader, path: str) -> Iterator[Finding]:
    stored = reader.stored
    memory = np.empty(_BLOCK_NBYTES, np.uint8)
    for number, (buffer, expected) in enumerate(
        zip(stored.part.buffers, stored.digests, strict=True)
    ):
        found = _digest(reader, stored, number, memory)
        if found != expected:
            yield Finding(
                Problem.DAMAGED_TENSOR,
                buffer.name,
                path,
                f"digest {expected:016x}",
                f"{found:016x}",
            )


def _digest(reader: PartReader, stored: StoredPart, number: int, memory: Any) -> int:
    digest = xxhash.xxh3_64()
    start, nbytes = stored.layout.byte_offsets[number], stored.part.buffers[number].nbytes
    for begin in range(0, nbytes, _BLOCK_NBYTES):
        block = memory[: min(_BLOCK_NBYTES, nbytes - begin)]
        reader.read(start + begin, block)
        digest.update(block.data)
    return digest.intdigest()


def _damaged(root: Path, path: str, error: CheckpointError) -> Finding:
    why = error.message.removeprefix(f"{root / path}: ")
    return Finding(Problem.DAMAGED_PART, None, path, "a part whose header fits its digest", why)


def _backend(root: Path, top: Folder) -> str | None:
    """The backend that the marker names; None without one, or where it cannot be read."""
    if MARKER_NAME in top.files:
        with suppress(OSError, ValueError, TypeError):
            content = read_file(root / MARKER_NAME, MAX_JSON_NBYTES)
            return str(CheckpointMarker.from_json(content).sharded_backend)
    return None


def _holder_folders(root: Path, top: Folder) -> Iterator[Folder]:
    """The directories of ranks: this one, those in it, and those one further down."""
    if _RANK.fullmatch(root.name):
        yield top
    for name in top.folders:
        if _RANK.fullmatch(name):
            yield read_folder(root, name)
    for name in top.folders:
        inner = read_folder(root, name)
        for rank in filter(_RANK.fullmatch, inner.folders):
            yield read_folder(root, inner.path_of(rank))


def _leftovers(root: Path, folder: Folder) -> Iterator[Leftover]:
    for name, nbytes in folder.files.items():
        if name.startswith(PARTIAL_PREFIX):
            path = folder.path_of(name)
            kind = LeftoverKind.PARTIAL
            with suppress(OSError):
                kind = LeftoverKind.WRITING if is_being_written(root / path) else kind
            yield Leftover(kind, path, nbytes)


def _copies(root: Path, folder: Folder) -> Iterator[tuple[StoredCopy, list[Finding]]]:
    """Every part of a rank's directory, and what its header shows to be wrong."""
    holder = int(os.path.basename(folder.key or root))  # noqa: PTH119 - of a text or a path
    names = (*folder.files, *folder.folders, *folder.links, *folder.others)
    for name in names:
        part_id = PartId.parse(name.removesuffix(SUFFIX))
        if part_id is None or not name.endswith(SUFFIX):
            continue
        path, part, damage = folder.path_of(name), None, []
        try:
            with PartReader(root / path) as reader:
                part = reader.stored.part
        except CheckpointError as error:
            damage.append(_damaged(root, path, error))
        yield StoredCopy(part_id, path, holder, folder.files.get(name, 0), part), damage


def _check_homes(root: Path, copies: Iterable[StoredCopy]) -> Iterator[Finding]:
    """Whether ``common.pt`` is the one that the newest part beside it states, if one does."""
    newest: dict[str, StoredCopy] = {}
    for copy in copies:
        home = copy.path.rpartition("/")[0].rpartition("/")[0]
        best = newest.get(home)
        if copy.part is not None and "/" in copy.path:
            newest[home] = copy if best is None or copy.part_id > best.part_id else best
    for home, copy in newest.items():
        expected = _common_digest(copy.part)
        if expected is not None:
            yield from _check_common(
                root, f"{home}/{COMMON_NAME}" if home else COMMON_NAME, expected
            )


def _check_common(root: Path, path: str, expected: str) -> Iterator[Finding]:
    try:
        found = xxhash.xxh3_128_hexdigest(read_file(root / path))
    except FileNotFoundError:
        yield Finding(Problem.MISSING_COMMON, None, path, "the state that all ranks share", NO_FILE)
    except OSError as error:
        yield unreadable(None, path, reason(error))
    else:
        if found != expected:
            yield Finding(Problem.DAMAGED_COMMON, None, path, f"digest {expected}", found)


def _common_digest(part: Part | None) -> str | None:
    """The digest of ``common.pt`` that a part of the backend states."""
    content = part.content if part is not None else None
    common = content.get("common") if isinstance(content, dict) else None
    digest = common.get("common_digest") if isinstance(common, dict) else None
    return digest if isinstance(digest, str) else None


def _sorted(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    return tuple(sorted(findings, key=lambda finding: finding.path))
