"""Format ("zarr", 2): where a save goes, what a checkpoint holds."""

from __future__ import annotations

import importlib.metadata
import json
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from dist_ckpt_strategies.comm.base import Communicator
from dist_ckpt_strategies.config import Options
from dist_ckpt_strategies.errors import IncompleteCheckpointError
from dist_ckpt_strategies.megatron.parallel_layout import parallel_sizes
from dist_ckpt_strategies.megatron.shards import StateDict, metadata_object, metadata_tensor
from dist_ckpt_strategies.plan.array_grid import Cutting
from dist_ckpt_strategies.run.manifest import run_manifest
from dist_ckpt_strategies.run.staged import Digests
from dist_ckpt_strategies.spec.array import ArraySpec
from dist_ckpt_strategies.spec.manifest import (
    ArrayRecord,
    ChunkRecord,
    FileDigest,
    ManifestIndex,
    ObjectRecord,
    PartEntry,
    Span,
)
from dist_ckpt_strategies.spec.object import ObjectId
from dist_ckpt_strategies.spec.region import Extent
from dist_ckpt_strategies.storage.base import ArrayWriter
from dist_ckpt_strategies.storage.checkpoints import Format2Checkpoint
from dist_ckpt_strategies.storage.disk.files import COMMON_NAME
from dist_ckpt_strategies.storage.format2.destination import (
    DigestingWriter,
    open_destination,
    open_writer,
)
from dist_ckpt_strategies.storage.format2.manifest import (
    SAVE_NAME,
    SCHEMA,
    SCHEMA_VERSION,
    array_fields,
    digest_of,
    object_fields,
    pack_name,
    part_content,
)
from dist_ckpt_strategies.storage.lifecycle.tokens import superseded, wait_until_seen
from dist_ckpt_strategies.storage.locations import Location
from dist_ckpt_strategies.storage.objects.pickled import dump_content, plain_value
from dist_ckpt_strategies.strategies.save_planning import Planned

_MAX_PLAIN_NBYTES = 4 << 10
"""Larger plain objects go to the file of all objects, lest the manifest should grow with them."""

_PACKAGES = ("dist-ckpt-strategies", "megatron-core", "torch", "numpy", "tensorstore", "zarr")


class Format2Target:
    """Where a checkpoint of format ("zarr", 2) is saved to; see SaveTarget.

    Args:
        root: a directory, which exists, or a place in an object store.
        options: how to write, and in which form.
        global_rank: this rank, to be named as the writer.
        keeps_old: leave an earlier checkpoint whole until this one is known to be one that can be
            saved. Not where the caller has replaced ``common.pt`` already.
    """

    def __init__(
        self, root: Location, options: Options, global_rank: int, *, keeps_old: bool
    ) -> None:
        self.root = root
        self._options = options
        self._global_rank = global_rank
        self._keeps_old = keeps_old
        self._destination = open_destination(root, options)
        self._file_store = self._destination.file_store
        self._begun: str | None = None
        self._objects: list[ObjectRecord] = []
        self._digests: dict[tuple[str, Extent], list[int]] = {}

    @property
    def writer(self) -> DigestingWriter:
        """See SaveTarget."""
        return self._destination.writer

    @property
    def open_elsewhere(self) -> Callable[[], ArrayWriter] | None:
        """See SaveTarget. Credentials for object stores may be this process's alone."""
        if isinstance(self.root, Path):
            return partial(open_writer, self.root, self._options)
        return None

    @property
    def cutting(self) -> Cutting:
        """See SaveTarget."""
        if self._destination.is_object_store:
            return Cutting.BOUNDED_CRC32C if self._options.crc32c else Cutting.BOUNDED
        return Cutting.INNER_CRC32C if self._options.crc32c else Cutting.INNER

    def dump(self, obj: Any, *, name: str) -> bytes:
        """See SaveTarget."""
        return dump_content(obj, name=name)

    def examine(self) -> None:
        """See SaveTarget."""
        self._destination.examine(keeps_old=self._keeps_old)

    def clear(self, planned: Planned, token: str) -> None:
        """See SaveTarget."""
        self._destination.clear(planned.keys)
        saving = {
            "schema": SCHEMA,
            "version": SCHEMA_VERSION,
            "token": token,
            "host": socket.gethostname(),
            "time": time.time(),
        }
        self._file_store.write(SAVE_NAME, json.dumps(saving).encode())

    def require(self, token: str, owner: str) -> None:
        """See SaveTarget."""
        is_seen = partial(self._has_token, token)
        wait_until_seen(str(self.root), is_seen, owner, self._options.timeout_s)
        self._begun = token

    def _has_token(self, token: str) -> bool:
        return self._token() == token

    def _token(self) -> str | None:
        try:
            found: str | None = json.loads(self._file_store.read(SAVE_NAME)).get("token")
        except (IncompleteCheckpointError, ValueError, AttributeError):
            return None
        return found

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

    def require_current(self) -> None:
        """See SaveTarget."""
        if self._token() != self._begun:
            raise superseded(str(self.root))

    def complete(self, planned: Planned, comm: Communicator) -> None:
        """See SaveTarget. What every rank knows of its files becomes the manifest."""

        def describe() -> dict[int, bytes]:
            if comm.rank == 0:
                self.require_current()
            return self._known(planned)

        def index(parts: tuple[PartEntry, ...]) -> ManifestIndex:
            layout = {"ranks": comm.size, **parallel_sizes()}
            return ManifestIndex(parts, self._common(), layout, package_versions())

        run_manifest(planned.manifest, describe, self._file_store, comm, index)

    def _common(self) -> FileDigest | None:
        """The common state's file; through Megatron-Core's own save it is there already."""
        try:
            content = self._file_store.read(COMMON_NAME)
        except IncompleteCheckpointError:
            return None
        return FileDigest(len(content), digest_of(content))

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
            number: part_content(described[number], objects[number])
            for number in {*described, *objects}
        }


def package_versions() -> dict[str, str]:
    """Versions of the packages that take part in a save, by name."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # a package run from its sources
    return found


def manifest_metadata(checkpoint: Format2Checkpoint, *, with_objects: bool) -> StateDict:
    """ShardedTensors (and objects) without data for all that a checkpoint holds. Rank-local."""
    manifest = checkpoint.manifest
    found: StateDict = {
        record.array.key: metadata_tensor(record.array) for record in manifest.arrays()
    }
    if with_objects:
        found |= {r.id.unique_key: metadata_object(r.id) for r in manifest.objects()}
    return found
