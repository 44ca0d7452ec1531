"""When a place in an object store counts as a checkpoint: its marker is the last object put.

Nothing here is atomic but a single request, and a request that was given up may still be carried
out later. So a marker alone is not believed: it counts beside the manifest's index, which is put
once all that it lists is there, and deleted before any of that.
"""

from __future__ import annotations

from dist_ckpt_strategies.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    IncompleteCheckpointError,
)
from dist_ckpt_strategies.spec.marker import CheckpointMarker
from dist_ckpt_strategies.storage.buckets.bucket import Bucket
from dist_ckpt_strategies.storage.disk.files import COMMON_NAME, MARKER_NAME
from dist_ckpt_strategies.storage.format2.layout import ARRAYS_NAME
from dist_ckpt_strategies.storage.format2.manifest import (
    INDEX_NAME,
    MANIFEST_NAME,
    OBJECTS_NAME,
    SAVE_NAME,
)

_FOLDERS = (MANIFEST_NAME, ARRAYS_NAME, OBJECTS_NAME)
"""Where the objects of a checkpoint lie, in the order in which they go."""


def read_marker(bucket: Bucket) -> CheckpointMarker:
    """The marker of a finished checkpoint.

    Raises:
        CheckpointNotFoundError: there is nothing at that place.
        IncompleteCheckpointError: it has no marker or no manifest, or a marker that does not parse.
        BucketNotFoundError, StoreAccessError, StoreUnreachableError: nothing can be told.
    """
    path = bucket.path(MARKER_NAME)
    try:
        content = bucket.read(MARKER_NAME)
    except IncompleteCheckpointError:
        require_something(bucket)
        raise IncompleteCheckpointError(
            f"{bucket} is not a distributed checkpoint, or is incomplete: {path}, the last object "
            "of a save, is missing",
            path=path,
        ) from None
    if not bucket.has(INDEX_NAME):
        raise IncompleteCheckpointError(
            f"{bucket} is incomplete: {MARKER_NAME} is there, but {bucket.path(INDEX_NAME)} is "
            "missing",
            path=bucket.path(INDEX_NAME),
        )
    try:
        return CheckpointMarker.from_json(content)
    except (ValueError, TypeError) as error:
        raise IncompleteCheckpointError(
            f"{bucket} is incomplete: {path} is not whole ({error})", path=path
        ) from error


def require_something(bucket: Bucket) -> None:
    """Raise where there is nothing at all.

    Raises:
        CheckpointNotFoundError: there is not.
    """
    if bucket.is_empty():
        what = "there is no checkpoint"
        if not bucket.tells_missing_buckets:
            what += f", or no bucket {bucket.url.bucket!r}: listings do not tell"
        raise CheckpointNotFoundError(f"{bucket}: {what}", path=str(bucket))


def is_finished(bucket: Bucket) -> bool:
    """Whether there is a checkpoint with a whole marker, and its manifest."""
    try:
        read_marker(bucket)
    except (CheckpointNotFoundError, IncompleteCheckpointError):
        return False
    return True


def publish(bucket: Bucket, marker: CheckpointMarker) -> None:
    """Make the checkpoint visible."""
    bucket.write(MARKER_NAME, marker.to_json())


def withdraw_marker(bucket: Bucket) -> None:
    """Make the checkpoint count as incomplete, before anything of it changes.

    Nothing is deleted where nothing is: who may put and read, and not delete, can save to a new
    URL.
    """
    for name in (MARKER_NAME, INDEX_NAME):
        if bucket.has(name):
            bucket.delete([name])


def retract(bucket: Bucket) -> None:
    """Withdraw the marker, then delete the objects of an earlier save of ours.

    What it is known by stays, until the next save puts its own. Other objects stay.
    """
    withdraw_marker(bucket)
    if not bucket.has(SAVE_NAME):
        return
    for folder in _FOLDERS:
        bucket.delete(name for name in bucket.names(folder) if name != SAVE_NAME)


def remove(bucket: Bucket) -> tuple[str, ...]:
    """Remove a checkpoint, or what a killed save left: the marker first, what it is known by last.

    Objects that are no part of it stay.

    Returns:
        What stays: names, without what comes behind their first ``/``.
    """
    withdraw_marker(bucket)
    bucket.delete([COMMON_NAME])
    for folder in _FOLDERS:
        bucket.delete(name for name in bucket.names(folder) if name != SAVE_NAME)
    bucket.delete([SAVE_NAME])
    return tuple(sorted({name.partition("/")[0] for name in bucket.names("")}))


def require_room(bucket: Bucket) -> None:
    """Raise where there are objects under our names that are not ours.

    Raises:
        CheckpointExistsError: there are; names one.
    """
    if bucket.has(SAVE_NAME):
        return
    for folder in _FOLDERS:
        found = next(bucket.names(folder), None)
        if found is not None:
            raise CheckpointExistsError(
                f"{bucket.path(found)} is not of a checkpoint of format ('zarr', 2), which would "
                "put its own objects beside it; delete it, or save elsewhere",
                path=bucket.path(found),
            )
