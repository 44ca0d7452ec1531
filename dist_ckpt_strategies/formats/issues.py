"""The result of a scan of a checkpoint: its contents and its issues."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from dist_ckpt_strategies.errors import (
    IncompleteCheckpointError,
    StorageError,
    StorageTimeoutError,
    StoreAccessError,
)
from dist_ckpt_strategies.storage.files import COMMON_NAME, MARKER_NAME

if TYPE_CHECKING:  # numpy takes a while to import
    from dist_ckpt_strategies.core.array import ArraySpec, Shape
    from dist_ckpt_strategies.formats.locations import CheckpointMarker, Location
    from dist_ckpt_strategies.storage.bucket import Place

NO_FILE = "no file"

NO_ANSWER = (StoreAccessError, StorageTimeoutError)
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
class Scanned:
    """An array whose metadata could be read, or a grid of objects, and what is there of it.

    Attributes:
        key: its name.
        shape: of the array, in elements; of the grid, in shards.
        num_parts: chunk files or blocks of the array, or shards of objects, that are there.
        file_nbytes: bytes of these.
        writers: global ranks, sorted; none where the format does not say.
        array: None for objects.
    """

    key: str
    shape: Shape
    num_parts: int
    file_nbytes: int
    writers: tuple[int, ...] = ()
    array: ArraySpec | None = None


@dataclass(frozen=True, slots=True)
class FileCheck:
    """A file that belongs to a checkpoint, and the comparison of its bytes with their digests.

    Attributes:
        key: None for a file of the whole checkpoint.
        name: of the file, below the checkpoint's directory.
        nbytes: that it should have.
        expected: what it should be, for messages.
        run: returns what is wrong with its bytes; raises where they cannot be read.
    """

    key: str | None
    name: str
    nbytes: int
    expected: str
    run: Callable[[], Iterable[Issue]]


@dataclass(frozen=True, slots=True)
class Scan:
    """The contents and issues of a checkpoint, by names, sizes and metadata.

    Arrays, objects and issues are sorted by key.

    Attributes:
        root: the directory, absolute, or the place in an object store.
        backend: name and version of the sharded format; None where another package wrote the
            arrays, which are not looked for then.
        marker: None where it is missing or cannot be read.
        files: the size of each file by its path; None where a list of names does not tell.
        num_threads: to run the checks with.
        stale_files: what killed processes have left, sorted by path; harmless.
        checks: of all files that are part of it.
        facts: what the index of packs says of the save.
        others: names beside the checkpoint's own.
    """

    root: Location
    backend: tuple[str, int] | None
    marker: CheckpointMarker | None
    files: Mapping[str, int | None] = field(repr=False)
    num_threads: int = field(repr=False, compare=False)
    arrays: tuple[Scanned, ...] = ()
    objects: tuple[Scanned, ...] = ()
    stale_files: tuple[StaleFile, ...] = ()
    issues: tuple[Issue, ...] = ()
    checks: tuple[FileCheck, ...] = field(default=(), repr=False, compare=False)
    facts: Mapping[str, Any] = field(default_factory=dict)
    others: tuple[str, ...] = ()

    @property
    def common_nbytes(self) -> int | None:
        """Size of the common state's file; None where it is missing."""
        return self.files.get(COMMON_NAME)

    @property
    def nbytes(self) -> int:
        """Of all files; where sizes are not listed, those that they should have."""
        expected = {check.name: check.nbytes for check in self.checks}
        return sum(expected.get(name, 0) if n is None else n for name, n in self.files.items())

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
    """Issues of a file by its name and size; ``files`` are those that exist."""
    if check.name not in files:
        yield Issue(Problem.MISSING_FILE, check.key, check.name, check.expected, NO_FILE)
    elif (nbytes := files[check.name]) not in {None, check.nbytes}:  # None: a list of names alone
        text = nbytes_text(nbytes or 0)
        yield Issue(Problem.WRONG_SIZE, check.key, check.name, check.expected, text)


def checked_marker(
    store: Place, expected: tuple[str, int] | None = None
) -> tuple[CheckpointMarker | None, list[Issue]]:
    """The marker of a checkpoint, if there is one, and what is wrong with it.

    ``expected``: backend and version of the sharded state; None for any.

    Raises:
        StoreAccessError, StorageTimeoutError: the store does not answer.
    """
    from dist_ckpt_strategies.formats.locations import CheckpointMarker  # noqa: PLC0415

    problem, text = Problem.DAMAGED, "the fields of a marker as JSON"
    try:
        marker = CheckpointMarker.from_json(store.read(MARKER_NAME))
    except NO_ANSWER:
        raise
    except IncompleteCheckpointError:
        problem, text, why = Problem.MISSING_MARKER, "the last file that a save writes", NO_FILE
    except StorageError as error:
        why = error.message.removeprefix(f"{store.path(MARKER_NAME)}: ")
        return None, [unreadable(None, MARKER_NAME, why)]
    except (ValueError, TypeError) as error:
        why = str(error)
    else:
        pairs = {
            "sharded": (marker.sharded_format, expected),
            "common": (marker.common_format, expected and COMMON_FORMAT),
        }
        return marker, [
            Issue(
                Problem.UNKNOWN_BACKEND,
                None,
                MARKER_NAME,
                f"{which} backend {wanted[0]} version {wanted[1]}",
                f"{held[0]} version {held[1]}",
            )
            for which, (held, wanted) in pairs.items()
            if wanted and held != wanted
        ]
    return None, [Issue(problem, None, MARKER_NAME, text, why)]


def nbytes_text(nbytes: int) -> str:
    """Such as ``1 byte`` and ``4096 bytes``."""
    return f"{nbytes} byte{'' if nbytes == 1 else 's'}"
