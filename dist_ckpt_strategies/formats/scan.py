"""Look at a checkpoint of either format, in a directory or an object store, without loading it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import TYPE_CHECKING

from dist_ckpt_strategies.comm.shared_work import Count, Ranks
from dist_ckpt_strategies.errors import CheckpointError, IncompatibleVersionError
from dist_ckpt_strategies.formats.issues import (
    NO_ANSWER,
    FileCheck,
    Issue,
    Problem,
    Scan,
    Watch,
    sorted_by_key,
    unreadable,
)
from dist_ckpt_strategies.formats.zarr2_scan import scan_format1
from dist_ckpt_strategies.formats.zarr3_scan import scan_format2
from dist_ckpt_strategies.storage.files import reason

if TYPE_CHECKING:  # TensorStore takes a while to import, and directories go without
    from dist_ckpt_strategies.comm.base import Communicator
    from dist_ckpt_strategies.storage.bucket import Bucket


def scan(place: Path | Bucket, watch: Watch | None = None) -> Scan:
    """What a checkpoint holds, and what is wrong with it, by names, sizes and metadata.

    Reads no array and no object; ``verify`` compares their bytes. A checkpoint of another sharded
    backend is counted, and not looked into.

    Args:
        place: the directory, or the place in an object store.
        watch: called with directories, done and known so far, in format 1.

    Raises:
        CheckpointNotFoundError: it does not exist, or is no checkpoint itself but holds some, or
            nothing of one was found in many directories.
        IncompatibleVersionError: a later version of this package wrote it, or an object store
            holds something else than format ("zarr", 2).
        BucketNotFoundError, StoreAccessError, StoreUnreachableError: the store does not answer.
    """
    found = scan_format2(place)
    if found is not None:
        return found
    if isinstance(place, Path):
        return scan_format1(place, watch)
    raise IncompatibleVersionError(
        f"{place}: there is something, but no checkpoint of format ('zarr', 2); object stores "
        "have no others"
    )


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
    return sorted_by_key(run_checks(scan.issues, scan.checks(), scan.num_threads, watch, comm))


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
