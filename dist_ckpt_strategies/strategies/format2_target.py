"""Format ("zarr", 2): where a save goes, what a checkpoint holds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from dist_ckpt_strategies.comm.base import Communicator
from dist_ckpt_strategies.config import Options
from dist_ckpt_strategies.core.array import ArraySpec, ObjectId
from dist_ckpt_strategies.core.region import Extent
from dist_ckpt_strategies.errors import IncompleteCheckpointError
from dist_ckpt_strategies.formats.bucket_arrays import BucketWriter
from dist_ckpt_strategies.formats.checkpoints import Format2Checkpoint
from dist_ckpt_strategies.formats.clearing import require_room_for_format2
from dist_ckpt_strategies.formats.locations import Location, open_save_place
from dist_ckpt_strategies.formats.manifest import (
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
    object_fields,
    pack_name,
    package_versions,
    segment_content,
)
from dist_ckpt_strategies.formats.objects import (
    Allowed,
    dump_loadable,
    is_plain,
    plain_content,
    plain_value,
)
from dist_ckpt_strategies.formats.zarr3_arrays import ArrayWriterBase, open_writer
from dist_ckpt_strategies.megatron.parallel_layout import parallel_sizes
from dist_ckpt_strategies.megatron.shards import StateDict, metadata_object, metadata_tensor
from dist_ckpt_strategies.sharded.manifest import run_manifest
from dist_ckpt_strategies.sharded.plan_grids import Cutting
from dist_ckpt_strategies.sharded.staged import Digests
from dist_ckpt_strategies.storage.base import ArrayWriter
from dist_ckpt_strategies.storage.bucket import Bucket
from dist_ckpt_strategies.storage.files import COMMON_NAME
from dist_ckpt_strategies.storage.store import Directory, Store
from dist_ckpt_strategies.strategies.save_planning import Planned

_MAX_PLAIN_NBYTES = 4 << 10
"""Larger plain objects go to the file of all objects, lest the manifest should grow with them."""


class Format2Target:
    """Where a checkpoint of format ("zarr", 2) is saved to; see SaveTarget.

    Args:
        root: a directory, which exists, or a place in an object store.
        options: how to write, and in which form.
        global_rank: this rank, to be named as the writer.
        keeps_old: see DirectoryPlace.
        overwrite: see DirectoryPlace.
    """

    def __init__(
        self,
        root: Location,
        options: Options,
        global_rank: int,
        *,
        keeps_old: bool,
        overwrite: bool,
    ) -> None:
        self.root = root
        self.place = open_save_place(root, options, keeps_old=keeps_old, overwrite=overwrite)
        self._options = options
        self._global_rank = global_rank
        self._objects: list[ObjectRecord] = []
        self._digests: dict[tuple[str, Extent], list[int]] = {}
        self.writer: ArrayWriterBase

    @property
    def open_elsewhere(self) -> Callable[[], ArrayWriter] | None:
        """See SaveTarget. Credentials for object stores may be this process's alone."""
        location = self.place.location
        return partial(open_writer, location, self._options) if isinstance(location, Path) else None

    @property
    def cutting(self) -> Cutting:
        """See SaveTarget."""
        return Cutting.BOUNDED if isinstance(self.root, Bucket) else Cutting.INNER

    def dump(self, obj: Any, *, name: str, allow: Allowed) -> bytes:
        """See SaveTarget."""
        return plain_content(obj) if is_plain(obj) else dump_loadable(obj, name=name, allow=allow)

    def begin(self, planned: Planned) -> None:
        """See SaveTarget."""
        if isinstance(self.root, Path):
            require_room_for_format2(self.root)
        self.place.begin(planned.keys)
        location = self.place.location
        if isinstance(location, Path):
            Directory(location).write(SAVE_NAME, begun_content(location.name))

    def require(self, owner: str) -> None:
        """See SaveTarget."""
        self.place.require(owner)
        location = self.place.location
        if isinstance(location, Bucket):
            self.writer = BucketWriter(location, self._options)
        else:
            self.writer = open_writer(location, self._options)

    @property
    def _file_store(self) -> Store:
        location = self.place.location
        return location if isinstance(location, Bucket) else Directory(location)

    def write_objects(self, objects: Mapping[ObjectId, bytes]) -> None:
        """See SaveTarget. Small plain values go to the manifest, the others to one file."""
        name = pack_name(self._global_rank)
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
            self._file_store.write(name, bytes(pack))

    def take_digests(self, digests: Digests) -> None:
        """See SaveTarget."""
        self._digests.update(digests)

    def complete(self, planned: Planned, comm: Communicator) -> None:
        """See SaveTarget. What every rank knows of its files becomes the manifest."""

        def describe() -> dict[int, bytes]:
            return self._known(planned)

        def index(segments: tuple[SegmentEntry, ...]) -> ManifestIndex:
            layout = {"ranks": comm.size, **parallel_sizes()}
            return ManifestIndex(segments, self._common(), layout, package_versions())

        run_manifest(planned.manifest, describe, self._file_store, comm, index)

    def _common(self) -> FileDigest | None:
        """The common state's file; through Megatron-Core's own save it is in place already."""
        above = self._file_store if isinstance(self.root, Bucket) else Directory(self.root)
        for file_store in (self._file_store, above):
            with suppress(IncompleteCheckpointError):
                content = file_store.read(COMMON_NAME)
                return FileDigest(len(content), digest_of(content))
        return None

    def _known(self, planned: Planned) -> dict[int, bytes]:
        """What this rank knows, by part of the manifest."""
        chunks: dict[str, dict[Extent, ChunkRecord]] = defaultdict(dict)
        for (key, index), digests in {**self.writer.digests, **self._digests}.items():
            chunks[key][index] = ChunkRecord.of(self._global_rank, digests)
        arrays: dict[str, ArraySpec] = {c.array.key: c.array for c in planned.plan.creations}
        arrays |= {write.array.key: write.array for write in planned.plan.writes}
        described: dict[int, list[Any]] = defaultdict(list)
        for key, array in arrays.items():
            record = ArrayRecord(array, chunks.get(key, {}))
            described[planned.manifest.part_of(key)].append(array_fields(record))
        objects: dict[int, list[Any]] = defaultdict(list)
        for found in self._objects:
            objects[planned.manifest.part_of(found.id.key)].append(object_fields(found))
        return {
            number: segment_content(described[number], objects[number])
            for number in {*described, *objects}
        }


def manifest_metadata(checkpoint: Format2Checkpoint, *, with_objects: bool) -> StateDict:
    """ShardedTensors (and objects) without data for all that a checkpoint holds. Rank-local."""
    manifest = checkpoint.manifest
    found: StateDict = {
        record.array.key: metadata_tensor(record.array) for record in manifest.arrays()
    }
    if with_objects:
        found |= {r.id.unique_key: metadata_object(r.id) for r in manifest.objects()}
    return found
