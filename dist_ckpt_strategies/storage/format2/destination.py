"""Where a save of format 2 goes: how room is made there, and what writes there."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Protocol

from dist_ckpt_strategies.config import Options
from dist_ckpt_strategies.spec.region import Extent
from dist_ckpt_strategies.storage.base import ArrayWriter
from dist_ckpt_strategies.storage.buckets import publication as bucket_publication
from dist_ckpt_strategies.storage.buckets.arrays import BucketWriter
from dist_ckpt_strategies.storage.buckets.bucket import Bucket
from dist_ckpt_strategies.storage.disk.file_access import permitted_access
from dist_ckpt_strategies.storage.file_store import Directory, FileStore
from dist_ckpt_strategies.storage.format2.arrays import Zarr3Writer
from dist_ckpt_strategies.storage.lifecycle.clearing import DirectoryRoom, require_room_for_format2
from dist_ckpt_strategies.storage.locations import Location


class DigestingWriter(ArrayWriter, Protocol):
    """An ArrayWriter that knows the digests of what it has written."""

    @property
    def digests(self) -> Mapping[tuple[str, Extent], list[int]]:
        """Of each chunk, by key and index: of its inner chunks, then of its index."""
        ...


class Destination(Protocol):
    """Where a save goes."""

    @property
    def file_store(self) -> FileStore:
        """Takes the small files."""
        ...

    @property
    def writer(self) -> DigestingWriter:
        """Takes the arrays."""
        ...

    @property
    def is_object_store(self) -> bool:
        """Whether files go as a whole, in one request each."""
        ...

    def examine(self, *, keeps_old: bool) -> None:
        """See what is there; unless ``keeps_old``, withdraw the marker of it."""
        ...

    def clear(self, keys: Collection[str]) -> None:
        """Make room for arrays and objects of these keys. After ``examine``, of the same rank."""
        ...


class DirectoryDestination:
    """A directory that a save goes to; see Destination.

    Args:
        root: the directory, which exists.
        options: how to write.
    """

    is_object_store = False

    def __init__(self, root: Path, options: Options) -> None:
        self._root = root
        self._room = DirectoryRoom(root)
        self.file_store = Directory(root)
        self.writer = Zarr3Writer(root, permitted_access(root, options))

    def examine(self, *, keeps_old: bool) -> None:
        """See Destination."""
        self._room.examine(keeps_old=keeps_old)

    def clear(self, keys: Collection[str]) -> None:
        """See Destination."""
        require_room_for_format2(self._root)
        self._room.clear(keys)


class BucketDestination:
    """A place in an object store that a save goes to; see Destination.

    Args:
        bucket: the place.
        options: how to write.
    """

    is_object_store = True

    def __init__(self, bucket: Bucket, options: Options) -> None:
        self.file_store = bucket
        self.writer = BucketWriter(bucket, options)

    def examine(self, *, keeps_old: bool) -> None:
        """See Destination."""
        self.file_store.require_bucket()
        if not keeps_old:
            bucket_publication.withdraw_marker(self.file_store)

    def clear(self, keys: Collection[str]) -> None:  # noqa: ARG002 - no key leads elsewhere
        """See Destination."""
        bucket_publication.require_room(self.file_store)
        bucket_publication.retract(self.file_store)


def open_destination(location: Location, options: Options) -> Destination:
    """Where a save to a location goes."""
    if isinstance(location, Bucket):
        return BucketDestination(location, options)
    return DirectoryDestination(location, options)


def open_writer(root: Path, options: Options) -> DigestingWriter:
    """What writes the arrays of a save to a directory."""
    return DirectoryDestination(root, options).writer
