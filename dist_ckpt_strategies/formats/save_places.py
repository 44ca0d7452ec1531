"""Where the files of one save go until it is committed: a directory, or a place in a bucket."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Protocol

from dist_ckpt_strategies.config import Options
from dist_ckpt_strategies.errors import StrategyError
from dist_ckpt_strategies.formats import bucket_commit as bucket_publication
from dist_ckpt_strategies.formats import commit as staging
from dist_ckpt_strategies.formats.finished import has_withdrawn_marker
from dist_ckpt_strategies.formats.locations import Location
from dist_ckpt_strategies.formats.manifest import SAVE_NAME
from dist_ckpt_strategies.storage.bucket import Bucket
from dist_ckpt_strategies.storage.io_pool import run_with_limit


class SavePlace(Protocol):
    """Where one save goes. Nobody else writes there."""

    @property
    def location(self) -> Location:
        """What the save writes into, after ``join``."""
        ...

    def new_save_id(self) -> str:
        """Look at what is there, on the first rank; the id of this save."""
        ...

    def join(self, save_id: str) -> None:
        """Take the id that the first rank has made."""
        ...

    def begin(self, keys: Collection[str] | None) -> None:
        """Make room for the save, on the first rank; ``keys`` of its arrays and objects.

        Raises:
            CheckpointExistsError: something is there that the save may not replace.
        """
        ...

    def require(self, owner: str) -> None:
        """Raise unless this rank sees what ``begin`` has made on the rank called ``owner``.

        Raises:
            StorageError: it does not.
        """
        ...

    def abandon(self) -> None:
        """Remove what ``begin`` has made, if anything, before a file of the save is in it."""
        ...

    def require_current(self) -> None:
        """Raise unless the place is still this save's, on the first rank.

        Raises:
            StorageError: another save has begun there, or all was removed.
        """
        ...

    def commit(self, marker: bytes | None) -> None:
        """Make the save, all of it durable, the checkpoint's content; on the first rank.

        Args:
            marker: makes it visible; None where the caller does.
        """
        ...


class DirectoryPlace:
    """A staging directory in the checkpoint's own; see SavePlace.

    Args:
        root: the checkpoint's directory, which exists before ``new_save_id``.
        options: limits.
        keeps_old: leave an earlier checkpoint whole until the commit. Not where the caller has
            replaced its ``common.pt`` already.
        overwrite: replace arrays and objects that belong to no finished checkpoint, too.
    """

    def __init__(self, root: Path, options: Options, *, keeps_old: bool, overwrite: bool) -> None:
        self._root = root
        self._timeout_s = options.timeout_s
        self._keeps_old = keeps_old
        self._overwrite = overwrite
        self._replaces = True
        self._save_id = ""

    @property
    def location(self) -> Path:
        """See SavePlace."""
        return staging.staging_directory(self._root, self._save_id)

    def new_save_id(self) -> str:
        """See SavePlace."""
        if not self._keeps_old:
            staging.invalidate(self._root)
            self._overwrite = self._overwrite or has_withdrawn_marker(self._root)
        return uuid.uuid4().hex

    def join(self, save_id: str) -> None:
        """See SavePlace."""
        self._save_id = save_id

    def begin(self, keys: Collection[str] | None) -> None:
        """See SavePlace. With unknown keys nothing is replaced but by ``overwrite``."""
        self._replaces = keys is not None or self._overwrite
        staging.begin_staging(self._root, self._save_id, keys, overwrite=self._overwrite)

    def require(self, owner: str) -> None:
        """See SavePlace."""
        staging.wait_until_seen(str(self._root), self._is_current, owner, self._timeout_s)

    def abandon(self) -> None:
        """See SavePlace. What cannot be removed is removed by the next save."""
        run_with_limit(partial(shutil.rmtree, self.location, ignore_errors=True), self._root)

    def require_current(self) -> None:
        """See SavePlace."""
        if not self._is_current():
            raise staging.superseded(self._root)

    def _is_current(self) -> bool:
        return staging.is_staged(self._root, self._save_id)

    def commit(self, marker: bytes | None) -> None:
        """See SavePlace."""
        staging.commit(self._root, self._save_id, marker, replaces=self._replaces)
        staging.clean_up_after_commit(self._root)


class BucketPlace:
    """A prefix of its own in an object store; see SavePlace.

    Args:
        bucket: the checkpoint.
        options: limits.
    """

    def __init__(self, bucket: Bucket, options: Options) -> None:
        self._bucket = bucket
        self._timeout_s = options.timeout_s
        self._save_id = ""

    @property
    def location(self) -> Bucket:
        """See SavePlace."""
        return bucket_publication.place_of(self._bucket, self._save_id)

    def new_save_id(self) -> str:
        """See SavePlace."""
        self._bucket.require_bucket()
        return bucket_publication.new_save_id(self._bucket)

    def join(self, save_id: str) -> None:
        """See SavePlace."""
        self._save_id = save_id

    def begin(self, keys: Collection[str] | None) -> None:  # noqa: ARG002 - a prefix of its own
        """See SavePlace."""
        bucket_publication.begin_save(self._bucket, self._save_id)

    def require(self, owner: str) -> None:
        """See SavePlace."""
        staging.wait_until_seen(str(self._bucket), self._is_current, owner, self._timeout_s)

    def abandon(self) -> None:
        """See SavePlace. A prefix without a manifest is not read; prune removes it."""

    def require_current(self) -> None:
        """See SavePlace."""
        if not self._is_current():
            raise staging.superseded(str(self._bucket))

    def _is_current(self) -> bool:
        return self.location.has(SAVE_NAME)

    def commit(self, marker: bytes | None) -> None:
        """See SavePlace."""
        if marker is None:
            raise StrategyError(
                f"{self._bucket}: call dist_ckpt_strategies.save, which also puts the marker"
            )
        bucket_publication.commit(self._bucket, self._save_id, marker)


def open_save_place(
    location: Location, options: Options, *, keeps_old: bool, overwrite: bool
) -> SavePlace:
    """Where a save to a location goes; arguments as for DirectoryPlace."""
    if isinstance(location, Bucket):
        return BucketPlace(location, options)
    return DirectoryPlace(location, options, keeps_old=keeps_old, overwrite=overwrite)
