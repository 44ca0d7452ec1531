"""Write a checkpoint of either format: arrays, objects, common state, and what describes them."""

import importlib.metadata
import json
import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from typing import Any

from dist_ckpt_strategies.config import Options
from dist_ckpt_strategies.core.array import ArraySpec, ObjectId
from dist_ckpt_strategies.core.chunk_grids import ChunkLayout
from dist_ckpt_strategies.errors import IncompleteCheckpointError
from dist_ckpt_strategies.formats.arrays import BucketWriter, DirectoryWriter, StoreWriter
from dist_ckpt_strategies.formats.commit import BucketPlace, DirectoryPlace
from dist_ckpt_strategies.formats.locations import Location, require_path, store_at
from dist_ckpt_strategies.formats.manifest import (
    HEADER,
    INDEX_LEAD,
    INDEX_NAME,
    MANIFEST_NAME,
    OBJECTS_NAME,
    Fields,
    SegmentEntry,
    digest_of,
)
from dist_ckpt_strategies.formats.objects import (
    OBJECT_SUFFIX,
    Allowed,
    dump_loadable,
    is_plain,
    plain_content,
    plain_value,
)
from dist_ckpt_strategies.storage.bucket import Bucket
from dist_ckpt_strategies.storage.files import COMMON_NAME, Directory
from dist_ckpt_strategies.storage.io_pool import Job, Transfer
from dist_ckpt_strategies.storage.store import Store

_OBJECT_THREADS = 8

_MAX_PLAIN_NBYTES = 4 << 10
"""Larger plain objects go to a file of objects, which keeps the manifest small."""

_PACKAGES = ("dist-ckpt-strategies", "megatron-core", "torch", "numpy", "tensorstore", "zarr")

_compact_json = partial(json.dumps, separators=(",", ":"), allow_nan=False)


class CheckpointWriter:
    """Writes one rank's share of a checkpoint to a place that only this save writes to.

    Only ("zarr", 2) takes a place in an object store. The manifest names ``global_rank`` as the
    writer. See PlaceBase for ``keeps_old`` and ``overwrite``.

    Attributes:
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
            self.arrays = BucketWriter(location, self.options)
        else:
            self.arrays = DirectoryWriter(location, self.options)
        self.store = self.arrays.store

    def write_objects(self, objects: Mapping[ObjectId, bytes]) -> None:
        """Store what was dumped of this rank's objects, durably: files of one, or of many.

        May be called again, with others. Small plain values go to the manifest.
        """
        location = self.place.location
        if self._is_format1 and isinstance(location, Path):
            jobs = []
            for one, content in objects.items():
                name = f"{one.unique_key}{OBJECT_SUFFIX}"
                write = partial(Directory(location).write, name, content, key=one.key)
                jobs.append(Job(one.key, f"{location}/{name}", write))
            Transfer(jobs, _OBJECT_THREADS).wait(self.options.timeout_s)
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
        """What this rank, which has created or written to ``arrays``, knows of each segment.

        ``firsts``: the first key that each segment may list; the empty one first.
        """
        rank = self._global_rank
        files: dict[str, list[Fields]] = defaultdict(list)
        for (key, index), digests in sorted(self.arrays.digests.items()):
            files[key].append({"index": index, "writer": rank, "digests": digests.hex()})
        segments: dict[int, dict[str, list[Fields]]]
        segments = defaultdict(lambda: {"arrays": [], "objects": []})
        for array in arrays:
            fields: Fields = {
                "key": array.key,
                "shape": array.shape,
                "dtype": array.dtype.value,
                "chunk_shape": array.chunk_shape,
                "inner_shape": array.inner_shape,
                "crc32c": array.has_crc32c,
                "chunks": files[array.key],
            }
            segments[bisect_right(firsts, array.key) - 1]["arrays"].append(fields)
        for fields in self._objects:
            segments[bisect_right(firsts, fields["key"]) - 1]["objects"].append(fields)
        return {number: _compact_json(fields).encode() for number, fields in segments.items()}

    def write_segment(self, number: int, first: str, contents: Iterable[bytes]) -> Any:
        """Write a segment of the manifest, durably; its entry in the index, of JSON types.

        ``first`` is the first key that it may list; ``contents`` are what ranks have ``described``.

        Raises:
            IncompleteCheckpointError: ranks describe an array differently, or no rank has written
                some chunk.
        """
        arrays: dict[str, tuple[Fields, list[Fields]]] = {}
        objects: list[Fields] = []
        problems = []
        for content in contents:
            segment = json.loads(content)
            objects += segment["objects"]
            for fields in segment["arrays"]:
                key, chunks = fields["key"], fields.pop("chunks")
                known, known_chunks = arrays.setdefault(key, (fields, []))
                known_chunks += chunks
                if known != fields:
                    problems.append(f"{key}: {known} on one rank, {fields} on another")
        for key, (fields, chunks) in arrays.items():
            pairs = zip(fields["shape"], fields["chunk_shape"], strict=True)
            expected = math.prod(-(-n // c) for n, c in pairs)
            if len({tuple(chunk["index"]) for chunk in chunks}) != expected:
                problems.append(f"{key}: {len(chunks)} of {expected} chunks")
        if problems:
            raise IncompleteCheckpointError(
                f"{self.store}: the files that the ranks wrote are not a checkpoint: {problems[0]}"
            )
        merged = {
            "arrays": [{**fields, "chunks": some} for _, (fields, some) in sorted(arrays.items())],
            "objects": sorted(objects, key=lambda fields: (fields["key"], fields["offset"])),
        }
        content, name = _compact_json(merged).encode(), f"{MANIFEST_NAME}/part-{number:05d}.json"
        self.store.write(name, content)
        return [name, first, len(content), digest_of(content), len(arrays), len(objects)]

    def write_index(
        self, entries: Iterable[Any], layout: Mapping[str, int], common: bytes | None
    ) -> None:
        """Write the manifest's index, durably: the last file but the marker; on the first rank.

        ``entries`` are what ``write_segment`` gave for all segments. ``common`` is the content of
        the common state's file; None where others have written that.
        """
        # Megatron-Core's own save has put the common state into the checkpoint already.
        for store in (self.store, store_at(self.root)) if common is None else ():
            with suppress(IncompleteCheckpointError):
                common = common or store.read(COMMON_NAME)
        segments = [SegmentEntry(*entry)._asdict() for entry in entries]
        body = {
            **HEADER,
            "layout": dict(layout),
            "versions": _installed_versions(),
            "common": None if common is None else [len(common), digest_of(common)],
            "parts": sorted(segments, key=lambda segment: segment["first"]),
        }
        rest = b'",' + json.dumps(body, indent=1).encode()[1:]
        self.store.write(INDEX_NAME, INDEX_LEAD + digest_of(rest).encode() + rest)


@cache
def _installed_versions() -> Mapping[str, str]:
    """The versions of the packages that take part; looking them up takes milliseconds."""
    found = {}
    for name in _PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):  # a package run from its sources
            found[name] = importlib.metadata.version(name)
    return found
