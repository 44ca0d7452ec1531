"""Write a checkpoint of either format: arrays, objects, common state, and what describes them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple
from functools import partial
from pathlib import Path
from typing import Any

from dist_ckpt_strategies.config import Options
from dist_ckpt_strategies.core.array import ArraySpec, ObjectId
from dist_ckpt_strategies.core.chunk_grids import ChunkLayout
from dist_ckpt_strategies.core.region import Shape
from dist_ckpt_strategies.errors import IncompleteCheckpointError
from dist_ckpt_strategies.formats.bucket_arrays import BucketWriter
from dist_ckpt_strategies.formats.clearing import require_room_for_format2
from dist_ckpt_strategies.formats.commit import SavePlace
from dist_ckpt_strategies.formats.locations import Location, open_save_place, require_path
from dist_ckpt_strategies.formats.manifest import (
    INDEX_NAME,
    SAVE_NAME,
    ArrayRecord,
    ChunkRecord,
    FileDigest,
    ManifestIndex,
    ObjectRecord,
    SegmentEntry,
    Span,
    array_fields,
    begun_content,
    digest_of,
    index_content,
    merged_segment,
    object_fields,
    pack_name,
    package_versions,
    segment_content,
    write_segment,
)
from dist_ckpt_strategies.formats.object_files import OBJECT_SUFFIX
from dist_ckpt_strategies.formats.objects import (
    Allowed,
    dump_loadable,
    is_plain,
    plain_content,
    plain_value,
    write_dumped,
)
from dist_ckpt_strategies.formats.zarr2 import Zarr2Layout
from dist_ckpt_strategies.formats.zarr2_arrays import open_array_store
from dist_ckpt_strategies.formats.zarr3_arrays import ArrayWriterBase, open_writer
from dist_ckpt_strategies.storage.base import ArrayWriter
from dist_ckpt_strategies.storage.bucket import Bucket
from dist_ckpt_strategies.storage.files import COMMON_NAME
from dist_ckpt_strategies.storage.io_pool import Job, run_pooled, run_with_limit
from dist_ckpt_strategies.storage.store import Directory, Store

Digests = Mapping[tuple[str, Shape], list[int]]
"""Of each chunk, by key and index: of its inner chunks, then of its index."""

_OBJECT_THREADS = 8

_MAX_PLAIN_NBYTES = 4 << 10
"""Larger plain objects go to the file of all objects, which keeps the manifest small."""


class CheckpointWriter(ABC):
    """Writes one rank's share of a checkpoint to a place that only this save writes to.

    Args:
        root: the checkpoint: a directory, or for ("zarr", 2) a place in an object store.
        options: how to write.
        keeps_old: see DirectoryPlace.
        overwrite: see DirectoryPlace.

    Attributes:
        root: the checkpoint.
        place: where the save writes until its commit.
        arrays: writes the arrays; after ``require``.
    """

    arrays: ArrayWriter

    def __init__(
        self, root: Location, options: Options, *, keeps_old: bool, overwrite: bool
    ) -> None:
        self.root = root
        self.options = options
        self.place: SavePlace = open_save_place(
            root, options, keeps_old=keeps_old, overwrite=overwrite
        )

    @property
    @abstractmethod
    def chunk_layout(self) -> ChunkLayout:
        """What the file of a chunk consists of."""

    @property
    @abstractmethod
    def open_elsewhere(self) -> Callable[[], ArrayWriter] | None:
        """Picklable factory of ``arrays`` for another process; None if not supported."""

    @abstractmethod
    def dump(self, obj: Any, *, name: str, allow: Allowed) -> bytes:
        """What will be stored of an object.

        Raises:
            UnsafeObjectError: it needs a class that a load would refuse.
        """

    def begin(self, keys: Collection[str]) -> None:
        """Make the place of the save; on the first rank. ``keys`` of all arrays and objects."""
        self.place.begin(keys)

    @abstractmethod
    def require(self, owner: str) -> None:
        """Open ``arrays`` in the place that ``begin`` has made on the rank called ``owner``.

        Raises:
            StorageError: this rank does not see it.
        """

    @abstractmethod
    def write_objects(self, objects: Mapping[ObjectId, bytes]) -> None:
        """Store what was dumped of this rank's objects, durably."""

    def write_common(self, content: bytes) -> None:
        """Store the common state's file, durably; on the first rank."""
        self.store.write(COMMON_NAME, content)

    @property
    def store(self) -> Store:
        """The place of the save, as files."""
        location = self.place.location
        return location if isinstance(location, Bucket) else Directory(location)

    def take_digests(self, digests: Digests) -> None:
        """Take the digests of chunks that another process has written."""
        del digests

    def described(
        self, arrays: Iterable[ArraySpec], segment_of: Callable[[str], int]
    ) -> dict[int, bytes]:
        """What this rank knows of each segment of the manifest; empty without a manifest.

        Args:
            arrays: those that this rank has created or written to.
            segment_of: gives the segment that lists a key.
        """
        del arrays, segment_of
        return {}

    def write_segment(self, number: int, first: str, contents: Sequence[bytes]) -> Any:
        """Write a segment of the manifest, durably; its entry in the index, of JSON types.

        Args:
            number: of the segment.
            first: the first key that it may list.
            contents: what ranks know of it, as ``described`` gives it.

        Raises:
            IncompleteCheckpointError: no rank has written some chunk.
        """
        del number, first, contents

    def write_index(
        self, entries: Sequence[Any], layout: Mapping[str, int], common: bytes | None
    ) -> None:
        """Write the manifest's index, durably; on the first rank.

        Args:
            entries: of all segments.
            layout: parallel sizes of the job that saved.
            common: content of the common state's file; None where others have written that.
        """
        del entries, layout, common


