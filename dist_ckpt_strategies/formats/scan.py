"""Look at a checkpoint of either format, in a directory or an object store, without loading it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from dist_ckpt_strategies.errors import CheckpointError, IncompatibleVersionError
from dist_ckpt_strategies.formats.issues import (
    NO_ANSWER,
    FileCheck,
    Issue,
    Scan,
    Watch,
    sorted_by_key,
    unreadable,
)
from dist_ckpt_strategies.formats.zarr2_scan import scan_format1
from dist_ckpt_strategies.formats.zarr3_scan import scan_format2
from dist_ckpt_strategies.storage.files import reason

if TYPE_CHECKING:  # TensorStore takes a while to import, and directories go without
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


def verify(scan: Scan, watch: Watch | None = None) -> tuple[Issue, ...]:
    """The issues of a scan, and those of comparing every byte with its digest; sorted by key.

    Format 1 keeps checksums of objects and the common state alone, and no list of its arrays: of
    those there the files' names and sizes are all that is compared. Each thread takes a few MiB of
    memory, or those of the object that it looks at.

    Args:
        scan: of the checkpoint.
        watch: called with bytes.

    Raises:
        StoreAccessError, StoreUnreachableError: an object store does not answer any more.
    """
    return sorted_by_key(run_checks(scan.issues, scan.checks(), scan.num_threads, watch))


def run_checks(
    issues: Sequence[Issue], checks: Iterable[FileCheck], num_threads: int, watch: Watch | None
) -> list[Issue]:
    """The issues of a scan, then those of all checks but of files that have an issue already."""
    known = {issue.path for issue in issues}
    left = [check for check in checks if check.name not in known]
    total, done, found = sum(check.nbytes for check in left), 0, list(issues)
    with ThreadPoolExecutor(num_threads, "dist-ckpt-verify") as pool:
        for check, of_file in zip(left, pool.map(_run, left), strict=True):
            found += of_file
            done += check.nbytes
            if watch:
                watch(done, total)
    return found


def _run(check: FileCheck) -> list[Issue]:
    try:
        return list(check.run())
    except NO_ANSWER:
        raise  # no other object would be read either
    except CheckpointError as error:
        return [unreadable(check.key, check.name, error.message)]
    except OSError as error:
        return [unreadable(check.key, check.name, reason(error))]
