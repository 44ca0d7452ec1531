"""What a scan of a checkpoint gives: what the checkpoint holds, and what is wrong with it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dist_ckpt_strategies.errors import (
    BucketNotFoundError,
    IncompleteCheckpointError,
    StorageError,
    StoreAccessError,
    StoreUnreachableError,
)
from dist_ckpt_strategies.storage.files import COMMON_NAME, MARKER_NAME, nbytes_text

if TYPE_CHECKING:  # numpy and TensorStore take a while to import
    from dist_ckpt_strategies.core.array import ArraySpec, Shape
    from dist_ckpt_strategies.formats.locations import CheckpointMarker
    from dist_ckpt_strategies.storage.bucket import Bucket
    from dist_ckpt_strategies.storage.store import Store

MAX_LISTED = 1000
"""Missing files of one key that have an issue each; one issue stands for more of them."""

NO_FILE = "no file"

NO_ANSWER = (StoreAccessError, StoreUnreachableError, BucketNotFoundError)
"""Errors of an object store as a whole: they say nothing about the object that was asked for."""

COMMON_FORMAT = ("torch", 1)


class Problem(StrEnum):
    """The kinds of issues; the values are part of the command's JSON."""

    MISSING_MARKER = "missing_marker"
    UNKNOWN_BACKEND = "unknown_backend"
    MISSING_FILE = "missing_file"
    WRONG_SIZE = "wrong_size"
    DAMAGED = "damaged"
    UNEXPECTED_FILE = "unexpected_file"
    UNREADABLE = "unreadable"


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


@dataclass(frozen=True, slots=True)
class ScannedArray:
    """An array whose metadata could be read, and those of its chunk files that are there.

    ``writers`` are global ranks, sorted; none where the format does not say.
    """

    array: ArraySpec
    num_chunks: int
    file_nbytes: int
    writers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ScannedObject:
    """A grid of objects: its shape in shards, and how many of these are there.

    ``writers`` as in ScannedArray.
    """

    key: str
    shape: Shape
    num_shards: int
    num_expected: int
    file_nbytes: int
    writers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class FileCheck:
    """A file that belongs to a checkpoint, and the comparison of its bytes with their digests.

    Attributes:
        key: None for a file of the whole checkpoint.
        name: of the file, below the checkpoint's directory.
        run: returns what is wrong with it; raises where it cannot be read.
        expected: what it should be, for messages.
    """

    key: str | None
    name: str
    nbytes: int
    run: Callable[[], Iterable[Issue]]
    expected: str = ""


@dataclass(frozen=True, slots=True)
class Scan:
    """What a checkpoint holds, and what is wrong with it, by names, sizes and metadata.

    Arrays, objects and issues are sorted by key.

    Attributes:
        root: the directory, absolute, or the place in an object store.
        backend: name and version of the sharded format; None where another package wrote the
            arrays, which are not looked for then.
        marker: None where it is missing or cannot be read.
        common_nbytes: size of the common state's file; None where it is missing.
        stale_files: what killed processes have left, sorted by path; harmless.
        nbytes: of all files; in an object store, of those whose size the index lists.
        checks: gives the checks of all files that have digests or checksums of their own.
        num_threads: to run them with.
        facts: what the index of packs says of the save.
        others: names beside the checkpoint's own.
    """

    root: Path | Bucket
    backend: tuple[str, int] | None
    marker: CheckpointMarker | None
    common_nbytes: int | None
    arrays: tuple[ScannedArray, ...]
    objects: tuple[ScannedObject, ...]
    stale_files: tuple[StaleFile, ...]
    issues: tuple[Issue, ...]
    num_files: int
    nbytes: int
    checks: Callable[[], Iterator[FileCheck]] = field(repr=False, compare=False)
    num_threads: int = field(repr=False, compare=False)
    facts: Mapping[str, Any] = field(default_factory=dict)
    others: tuple[str, ...] = ()

    @property
    def is_unfinished(self) -> bool:
        """Whether the save did not write the marker."""
        return any(issue.problem is Problem.MISSING_MARKER for issue in self.issues)

    @property
    def is_foreign(self) -> bool:
        """Whether another backend wrote the arrays, so that they were not looked for."""
        return self.backend is None


def sorted_by_key(issues: Iterable[Issue]) -> tuple[Issue, ...]:
    """The issues of the whole checkpoint, then those of each key, in the order given."""
    return tuple(sorted(issues, key=lambda issue: issue.key or ""))


def unreadable(key: str | None, path: str, why: str) -> Issue:
    """The issue for a file or directory that cannot be read."""
    return Issue(Problem.UNREADABLE, key, path, "something that can be read", why)


def missing_common(path: str = COMMON_NAME) -> Issue:
    """The issue for a checkpoint without its common state."""
    return Issue(Problem.MISSING_FILE, None, path, "the state that all ranks share", NO_FILE)


def compared(check: FileCheck, files: Mapping[str, int | None]) -> Iterator[Issue]:
    """What is wrong with a file by its name and size; ``files`` are those that are there."""
    if check.name not in files:
        yield Issue(Problem.MISSING_FILE, check.key, check.name, check.expected, NO_FILE)
    elif (found := files[check.name]) not in {None, check.nbytes}:  # None: a list of names alone
        text = nbytes_text(found or 0)
        yield Issue(Problem.WRONG_SIZE, check.key, check.name, check.expected, text)


def checked_marker(
    store: Store, expected: tuple[str, int] | None = None
) -> tuple[CheckpointMarker | None, list[Issue]]:
    """The marker of a checkpoint, if there is one, and what is wrong with it.

    ``expected``: backend and version of the sharded state; None for any.

    Raises:
        StoreAccessError, StoreUnreachableError, BucketNotFoundError: the store does not answer.
    """
    from dist_ckpt_strategies.formats.locations import CheckpointMarker  # noqa: PLC0415 - see above

    try:
        marker = CheckpointMarker.from_json(store.read(MARKER_NAME))
    except NO_ANSWER:
        raise
    except IncompleteCheckpointError:
        text = "the last file that a save writes"
        return None, [Issue(Problem.MISSING_MARKER, None, MARKER_NAME, text, NO_FILE)]
    except StorageError as error:
        why = error.message.removeprefix(f"{store.path(MARKER_NAME)}: ")
        return None, [unreadable(None, MARKER_NAME, why)]
    except (ValueError, TypeError) as error:
        text = "the fields of a marker as JSON"
        return None, [Issue(Problem.DAMAGED, None, MARKER_NAME, text, str(error))]
    issues: list[Issue] = []
    if expected is None:
        return marker, issues
    for which, found, known in (
        ("sharded", marker.sharded_format, expected),
        ("common", marker.common_format, COMMON_FORMAT),
    ):
        if found != known:
            text = f"{which} backend {known[0]} version {known[1]}"
            what = f"{found[0]} version {found[1]}"
            issues.append(Issue(Problem.UNKNOWN_BACKEND, None, MARKER_NAME, text, what))
    return marker, issues
