"""What can be wrong with a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from dist_ckpt_strategies.spec.region import Extent

MAX_LISTED = 1000
"""Missing files of one key that have a finding each; one more finding stands for the others."""

NO_FILE = "no file"

Watch = Callable[[int, int], None]
"""Told how much of a step is done and how much there is; the second may still grow."""


class Problem(StrEnum):
    """The kinds of damage; the values are part of the command's JSON."""

    MISSING_MARKER = "missing_marker"
    BAD_MARKER = "bad_marker"
    UNKNOWN_BACKEND = "unknown_backend"
    MISSING_COMMON = "missing_common"
    MISSING_METADATA = "missing_metadata"
    BAD_METADATA = "bad_metadata"
    MISSING_CHUNK = "missing_chunk"
    WRONG_CHUNK_SIZE = "wrong_chunk_size"
    UNEXPECTED_CHUNK = "unexpected_chunk"
    MISSING_OBJECT = "missing_object"
    UNEXPECTED_OBJECT = "unexpected_object"
    DAMAGED_ARCHIVE = "damaged_archive"
    MISSING_PART = "missing_part"
    DAMAGED_PART = "damaged_part"
    DAMAGED_TENSOR = "damaged_tensor"
    DAMAGED_COMMON = "damaged_common"
    MISSING_MANIFEST = "missing_manifest"
    BAD_MANIFEST = "bad_manifest"
    DAMAGED_CHUNK = "damaged_chunk"
    DAMAGED_OBJECT = "damaged_object"
    WRONG_FILE_SIZE = "wrong_file_size"
    UNEXPECTED_FILE = "unexpected_file"
    UNREADABLE = "unreadable"


_TOO_MUCH = {Problem.UNEXPECTED_CHUNK, Problem.UNEXPECTED_OBJECT, Problem.UNEXPECTED_FILE}


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is not as it should be.

    Attributes:
        problem: which kind.
        key: the array or object at fault; None for a file of the whole checkpoint.
        path: the file or directory at fault, relative to the checkpoint, ``/`` between parts.
        expected: what should be there.
        found: what is there instead.
    """

    problem: Problem
    key: str | None
    path: str
    expected: str
    found: str

    def __str__(self) -> str:
        """One line: where, expected, found."""
        return f"{self.path}: expected {self.expected}, found {self.found}"


def lacks_files(findings: Iterable[Finding]) -> bool:
    """Whether anything is wrong but that there is more than there should be."""
    return any(finding.problem not in _TOO_MUCH for finding in findings)


def unreadable(key: str | None, path: str, why: str) -> Finding:
    """The finding for a file or directory that the operating system does not let us read."""
    return Finding(Problem.UNREADABLE, key, path, "something that can be read", why)


def grid_indices(grid: Extent) -> Iterator[Extent]:
    """Every index of a grid in C order, one at a time: a damaged one may be of any size."""
    for number in range(math.prod(grid)):
        index, rest = [], number
        for size in reversed(grid):
            rest, position = divmod(rest, size)
            index.append(position)
        yield tuple(reversed(index))


def grid_text(grid: Extent) -> str:
    """Such as ``2 x 4``; a scalar has the grid ``1``."""
    return " x ".join(map(str, grid)) or "1"


def nbytes_text(nbytes: int) -> str:
    """Such as ``1 byte`` and ``4096 bytes``."""
    return f"{nbytes} byte{'' if nbytes == 1 else 's'}"


class LeftoverKind(StrEnum):
    """Why something is in a checkpoint without being part of it; the values are in the JSON."""

    LOCKS = "locks"
    PARTIAL = "partial"
    WRITING = "writing"
    REMOVED = "removed"


@dataclass(frozen=True, slots=True)
class Leftover:
    """A file or directory of no use: locks of the old backend, remains of a save cut short."""

    kind: LeftoverKind
    path: str
    nbytes: int
