"""Where a checkpoint is: a directory, or a place in an object store.

A location is a Path, absolute, or a Bucket. Both go through strategies as ``checkpoint_dir``.

Nothing in a bucket is renamed, and a request that was given up may still be carried out later. So a
save puts everything below a prefix of its own, ``save-ID/``, which is laid out like a checkpoint in
a directory. One request makes that the checkpoint's content: it puts ``metadata.json``, whose field
``save`` names the id. If that request of an earlier save is carried out late, it names a prefix
that was removed since; then the largest id counts whose prefix is whole. A checkpoint that an
earlier release wrote has its files right below its URL.
"""

from __future__ import annotations

import json
import logging
import re
import time
import uuid
from collections.abc import Collection, Sequence
from pathlib import Path

from dist_ckpt_strategies.config import Options, store_options_from_environment
from dist_ckpt_strategies.errors import (
    CheckpointNotFoundError,
    IncompleteCheckpointError,
    StorageError,
    StrategyError,
)
from dist_ckpt_strategies.formats import commit
from dist_ckpt_strategies.formats.commit import CheckpointMarker, DirectoryPlace, PlaceBase
from dist_ckpt_strategies.formats.manifest import FOLDER_NAMES, INDEX_NAME, SAVE_NAME, begun_content
from dist_ckpt_strategies.storage.bucket import Bucket
from dist_ckpt_strategies.storage.files import COMMON_NAME, MARKER_NAME, parsed_address

logger = logging.getLogger(__name__)

Location = Path | Bucket

SAVE_PREFIX = "save-"
_SAVE_FIELD = "save"
_SAVE_ID = re.compile(r"[0-9]{17}-[0-9a-f]{32}")


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
    """The marker of a finished checkpoint.

    Raises:
        CheckpointNotFoundError: there is nothing at that place.
        IncompleteCheckpointError: it has no marker, or one that does not parse; or, in a bucket, no
            manifest.
        BucketNotFoundError, StoreAccessError, StoreUnreachableError: the store does not answer.
    """
    if isinstance(location, Path):
        return commit.read_marker(location)
    place = current_place(location)
    path = place.path(MARKER_NAME)
    try:
        content = place.read(MARKER_NAME)
    except IncompleteCheckpointError:
        require_something(location)
        raise IncompleteCheckpointError(
            f"{location} is not a distributed checkpoint, or is incomplete: {path}, the last "
            "object of a save, is missing",
            path=path,
        ) from None
    if not place.has(INDEX_NAME):
        raise IncompleteCheckpointError(
            f"{location} is incomplete: {MARKER_NAME} is there, but {place.path(INDEX_NAME)} is "
            "missing",
            path=place.path(INDEX_NAME),
        )
    return CheckpointMarker.of_checkpoint(content, location, path)


def is_finished(location: Location) -> bool:
    """Whether there is a checkpoint with a whole marker."""
    try:
        read_marker(location)
    except (CheckpointNotFoundError, IncompleteCheckpointError):
        return False
    return True


def content_of(location: Location) -> Location:
    """Where the files of a checkpoint lie: in a bucket below the prefix of its save."""
    return location if isinstance(location, Path) else current_place(location)


def current_place(bucket: Bucket) -> Bucket:
    """What the objects of a checkpoint lie below: the prefix of its save, or the bucket itself."""
    if bucket.is_place:
        return bucket
    save_id = _current_id(bucket)
    if save_id is None:
        return bucket.place()
    place = bucket.place(SAVE_PREFIX + save_id)
    if place.has(INDEX_NAME):
        return place
    whole = [n for n in bucket.names(SAVE_PREFIX) if n.endswith(f"/{MARKER_NAME}")]
    return bucket.place(max(whole).partition("/")[0]) if whole else place


def _current_id(bucket: Bucket) -> str | None:
    """The save that the marker names; None where there is none, or it names none."""
    try:
        found = str(json.loads(bucket.read(MARKER_NAME))[_SAVE_FIELD])
    except (IncompleteCheckpointError, ValueError, LookupError, TypeError):
        return None
    return found if _SAVE_ID.fullmatch(found) else None


def visible_place(bucket: Bucket) -> Bucket:
    """Like ``current_place``; where nothing is committed, what the last save has begun to put."""
    place = current_place(bucket)
    if str(place) == str(bucket) and not (bucket.has(INDEX_NAME) or bucket.has(SAVE_NAME)):
        begun = {name.partition("/")[0] for name in bucket.names(SAVE_PREFIX)}
        if begun:
            return bucket.place(max(begun))
    return place


