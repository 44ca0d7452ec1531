"""Look at a checkpoint of either format, in a directory or an object store, without loading it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dist_ckpt_strategies.errors import IncompatibleVersionError
from dist_ckpt_strategies.formats.issues import Watch
from dist_ckpt_strategies.formats.scanned import Scan
from dist_ckpt_strategies.formats.zarr2_scan import scan_format1
from dist_ckpt_strategies.formats.zarr3_scan import scan_format2

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