class Format1Writer(CheckpointWriter):
    """Writes a checkpoint of format ("zarr", 1); see CheckpointWriter."""

    chunk_layout = ChunkLayout.WHOLE

    def __init__(
        self, root: Location, options: Options, *, keeps_old: bool, overwrite: bool
    ) -> None:
        path = require_path(root, "format ('zarr', 1)")
        super().__init__(path, options, keeps_old=keeps_old, overwrite=overwrite)

    @property
    def open_elsewhere(self) -> Callable[[], ArrayWriter]:
        """See CheckpointWriter."""
        return partial(open_array_store, self._directory, self.options)

    @property
    def _directory(self) -> Path:
        return require_path(self.place.location, "format ('zarr', 1)")

    def dump(self, obj: Any, *, name: str, allow: Allowed) -> bytes:
        """See CheckpointWriter."""
        return dump_loadable(obj, name=name, allow=allow)

    def require(self, owner: str) -> None:
        """See CheckpointWriter."""
        self.place.require(owner)
        self.arrays = open_array_store(self._directory, self.options)

    def write_objects(self, objects: Mapping[ObjectId, bytes]) -> None:
        """See CheckpointWriter. One file for each."""
        if not objects:
            return
        root = self._directory
        jobs = (
            Job(
                name.key,
                root / f"{name.unique_key}{OBJECT_SUFFIX}",
                partial(write_dumped, root, name, content),
            )
            for name, content in objects.items()
        )
        run_pooled(jobs, _OBJECT_THREADS).wait(self.options.timeout_s)
        sync = partial(Zarr2Layout(root).sync_directories, {name.key for name in objects})
        run_with_limit(sync, root)


