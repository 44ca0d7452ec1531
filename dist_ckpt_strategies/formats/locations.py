"""Where a checkpoint is: a directory, or a place in an object store.

A location is a Path, absolute, or a Bucket. Both go through strategies as ``checkpoint_dir``.
"""

from __future__ import annotations

from pathlib import Path

from dist_ckpt_strategies.config import Options, store_options_from_environment
from dist_ckpt_strategies.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    IncompleteCheckpointError,
    StrategyError,
)
from dist_ckpt_strategies.formats import bucket_commit, commit
from dist_ckpt_strategies.formats.marker import CheckpointMarker
from dist_ckpt_strategies.storage.bucket import Bucket
from dist_ckpt_strategies.storage.urls import parsed_address

Location = Path | Bucket


def located(checkpoint_dir: str | Path | Bucket, options: Options | None) -> Location:
    """The location that a caller means: ``s3://``, ``gs://``, ``file:///`` or a path.

    Args:
        checkpoint_dir: a location stays as it is.
        options: how an object store is reached; None: as the environment says, and no peer waits.

    Raises:
        StrategyError: it is no address, or a Path made of a URL; or the environment makes no sense.
    """
    if isinstance(checkpoint_dir, Bucket):
        return checkpoint_dir
    found = parsed_address(checkpoint_dir)
    if isinstance(found, Path):
        return found
    return Bucket(found, options.reached_stores() if options else store_options_from_environment())


def require_path(location: Location, what: str) -> Path:
    """The location as a directory.

    Raises:
        StrategyError: it is in an object store, and ``what`` does not go there.
    """
    if isinstance(location, Bucket):
        raise StrategyError(
            f"{location}: {what} needs a directory on a file system, found a URL; format "
            "('zarr', 2) takes URLs"
        )
    return location


def read_marker(location: Location) -> CheckpointMarker:
    """The marker of a finished checkpoint; see ``commit`` and ``bucket_commit``."""
    if isinstance(location, Bucket):
        return bucket_commit.read_marker(location)
    return commit.read_marker(location)


def is_finished(location: Location) -> bool:
    """Whether there is a checkpoint with a whole marker."""
    if isinstance(location, Path):
        return commit.is_finished(location)
    try:
        bucket_commit.read_marker(location)
    except (CheckpointNotFoundError, IncompleteCheckpointError):
        return False
    return True


def require_unfinished(location: Location) -> None:
    """Raise if there is a finished checkpoint. Changes nothing.

    Raises:
        CheckpointExistsError: there is.
    """
    if is_finished(location):
        raise CheckpointExistsError(
            f"{location} already holds a finished checkpoint; pass overwrite=True to replace it",
            path=str(location),
        )


def content_of(location: Location) -> Location:
    """Where the files of a checkpoint lie: in a bucket below the prefix of its save."""
    if isinstance(location, Bucket):
        return bucket_commit.current_place(location)
    return location


def complete_commit(location: Location) -> None:
    """Carry a save that was killed while it moved its files into place to its end. Rank-local.

    One rank calls it, before any looks at the marker. In a bucket nothing is moved.

    Raises:
        StorageError: another process is still at it, or a file cannot be moved.
    """
    if isinstance(location, Path):
        commit.complete_commit(location)


def open_save_place(
    location: Location, options: Options, *, keeps_old: bool, overwrite: bool
) -> commit.SavePlace:
    """Where the files of a save to a location go until its commit; see DirectoryPlace."""
    if isinstance(location, Bucket):
        return bucket_commit.BucketPlace(location, options)
    return commit.DirectoryPlace(location, options, keeps_old=keeps_old, overwrite=overwrite)