class BucketPlace(PlaceBase):
    """A prefix of its own in an object store; see PlaceBase and DirectoryPlace.

    Args:
        bucket: the checkpoint.
        options: limits.
    """

    def __init__(self, bucket: Bucket, options: Options) -> None:
        super().__init__(bucket, options.timeout_s)
        self._bucket = bucket

    @property
    def location(self) -> Bucket:
        """What the save writes into; with the save id."""
        return self._bucket.place(SAVE_PREFIX + self.save_id)

    def new_save_id(self) -> str:
        """See DirectoryPlace. It is larger than that of the current save, whatever clocks say."""
        self._bucket.require_bucket()
        last = int((_current_id(self._bucket) or "0").partition("-")[0])
        return f"{max(last + 1, time.time_ns() // 1000):017d}-{uuid.uuid4().hex}"

    def begin(self, keys: Collection[str] | None) -> None:  # noqa: ARG002 - a prefix of its own
        """Make the place, on the first rank, and remove what earlier saves have not finished."""
        _remove_others(self._bucket, current_place(self._bucket))
        self.location.write(SAVE_NAME, begun_content(self.save_id))

    def abandon(self) -> None:
        """Do nothing: a prefix that no marker names is not read; prune removes it."""

    def is_current(self) -> bool:
        """See PlaceBase."""
        is_last = (_current_id(self._bucket) or "") <= self.save_id
        return is_last and self.location.has(SAVE_NAME)

    def commit(self, marker: bytes | None) -> None:
        """See DirectoryPlace. What the save replaces is removed afterwards."""
        if marker is None:
            raise StrategyError(
                f"{self}: call dist_ckpt_strategies.save, which also puts the marker"
            )
        bucket, place = self._bucket, self.location
        self.require_current()
        place.write(MARKER_NAME, marker)
        content = {**json.loads(marker), _SAVE_FIELD: self.save_id}
        bucket.write(MARKER_NAME, json.dumps(content).encode())
        try:
            _remove_others(bucket, place)
        except StorageError as error:
            logger.warning("%s: what the save replaces cannot be removed: %s", bucket, error)


SavePlace = DirectoryPlace | BucketPlace


def open_save_place(
    location: Location, options: Options, *, keeps_old: bool, overwrite: bool
) -> SavePlace:
    """Where the files of a save to a location go until its commit; see DirectoryPlace."""
    if isinstance(location, Bucket):
        return BucketPlace(location, options)
    return DirectoryPlace(location, options, keeps_old=keeps_old, overwrite=overwrite)


def _remove_others(bucket: Bucket, current: Bucket) -> None:
    """Delete what other saves have put. Nothing is deleted where nothing is.

    Who may put and read, and not delete, can save to a new URL.
    """
    kept = str(current.url).removeprefix(f"{bucket.url}/")
    names = bucket.names(SAVE_PREFIX)
    _delete_in_order(bucket, [name for name in names if name.partition("/")[0] != kept])
    if str(current) != str(bucket) and bucket.has(SAVE_NAME):
        _delete_in_order(bucket, _names_of_earlier_release(bucket))


def _delete_in_order(bucket: Bucket, names: Sequence[str]) -> None:
    """Delete objects of saves: manifests first, what a save is recognised by last."""
    bucket.delete(name for name in names if name.endswith(INDEX_NAME))
    bucket.delete(name for name in names if not name.endswith((INDEX_NAME, SAVE_NAME)))
    bucket.delete(name for name in names if name.endswith(SAVE_NAME))


def _names_of_earlier_release(bucket: Bucket) -> list[str]:
    return [COMMON_NAME, *(name for folder in FOLDER_NAMES for name in bucket.names(f"{folder}/"))]


def require_something(bucket: Bucket) -> None:
    """Raise where there is nothing at all.

    Raises:
        CheckpointNotFoundError: there is not.
    """
    if not bucket.names():
        what = "there is no checkpoint"
        if not bucket.reports_missing_buckets:
            what += f", or no bucket {bucket.url.bucket!r}: listings do not show it"
        raise CheckpointNotFoundError(f"{bucket}: {what}", path=str(bucket))


def remove(bucket: Bucket) -> tuple[str, ...]:
    """Remove a checkpoint, or what a killed save left: the marker first, what it is known by last.

    Objects that are no part of it stay.

    Returns:
        What stays: names, without what comes behind their first ``/``.
    """
    for name in (MARKER_NAME, INDEX_NAME):
        if bucket.has(name):
            bucket.delete([name])
    names = bucket.names(SAVE_PREFIX)
    _delete_in_order(bucket, [*names, *_names_of_earlier_release(bucket)])
    return tuple(sorted({name.partition("/")[0] for name in bucket.names()}))