class Format2Writer(CheckpointWriter):
    """Writes a checkpoint of format ("zarr", 2); see CheckpointWriter.

    Args:
        global_rank: this rank, named in the manifest as the writer.
    """

    arrays: ArrayWriterBase

    def __init__(
        self,
        root: Location,
        options: Options,
        *,
        global_rank: int,
        keeps_old: bool,
        overwrite: bool,
    ) -> None:
        super().__init__(root, options, keeps_old=keeps_old, overwrite=overwrite)
        self._global_rank = global_rank
        self._objects: list[ObjectRecord] = []
        self._digests: dict[tuple[str, Shape], list[int]] = {}

    @property
    def chunk_layout(self) -> ChunkLayout:
        """See CheckpointWriter. An object of a bucket has a few hundred megabytes at most."""
        return ChunkLayout.BOUNDED if isinstance(self.root, Bucket) else ChunkLayout.INNER

    @property
    def open_elsewhere(self) -> Callable[[], ArrayWriter] | None:
        """See CheckpointWriter. Credentials for object stores may be this process's alone."""
        location = self.place.location
        return partial(open_writer, location, self.options) if isinstance(location, Path) else None

    def dump(self, obj: Any, *, name: str, allow: Allowed) -> bytes:
        """See CheckpointWriter."""
        return plain_content(obj) if is_plain(obj) else dump_loadable(obj, name=name, allow=allow)

    def begin(self, keys: Collection[str]) -> None:
        """See CheckpointWriter."""
        if isinstance(self.root, Path):
            require_room_for_format2(self.root)
        self.place.begin(keys)
        location = self.place.location
        if isinstance(location, Path):
            self.store.write(SAVE_NAME, begun_content(location.name))

    def require(self, owner: str) -> None:
        """See CheckpointWriter."""
        self.place.require(owner)
        location = self.place.location
        if isinstance(location, Bucket):
            self.arrays = BucketWriter(location, self.options)
        else:
            self.arrays = open_writer(location, self.options)

    def write_objects(self, objects: Mapping[ObjectId, bytes], number: int | None = None) -> None:
        """See CheckpointWriter. Small plain values go to the manifest, the others to one file.

        Args:
            objects: what was dumped of each.
            number: of that file; this rank's by default.
        """
        name = pack_name(self._global_rank if number is None else number)
        pack = bytearray()
        for object_id, content in sorted(objects.items()):
            found = plain_value(content) if len(content) <= _MAX_PLAIN_NBYTES else None
            if found is not None:
                self._objects.append(ObjectRecord(object_id, self._global_rank, None, found.value))
                continue
            span = Span(name, len(pack), len(content), digest_of(content))
            self._objects.append(ObjectRecord(object_id, self._global_rank, span))
            pack += content
        if pack:
            self.store.write(name, bytes(pack))

    def take_digests(self, digests: Digests) -> None:
        """See CheckpointWriter."""
        self._digests.update(digests)

    def described(
        self, arrays: Iterable[ArraySpec], segment_of: Callable[[str], int]
    ) -> dict[int, bytes]:
        """See CheckpointWriter."""
        chunks: dict[str, dict[Shape, ChunkRecord]] = defaultdict(dict)
        for (key, index), digests in {**self.arrays.digests, **self._digests}.items():
            chunks[key][index] = ChunkRecord.of(self._global_rank, digests)
        found: dict[int, tuple[list[Any], list[Any]]] = defaultdict(lambda: ([], []))
        for array in arrays:
            record = ArrayRecord(array, chunks.get(array.key, {}))
            found[segment_of(array.key)][0].append(array_fields(record))
        for one in self._objects:
            found[segment_of(one.id.key)][1].append(object_fields(one))
        return {number: segment_content(*both) for number, both in found.items()}

    def write_segment(self, number: int, first: str, contents: Sequence[bytes]) -> Any:
        """See CheckpointWriter."""
        try:
            arrays, objects = merged_segment(contents)
        except ValueError as error:
            raise IncompleteCheckpointError(
                f"{self.store}: what the ranks have written makes no checkpoint: {error}"
            ) from error
        return list(astuple(write_segment(self.store, number, first, arrays, objects)))

    def write_index(
        self, entries: Sequence[Any], layout: Mapping[str, int], common: bytes | None
    ) -> None:
        """See CheckpointWriter."""
        segments = sorted((SegmentEntry(*entry) for entry in entries), key=_first_key)
        content = common or self._written_common()
        listed = None if content is None else FileDigest(len(content), digest_of(content))
        index = ManifestIndex(tuple(segments), listed, layout, package_versions())
        self.store.write(INDEX_NAME, index_content(index))

    def _written_common(self) -> bytes | None:
        """The common state's file; through Megatron-Core's own save it is in place already."""
        above = self.root if isinstance(self.root, Bucket) else Directory(self.root)
        for store in (self.store, above):
            with suppress(IncompleteCheckpointError):
                return store.read(COMMON_NAME)
        return None


def _first_key(entry: SegmentEntry) -> str:
    return entry.first
