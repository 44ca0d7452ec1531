"""When a place in an object store counts as a checkpoint, and how one save replaces another.

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

from dist_ckpt_strategies.config import Options
from dist_ckpt_strategies.errors import (
    CheckpointNotFoundError,
    IncompleteCheckpointError,
    StorageError,
    StrategyError,
)
from dist_ckpt_strategies.formats.commit import SavePlace
from dist_ckpt_strategies.formats.manifest import FOLDER_NAMES, INDEX_NAME, SAVE_NAME, begun_content
from dist_ckpt_strategies.formats.marker import CheckpointMarker
from dist_ckpt_strategies.storage.bucket import Bucket
from dist_ckpt_strategies.storage.files import COMMON_NAME, MARKER_NAME

logger = logging.getLogger(__name__)

SAVE_PREFIX = "save-"
_SAVE_FIELD = "save"
_SAVE_ID = re.compile(r"[0-9]{17}-[0-9a-f]{32}")


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
    whole = [name for name in _names_of_saves(bucket) if name.endswith(f"/{MARKER_NAME}")]
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
        begun = {name.partition("/")[0] for name in _names_of_saves(bucket)}
        if begun:
            return bucket.place(max(begun))
    return place


class BucketPlace(SavePlace):
    """A prefix of its own in an object store; see SavePlace.

    Args:
        bucket: the checkpoint.
        options: limits.
    """

    def __init__(self, bucket: Bucket, options: Options) -> None:
        super().__init__(bucket, options.timeout_s)
        self._bucket = bucket

    @property
    def location(self) -> Bucket:
        """See SavePlace."""
        return self._bucket.place(SAVE_PREFIX + self.save_id)

    def new_save_id(self) -> str:
        """See SavePlace. It is larger than that of the current save, whatever the clocks say."""
        self._bucket.require_bucket()
        last = int((_current_id(self._bucket) or "0").partition("-")[0])
        return f"{max(last + 1, time.time_ns() // 1000):017d}-{uuid.uuid4().hex}"

    def begin(self, keys: Collection[str] | None) -> None:  # noqa: ARG002 - a prefix of its own
        """See SavePlace. What earlier saves left without finishing is removed."""
        _remove_others(self._bucket, current_place(self._bucket))
        self.location.write(SAVE_NAME, begun_content(self.save_id))

    def abandon(self) -> None:
        """See SavePlace. A prefix that no marker names is not read; prune removes it."""

    def is_current(self) -> bool:
        """See SavePlace."""
        return self.location.has(SAVE_NAME)

    def commit(self, marker: bytes | None) -> None:
        """See SavePlace. What the save replaces is removed afterwards."""
        if marker is None:
            raise StrategyError(
                f"{self}: call dist_ckpt_strategies.save, which also puts the marker"
            )
        bucket, place = self._bucket, self.location
        if (_current_id(bucket) or "") > self.save_id or not self.is_current():
            raise self.superseded()
        place.write(MARKER_NAME, marker)
        content = {**json.loads(marker), _SAVE_FIELD: self.save_id}
        bucket.write(MARKER_NAME, json.dumps(content).encode())
        try:
            _remove_others(bucket, place)
        except StorageError as error:
            logger.warning("%s: what the save replaces cannot be removed: %s", bucket, error)


def _remove_others(bucket: Bucket, current: Bucket) -> None:
    """Delete what other saves have put. Nothing is deleted where nothing is.

    Who may put and read, and not delete, can save to a new URL.
    """
    kept = str(current.url).removeprefix(f"{bucket.url}/")
    _delete_in_order(bucket, [n for n in _names_of_saves(bucket) if n.partition("/")[0] != kept])
    if str(current) != str(bucket) and bucket.has(SAVE_NAME):
        _delete_in_order(bucket, _names_of_earlier_release(bucket))


def _delete_in_order(bucket: Bucket, names: Sequence[str]) -> None:
    """Delete objects of saves: manifests first, what a save is recognised by last."""
    rest = [name for name in names if not name.endswith((INDEX_NAME, SAVE_NAME))]
    bucket.delete(name for name in names if name.endswith(INDEX_NAME))
    bucket.delete(rest)
    bucket.delete(name for name in names if name.endswith(SAVE_NAME))


def _names_of_saves(bucket: Bucket) -> list[str]:
    return list(bucket.names_starting(SAVE_PREFIX))


def _names_of_earlier_release(bucket: Bucket) -> list[str]:
    return [COMMON_NAME, *(name for folder in FOLDER_NAMES for name in bucket.names(folder))]


def read_marker(bucket: Bucket) -> CheckpointMarker:
    """The marker of a finished checkpoint.

    Raises:
        CheckpointNotFoundError: there is nothing at that place.
        IncompleteCheckpointError: it has no marker or no manifest, or a marker that does not parse.
        BucketNotFoundError, StoreAccessError, StoreUnreachableError: the store does not answer.
    """
    place = current_place(bucket)
    path = place.path(MARKER_NAME)
    try:
        content = place.read(MARKER_NAME)
    except IncompleteCheckpointError:
        require_something(bucket)
        raise IncompleteCheckpointError(
            f"{bucket} is not a distributed checkpoint, or is incomplete: {path}, the last object "
            "of a save, is missing",
            path=path,
        ) from None
    if not place.has(INDEX_NAME):
        raise IncompleteCheckpointError(
            f"{bucket} is incomplete: {MARKER_NAME} is there, but {place.path(INDEX_NAME)} is "
            "missing",
            path=place.path(INDEX_NAME),
        )
    return CheckpointMarker.of_checkpoint(content, bucket, path)


def require_something(bucket: Bucket) -> None:
    """Raise where there is nothing at all.

    Raises:
        CheckpointNotFoundError: there is not.
    """
    if bucket.is_empty():
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
    _delete_in_order(bucket, [*_names_of_saves(bucket), *_names_of_earlier_release(bucket)])
    return tuple(sorted({name.partition("/")[0] for name in bucket.names("")}))
