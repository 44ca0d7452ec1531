"""The result of a scan, and the check of every byte that a scan prepares."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from dist_ckpt_strategies.comm.shared_work import Count, Ranks
from dist_ckpt_strategies.core.array import ArraySpec
from dist_ckpt_strategies.core.region import Extent
from dist_ckpt_strategies.errors import CheckpointError
from dist_ckpt_strategies.formats.issues import (
    NO_ANSWER,
    Issue,
    Problem,
    StaleFile,
    Watch,
    sorted_by_key,
    unreadable,
)
from dist_ckpt_strategies.formats.manifest import ManifestIndex
from dist_ckpt_strategies.formats.marker import CheckpointMarker
from dist_ckpt_strategies.storage.files import reason

if TYPE_CHECKING:  # TensorStore takes a while to import, and directories go without
    from dist_ckpt_strategies.comm.base import Communicator
    from dist_ckpt_strategies.storage.bucket import Bucket


class ScanStatus(StrEnum):
    """What a scan says of a checkpoint; INCOMPLETE: its save did not write the marker."""

    WHOLE = "whole"
    DAMAGED = "damaged"
    INCOMPLETE = "incomplete"


@dataclass(frozen=True, slots=True)
class ScannedArray:
    """An array whose metadata could be read.

    Attributes:
        array: its metadata.
        num_chunks: chunk files of its grid that are there, of whatever size.
        file_nbytes: their bytes.
        writers: the global ranks that wrote them, sorted; empty where the format does not tell.
    """

    array: ArraySpec
    num_chunks: int
    file_nbytes: int
    writers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ScannedObject:
    """A grid of objects.

    Attributes:
        key: the object's.
        shape: of the grid, in shards.
        num_shards: shards of the grid that are there.
        num_expected: shards of the complete grid.
        file_nbytes: their bytes; 0 where the manifest itself holds them.
        writers: the global ranks that wrote them, sorted; empty where the format does not tell.
    """

    key: str
    shape: Extent
    num_shards: int
    num_expected: int
    file_nbytes: int
    writers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SaveBegun:
    """When and where a save began, as its first file says.

    Attributes:
        seconds: since the epoch.
        host: name of the machine of the first rank.
    """

    seconds: float
    host: str


@dataclass(frozen=True, slots=True)
class FileCheck:
    """A comparison of every byte of a file with its checksums or digests.

    Attributes:
        key: whose file it is; None for one of the whole checkpoint.
        name: of the file, below the checkpoint's directory.
        nbytes: how many are read.
        run: returns what is wrong with it; raises where it cannot be read.
    """

    key: str | None
    name: str
    nbytes: int
    run: Callable[[], Iterable[Issue]]


@dataclass(frozen=True, slots=True)
class Scan:
    """What a checkpoint holds, and what is wrong with it, by names, sizes and metadata.

    Attributes:
        root: the directory, absolute, or the place in an object store.
        version: of the sharded format, 1 or 2; None where another backend wrote the arrays, which
            are not looked for then.
        marker: None where it is missing or cannot be read.
        common_nbytes: size of the common state's file; None where it is missing.
        arrays: sorted by key; those whose metadata can be read.
        objects: sorted by key.
        stale_files: what killed processes have left, sorted by path; harmless.
        issues: what is wrong, sorted by key.
        num_files: all files of the checkpoint.
        nbytes: their bytes; in an object store, of those whose size the manifest lists.
        checks: gives the checks of all files that have digests or checksums of their own.
        num_threads: to run them with.
        begun: when the save began; None where no file says it.
        index: the manifest's table of contents; None where there is none, or it is damaged.
        others: names beside the checkpoint's own, which the manifest says nothing about.
    """

    root: Path | Bucket
    version: int | None
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
    begun: SaveBegun | None = None
    index: ManifestIndex | None = None
    others: tuple[str, ...] = ()

    @property
    def status(self) -> ScanStatus:
        """Whether anything is wrong; without a marker the checkpoint counts as incomplete."""
        if any(issue.problem is Problem.MISSING_MARKER for issue in self.issues):
            return ScanStatus.INCOMPLETE
        return ScanStatus.DAMAGED if self.issues else ScanStatus.WHOLE

    @property
    def is_foreign(self) -> bool:
        """Whether another backend wrote the arrays, so that they were not looked for."""
        return self.version is None

    @property
    def has_sizes(self) -> bool:
        """Whether the sizes of files were compared; an object store's list has names alone."""
        return isinstance(self.root, Path)


def verify(
    scan: Scan, watch: Watch | None = None, *, comm: Communicator | None = None
) -> tuple[Issue, ...]:
    """The issues of a scan, and those of comparing every byte with its digest; sorted by key.

    Format 1 keeps checksums of objects and the common state alone, and no list of its arrays: of
    those there the files' names and sizes are all that is compared. Each thread takes a few MiB of
    memory, or those of the object that it looks at.

    Collective if ``comm`` has several ranks: each reads its share of the files, and all return the
    same.

    Args:
        scan: of the checkpoint.
        watch: called with bytes.
        comm: ranks that share the work; None: this process does it alone.

    Raises:
        StoreAccessError, StoreUnreachableError: an object store does not answer any more.
        PlanError: the ranks see different files.
    """
    found = run_checks(scan.issues, scan.checks(), scan.num_threads, watch, comm)
    return sorted_by_key(found, then_by_path=scan.version != 1)


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
