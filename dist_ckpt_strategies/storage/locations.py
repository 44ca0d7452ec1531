"""Where a checkpoint is: a directory, or a place in an object store.

A location is a Path, absolute, or a Bucket. Both go through strategies as ``checkpoint_dir``.
"""

from __future__ import annotations

from pathlib import Path

from dist_ckpt_strategies.config import Options, store_options_from_environment
from dist_ckpt_strategies.errors import CheckpointExistsError, StrategyError
from dist_ckpt_strategies.spec.marker import CheckpointMarker
from dist_ckpt_strategies.storage.addresses import parsed_address
from dist_ckpt_strategies.storage.buckets import publication as bucket_publication
from dist_ckpt_strategies.storage.buckets.bucket import Bucket
from dist_ckpt_strategies.storage.lifecycle import clearing, publication

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
    """The marker of a finished checkpoint; see publication, and bucket_publication."""
    if isinstance(location, Bucket):
        return bucket_publication.read_marker(location)
    return publication.read_marker(location)


def is_finished(location: Location) -> bool:
    """Whether there is a checkpoint with a whole marker."""
    if isinstance(location, Bucket):
        return bucket_publication.is_finished(location)
    return publication.is_finished(location)


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


def make_directory(location: Location) -> None:
    """Make a directory, durably; an object store needs none."""
    if isinstance(location, Path):
        publication.make_directory(location)


def retract(location: Location) -> None:
    """Withdraw the marker, durably, then remove the arrays and objects of an earlier save."""
    if isinstance(location, Bucket):
        bucket_publication.retract(location)
    else:
        clearing.retract(location)


def withdraw_marker(location: Location) -> None:
    """Make the checkpoint count as incomplete, durably, before anything of it changes."""
    if isinstance(location, Bucket):
        bucket_publication.withdraw_marker(location)
    else:
        publication.withdraw_marker(location)


def publish(location: Location, marker: CheckpointMarker) -> None:
    """Make the checkpoint visible: the marker is there whole, or not at all."""
    if isinstance(location, Bucket):
        bucket_publication.publish(location, marker)
    else:
        publication.publish(location, marker)
