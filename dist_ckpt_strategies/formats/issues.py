"""What can be wrong with a checkpoint, and what lies in it without being part of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice
from typing import TYPE_CHECKING

from dist_ckpt_strategies.core.region import Extent
from dist_ckpt_strategies.errors import (
    BucketNotFoundError,
    CheckpointNotFoundError,
    IncompleteCheckpointError,
    StorageError,
    StoreAccessError,
    StoreUnreachableError,
)
from dist_ckpt_strategies.formats.marker import CheckpointMarker
from dist_ckpt_strategies.storage.files import COMMON_NAME, MARKER_NAME

if TYPE_CHECKING:  # numpy takes a while to import
    from dist_ckpt_strategies.storage.file_store import FileStore

MAX_LISTED = 1000
"""Missing files of one key that have an issue each; one more issue stands for the others."""

NO_FILE = "no file"

NO_ANSWER = (StoreAccessError, StoreUnreachableError, BucketNotFoundError)
"""Errors of an object store as a whole: they say nothing about the object that was asked for."""

Watch = Callable[[int, int], None]
"""Called with how much of a step is done and how much there is; the second may still grow."""

_MAX_NAMED = 3
_COMMON_FORMAT = ("torch", 1)


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


_NOTHING_LACKS = {Problem.UNEXPECTED_CHUNK, Problem.UNEXPECTED_OBJECT, Problem.UNEXPECTED_FILE}


@dataclass(frozen=True, slots=True)
class Issue:
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


class StaleKind(StrEnum):
    """Why something is in a checkpoint without being part of it; the values are in the JSON."""

    LOCKS = "locks"
    PARTIAL = "partial"
    WRITING = "writing"
    REMOVED = "removed"


@dataclass(frozen=True, slots=True)
class StaleFile:
    """A file or directory without use: locks of the old backend, or left by a killed save."""

    kind: StaleKind
    path: str
    nbytes: int


def lacks_files(issues: Iterable[Issue]) -> bool:
    """Whether there is any issue other than files that should not be there."""
    return any(issue.problem not in _NOTHING_LACKS for issue in issues)


def sorted_by_key(issues: Iterable[Issue], *, then_by_path: bool) -> tuple[Issue, ...]:
    """The issues of the whole checkpoint, then those of each key, as given or by path."""
    return tuple(
        sorted(issues, key=lambda issue: (issue.key or "", issue.path if then_by_path else ""))
    )


def unreadable(key: str | None, path: str, why: str) -> Issue:
    """The issue for a file or directory that cannot be read."""
    return Issue(Problem.UNREADABLE, key, path, "something that can be read", why)


def missing_common(path: str = COMMON_NAME) -> Issue:
    """The issue for a checkpoint without its common state."""
    return Issue(Problem.MISSING_COMMON, None, path, "the state that all ranks share", NO_FILE)


def missing_files(
    problem: Problem,
    key: str,
    grid: Extent,
    present: Collection[Extent],
    path_of: Callable[[Extent], str],
    expected: str,
) -> Iterator[Issue]:
    """Issues for the files of a grid that are not there; a damaged grid may be of any size.

    Args:
        problem: their kind.
        key: the array or object.
        grid: one file for each index.
        present: indices of the files that are there.
        path_of: the file of an index.
        expected: what each file should be.
    """
    num_files = math.prod(grid)
    num_missing = num_files - len(present)
    missing = (index for index in _indices(grid) if index not in present)
    for index in islice(missing, min(num_missing, MAX_LISTED)):
        yield Issue(problem, key, path_of(index), expected, NO_FILE)
    if num_missing > MAX_LISTED:
        found = f"{len(present)}; {num_missing - MAX_LISTED} more are missing than listed here"
        yield Issue(problem, key, key, f"{num_files} files", found)


def _indices(grid: Extent) -> Iterator[Extent]:
    """Every index of a grid in C order, one at a time: ``product`` would make lists of ranges."""
    for number in range(math.prod(grid)):
        index, rest = [], number
        for size in reversed(grid):
            rest, position = divmod(rest, size)
            index.append(position)
        yield tuple(reversed(index))


def require_no_inner(place: object, inner: Sequence[str]) -> None:
    """Refuse a place that is no checkpoint but holds some, and name them.

    Raises:
        CheckpointNotFoundError: it does.
    """
    if inner:
        shown = ", ".join(inner[:_MAX_NAMED]) + (", ..." if inner[_MAX_NAMED:] else "")
        raise CheckpointNotFoundError(
            f"{place} is no checkpoint, but holds {len(inner)} ({shown}); name one of them",
            path=str(place),
        )


def marker_or_issue(file_store: FileStore) -> CheckpointMarker | Issue:
    """The marker of a checkpoint, or what is wrong with it.

    Raises:
        StoreAccessError, StoreUnreachableError, BucketNotFoundError: an object store does not give
            it.
    """
    try:
        return CheckpointMarker.from_json(file_store.read(MARKER_NAME))
    except NO_ANSWER:
        raise
    except IncompleteCheckpointError:
        expected = "the last file that a save writes"
        return Issue(Problem.MISSING_MARKER, None, MARKER_NAME, expected, NO_FILE)
    except StorageError as error:
        why = error.message.removeprefix(f"{file_store.path(MARKER_NAME)}: ")
        return unreadable(None, MARKER_NAME, why)
    except (ValueError, TypeError) as error:
        expected = "the fields of a marker as JSON"
        return Issue(Problem.BAD_MARKER, None, MARKER_NAME, expected, str(error))


def sharded_format(marker: CheckpointMarker) -> tuple[str, int]:
    """Backend and version of the sharded state."""
    return marker.sharded_backend, marker.sharded_backend_version


def has_own_common(marker: CheckpointMarker | Issue) -> bool:
    """Whether the common state lies in ``common.pt``, as far as the marker tells."""
    return isinstance(marker, Issue) or _common_format(marker) == _COMMON_FORMAT


def check_marker(marker: CheckpointMarker | Issue, expected: tuple[str, int]) -> Iterator[Issue]:
    """What is wrong with the marker of a checkpoint.

    Args:
        marker: the marker, or why there is none.
        expected: backend and version of the sharded state.
    """
    if isinstance(marker, Issue):
        yield marker
        return
    for which, (name, version), known in (
        ("sharded", sharded_format(marker), expected),
        ("common", _common_format(marker), _COMMON_FORMAT),
    ):
        if (name, version) != known:
            yield Issue(
                Problem.UNKNOWN_BACKEND,
                None,
                MARKER_NAME,
                f"{which} backend {known[0]} version {known[1]}",
                f"{name} version {version}",
            )


def _common_format(marker: CheckpointMarker) -> tuple[str, int]:
    return marker.common_backend, marker.common_backend_version
