"""Write a checkpoint of either format: arrays, objects, common state, and what describes them."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from dist_ckpt_strategies.config import Options
from dist_ckpt_strategies.core.array import ArraySpec, ObjectId, Shape
from dist_ckpt_strategies.core.chunk_grids import ChunkLayout
from dist_ckpt_strategies.errors import IncompleteCheckpointError
from dist_ckpt_strategies.formats.arrays import BucketWriter, DirectoryWriter, StoreWriter
from dist_ckpt_strategies.formats.commit import BucketPlace, DirectoryPlace
from dist_ckpt_strategies.formats.locations import Location, require_path, store_at
from dist_ckpt_strategies.formats.manifest import (
    INDEX_NAME,
    MANIFEST_NAME,
    OBJECTS_NAME,
    Fields,
    SegmentEntry,
    array_fields,
    digest_of,
    index_content,
    merged_segment,
    segment_content,
)
from dist_ckpt_strategies.formats.objects import (
    Allowed,
    dump_loadable,
    is_plain,
    plain_content,
    plain_value,
    write_dumped,
)
from dist_ckpt_strategies.storage.bucket import Bucket
from dist_ckpt_strategies.storage.files import COMMON_NAME, Directory, sync_jobs
from dist_ckpt_strategies.storage.io_pool import Job, Transfer
from dist_ckpt_strategies.storage.store import Store

_OBJECT_THREADS = 8

_MAX_PLAIN_NBYTES = 4 << 10
"""Larger plain objects go to a file of objects, which keeps the manifest small."""


class CheckpointWriter:
    """Writes one rank's share of a checkpoint to a place that only this save writes to.

    Args:
        version: of the format, ("zarr", 1) or ("zarr", 2).
        root: the checkpoint: a directory, or for ("zarr", 2) a place in an object store.
        options: how to write.
        global_rank: this rank, named in the manifest as the writer.
        keeps_old: see PlaceBase.
        overwrite: see PlaceBase.

    Attributes:
        version: of the format.
        options: how it writes.
        root: the checkpoint.
        chunk_layout: what a chunk's file consists of; an object has a few hundred MB at most.
        place: where the save writes until its commit.
        store: that place, as files; after ``require``.
        arrays: writes the arrays; after ``require``.
    """

    store: Store
    arrays: StoreWriter

    def __init__(
        self,
        version: int,
        root: Location,
        options: Options,
        *,
        global_rank: int,
        keeps_old: bool,
        overwrite: bool,
    ) -> None:
        self.version, self.root = version, root
        self._is_format1 = version == 1
        self.chunk_layout = ChunkLayout.BOUNDED if isinstance(root, Bucket) else ChunkLayout.INNER
        if self._is_format1:
            require_path(root, "format ('zarr', 1)")
            self.chunk_layout = ChunkLayout.WHOLE
        place = BucketPlace if isinstance(root, Bucket) else DirectoryPlace
        self.place = place(root, options, keeps_old, overwrite, is_format2=not self._is_format1)
        self.options, self._global_rank = options, global_rank
        self._objects: list[Fields] = []
        self._num_packs = 0

    def dump(self, obj: Any, *, name: str, allow: Allowed) -> bytes:
        """What will be stored of an object.

        Raises:
            UnsafeObjectError: it needs a class that a load would refuse.
        """
        if not self._is_format1 and is_plain(obj):
            return plain_content(obj)
        return dump_loadable(obj, name=name, allow=allow)

    def require(self, owner: str) -> None:
        """Open ``arrays`` in the place that the rank called ``owner`` has made.

        Raises:
            StorageError: this rank does not see it.
        """
        self.place.require(owner)
        location = self.place.location
        if isinstance(location, Bucket):
            self.store, self.arrays = location, BucketWriter(location, self.options)
        else:
            self.store = Directory(location)
            self.arrays = DirectoryWriter(location, self.options)

    def write_objects(self, objects: Mapping[ObjectId, bytes]) -> None:
        """Store what was dumped of this rank's objects, durably: files of one, or of many.

        May be called again, with others. Small plain values go to the manifest.
        """
        location = self.place.location
        if self._is_format1 and isinstance(location, Path):
            jobs = []
            for one, content in objects.items():
                write = partial(write_dumped, location, one, content)
                jobs.append(Job(one.key, f"{location}/{one.unique_key}", write))
            Transfer(jobs, _OBJECT_THREADS).wait(self.options.timeout_s)
            names = {one.key: one.key for one in objects}
            Transfer(sync_jobs(location, names), _OBJECT_THREADS).wait(self.options.timeout_s)
            return
        pack = bytearray()
        name = f"{OBJECTS_NAME}/rank-{self._global_rank + self._num_packs:05d}.bin"
        self._num_packs += 1
        for object_id, content in sorted(objects.items()):
            plain = plain_value(content) if len(content) <= _MAX_PLAIN_NBYTES else None
            fields: Fields = {**asdict(object_id), "writer": self._global_rank}
            if plain is not None:
                fields["value"] = plain.value
            else:
                fields["span"] = [name, len(pack), len(content), digest_of(content)]
                pack += content
            self._objects.append(fields)
        if pack:
            self.store.write(name, bytes(pack))

    def described(self, arrays: Iterable[ArraySpec], firsts: Sequence[str]) -> dict[int, bytes]:
        """What this rank knows of each segment of the manifest.

        Args:
            arrays: those that this rank has created or written to.
            firsts: the first key that each segment may list; the empty one first.
        """
        chunks: dict[str, dict[Shape, bytes]] = defaultdict(dict)
        for (key, index), digests in self.arrays.digests.items():
            chunks[key][index] = digests
        found: dict[int, tuple[list[Fields], list[Fields]]] = defaultdict(lambda: ([], []))
        for array in arrays:
            fields = array_fields(array, self._global_rank, chunks[array.key])
            found[bisect_right(firsts, array.key) - 1][0].append(fields)
        for fields in self._objects:
            found[bisect_right(firsts, fields["key"]) - 1][1].append(fields)
        return {number: segment_content(*both) for number, both in found.items()}

    def write_segment(self, number: int, first: str, contents: Iterable[bytes]) -> Any:
        """Write a segment of the manifest, durably; its entry in the index, of JSON types.

        Args:
            number: of the segment.
            first: the first key that it may list.
            contents: what ranks know of it, as ``described`` gives it.

        Raises:
            IncompleteCheckpointError: ranks describe an array differently, or no rank has written
                some chunk.
        """
        try:
            arrays, objects = merged_segment(contents)
        except ValueError as error:
            raise IncompleteCheckpointError(
                f"{self.store}: the files that the ranks wrote are not a checkpoint: {error}"
            ) from error
        content, name = segment_content(arrays, objects), f"{MANIFEST_NAME}/part-{number:05d}.json"
        self.store.write(name, content)
        return [name, first, len(content), digest_of(content), len(arrays), len(objects)]

    def write_index(
        self, entries: Iterable[Any], layout: Mapping[str, int], common: bytes | None
    ) -> None:
        """Write the manifest's index, durably: the last file but the marker; on the first rank.

        Args:
            entries: of all segments, as ``write_segment`` gave them.
            layout: parallel sizes of the job that saved.
            common: content of the common state's file; None where others have written that.
        """
        segments = [SegmentEntry(*entry) for entry in entries]
        # Megatron-Core's own save has put the common state into the checkpoint already.
        for store in (self.store, store_at(self.root)) if common is None else ():
            with suppress(IncompleteCheckpointError):
                common = common or store.read(COMMON_NAME)
        self.store.write(INDEX_NAME, index_content(segments, common, layout))
