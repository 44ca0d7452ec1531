"""Scan and verify a checkpoint without loading it. Loads no torch.

A scan reads names, sizes and metadata. In packs the index lists all files. In format ("zarr", 1) a
scan lists all directories; the metadata of arrays and the names of objects say which files there
should be.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import astuple
from pathlib import Path
from typing import TYPE_CHECKING

from dist_ckpt_strategies.comm.shared_work import Count, Ranks, Watch
from dist_ckpt_strategies.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    IncompatibleVersionError,
    StorageError,
)
from dist_ckpt_strategies.formats.index import INDEX_NAME as PACKS_INDEX
from dist_ckpt_strategies.formats.issues import (
    NO_ANSWER,
    FileCheck,
    Issue,
    Problem,
    Scan,
    sorted_by_key,
    unreadable,
)
from dist_ckpt_strategies.formats.locations import (
    PACKS,
    Location,
    holds_checkpoints,
    holds_packs,
    refuse_format2,
    require_something,
)
from dist_ckpt_strategies.formats.pack_scan import scan_packs
from dist_ckpt_strategies.formats.pack_write import FOLDER as PACKS_FOLDER
from dist_ckpt_strategies.formats.zarr2_scan import scan_zarr
from dist_ckpt_strategies.storage.bucket import Bucket
from dist_ckpt_strategies.storage.files import MARKER_NAME, reason, require_directory

if TYPE_CHECKING:  # torch takes a while to import
    from dist_ckpt_strategies.comm.base import Communicator


def scan(place: Location, watch: Watch | None = None) -> Scan:
    """What a checkpoint holds, and what is wrong with it, by names, sizes and metadata.

    Reads no array and no object; ``verify`` compares their bytes. A checkpoint of another sharded
    backend is counted, and not looked into. In format 1 ``watch`` is called with the directories
    done and known so far.

    Raises:
        CheckpointNotFoundError: it does not exist, or there is nothing of a checkpoint; says which
            ones it holds.
        IncompatibleVersionError: it is of format ("zarr", 2), or an object store holds something
            else than packs.
        StoreAccessError, StorageTimeoutError: the store does not answer.
    """
    if isinstance(place, Path):
        place = place.absolute()
        require_directory(place)
    if holds_packs(place):
        return scan_packs(place)
    named = None
    with suppress(StorageError):
        named = refuse_format2(place)
    if isinstance(place, Bucket):
        names = place.names()
        if not any(name.startswith(f"{PACKS_FOLDER}/") for name in names):
            raise _not_packs(place, names)
    elif named not in {None, PACKS.sharded_format} or not (place / PACKS_FOLDER).is_dir():
        return scan_zarr(place, watch)
    return scan_packs(place)  # of a save that has not ended, or without its index


def verify(
    scan: Scan, watch: Watch | None = None, *, comm: Communicator | None = None
) -> tuple[Issue, ...]:
    """The issues of a scan, and those of comparing every byte with its digest; sorted by key.

    Format 1 keeps checksums of objects and the common state alone, and no list of its arrays: their
    files are read, and only names and sizes are compared. Each thread takes a few MiB of memory, or
    those of the object that it looks at. ``watch`` is called with bytes.

    Collective if ``comm`` has several ranks: each reads its share of the files, and all return the
    same.

    Raises:
        StoreAccessError, StorageTimeoutError: an object store does not answer any more.
        PlanError: the ranks see different files.
    """
    return sorted_by_key(run_checks(scan.issues, scan.checks, scan.num_threads, watch, comm))


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


def _not_packs(bucket: Bucket, names: Sequence[str]) -> CheckpointError:
    """The error for a place in an object store that has no packs, but objects of these names."""
    if not names:
        require_something(bucket)
    ends = (f"/{MARKER_NAME}", f"/{PACKS_INDEX}")
    if inner := sorted({n.partition("/")[0] for n in names if n[n.find("/") :] in ends}):
        text = f"{bucket} is no checkpoint: {holds_checkpoints(inner)}"
        return CheckpointNotFoundError(text, path=str(bucket))
    return IncompatibleVersionError(
        f"{bucket} holds objects, but no checkpoint of packs, the only format in object stores; "
        "check the URL"
    )
