"""Conversions to Zarr: format 1 and format 2, a chunk file at a time, without holding it whole."""

from __future__ import annotations

import json
import os
import socket
import time
import uuid
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from dist_ckpt_strategies.plan.convert import ConvertPlan, slabs
from dist_ckpt_strategies.plan.manifest import ManifestPlan, build_manifest_plan
from dist_ckpt_strategies.spec.conversion import Part, Unit
from dist_ckpt_strategies.spec.inner_grid import InnerGrid, Run
from dist_ckpt_strategies.spec.manifest import (
    ArrayRecord,
    ChunkRecord,
    FileDigest,
    ManifestIndex,
    ObjectRecord,
    PartEntry,
    Span,
)
from dist_ckpt_strategies.spec.marker import CheckpointMarker
from dist_ckpt_strategies.spec.object import ObjectId
from dist_ckpt_strategies.spec.region import Extent
from dist_ckpt_strategies.storage.conversion.journal import Record
from dist_ckpt_strategies.storage.conversion.targets import (
    Contents,
    Flush,
    Memory,
    ReadBox,
    has_size,
    key_of,
    new_file,
    read_part,
)
from dist_ckpt_strategies.storage.disk.files import (
    COMMON_NAME,
    create_file,
    file_errors,
    sync_path,
    write_file,
)
from dist_ckpt_strategies.storage.file_store import Directory, FileStore
from dist_ckpt_strategies.storage.format1.layout import Zarr2Layout
from dist_ckpt_strategies.storage.format2.chunk_files import runs_at_a_time
from dist_ckpt_strategies.storage.format2.inner_codec import encode_index, encode_run
from dist_ckpt_strategies.storage.format2.layout import (
    metadata_content,
    metadata_name,
)
from dist_ckpt_strategies.storage.format2.manifest import (
    INDEX_NAME,
    SAVE_NAME,
    SCHEMA,
    SCHEMA_VERSION,
    array_fields,
    digest_of,
    index_content,
    object_fields,
    pack_name,
    part_content,
    part_name,
)
from dist_ckpt_strategies.storage.objects.pickled import dump_object, plain_value, write_dumped
from dist_ckpt_strategies.storage.raw_chunks import write_buffered

_MAX_PARTS = 1024
_MAX_PLAIN_NBYTES = 4 << 10
"""Larger plain objects go to the file of all objects, lest the manifest should grow with them."""


class Format1Conversion:
    """Writes ("zarr", 1); see Target.

    Args:
        root: the directory, which exists.
        flush: how files become durable.
        box_nbytes: bound on what is in memory at once.
    """

    marker = CheckpointMarker("zarr", 1)

    def __init__(self, root: Path, flush: Flush, box_nbytes: int) -> None:
        self._root = root
        self._flush = flush
        self._box_nbytes = box_nbytes
        self._memory = Memory()

    def begin(self, plan: ConvertPlan) -> None:
        """See Target."""
        layout = Zarr2Layout(self._root)
        for array in plan.arrays:
            layout.create(array, is_flushed=self._flush.is_each)

    def write(self, unit: Unit, read: ReadBox) -> Record:
        """See Target."""
        (part,) = unit.parts
        path = f"{self._root}/{unit.name}"
        with new_file(path, key_of(unit), is_flushed=self._flush.is_each) as handle:
            for box in slabs(part.region, part.array.dtype.itemsize, self._box_nbytes, part.grain):
                found = read_part(part, box, read, self._memory)
                write_buffered(handle, found.reshape(-1).view(np.uint8))
        return {}

    def is_there(self, unit: Unit, record: Record) -> bool:  # noqa: ARG002
        """See Target."""
        return has_size(f"{self._root}/{unit.name}", unit.parts[0].array.chunk_nbytes)

    def finish(
        self,
        plan: ConvertPlan,
        records: Mapping[int, Record],  # noqa: ARG002
        contents: Contents,
    ) -> None:
        """See Target."""
        keys = [array.key for array in plan.arrays]
        for object_id, content in contents.objects:
            plain = plain_value(content)
            name = object_id.unique_key
            dumped = content if plain is None else dump_object(plain.value, name=name)
            write_dumped(self._root, object_id, dumped)
            keys.append(object_id.key)
        write_common(self._root, contents.common)
        Zarr2Layout(self._root).sync_directories(keys)


class Format2Conversion:
    """Writes ("zarr", 2); see Target.

    Args:
        root: the directory, which exists.
        flush: how files become durable.
        box_nbytes: bound on what is in memory at once.
    """

    marker = CheckpointMarker("zarr", 2)

    def __init__(self, root: Path, flush: Flush, box_nbytes: int) -> None:
        self._root = root
        self._file_store = Directory(root)
        self._flush = flush
        self._box_nbytes = box_nbytes
        self._memory = Memory()

    def begin(self, plan: ConvertPlan) -> None:
        """See Target."""
        begin_save(self._file_store)
        for array in plan.arrays:
            path, content = self._file_store.path(metadata_name(array.key)), metadata_content(array)
            with file_errors(array.key, path):
                if not create_file(path, content):
                    write_file(Path(path), content)
                elif self._flush.is_each:
                    sync_path(path)

    def write(self, unit: Unit, read: ReadBox) -> Record:
        """See Target."""
        (part,) = unit.parts
        grid = _grid_of(part)
        digests: list[int] = []
        path = self._file_store.path(unit.name)
        with new_file(path, key_of(unit), is_flushed=self._flush.is_each) as handle:
            for run in grid.all(max(1, self._box_nbytes // grid.stored_nbytes)):
                digests += self._write_run(handle, grid, run, part, read)
            index = np.frombuffer(encode_index(grid), np.uint8)
            write_buffered(handle, index)
        digests.append(xxhash.xxh3_64_intdigest(index.data))
        return digests_record(digests)

    def _write_run(
        self, handle: int, grid: InnerGrid, run: Run, part: Part, read: ReadBox
    ) -> list[int]:
        """Read the box of some inner chunks, and write them; their digests."""
        box = grid.box(run.offset, run.shape)
        elements = read_part(part, box, read, self._memory)
        within = replace(grid, region=box, counts=run.shape)
        digests: list[int] = []
        for few in within.all(runs_at_a_time(grid)):
            buffer = self._memory.get("encoded", few.num_chunks * grid.stored_nbytes)
            digests += encode_run(within, few, part.array.dtype, elements, buffer)
            write_buffered(handle, buffer)
        return digests

    def is_there(self, unit: Unit, record: Record) -> bool:  # noqa: ARG002
        """See Target."""
        return has_size(self._file_store.path(unit.name), _grid_of(unit.parts[0]).file_nbytes)

    def finish(self, plan: ConvertPlan, records: Mapping[int, Record], contents: Contents) -> None:
        """See Target."""
        objects = self._write_objects(contents.objects)
        write_common(self._root, contents.common)
        self._flush.run([metadata_name(array.key) for array in plan.arrays])
        write_manifest(self._file_store, plan, records, objects, contents)

    def _write_objects(self, objects: Iterable[tuple[ObjectId, bytes]]) -> list[ObjectRecord]:
        """Small plain values are for the manifest, the others go to one file."""
        name = pack_name(0)
        found: list[ObjectRecord] = []
        byte_offset = 0
        with new_file(self._file_store.path(name), None, is_flushed=True) as handle:
            for object_id, content in objects:
                plain = plain_record(object_id, content)
                if plain is not None:
                    found.append(plain)
                    continue
                span = Span(name, byte_offset, len(content), digest_of(content))
                found.append(ObjectRecord(object_id, 0, span))
                write_buffered(handle, np.frombuffer(content, np.uint8))
                byte_offset += len(content)
        if not byte_offset:
            os.unlink(self._file_store.path(name))  # noqa: PTH108
            os.rmdir(os.path.dirname(self._file_store.path(name)))  # noqa: PTH106, PTH120
        return found


def begin_save(file_store: FileStore) -> None:
    """Write the first file of a save, by which the place is known to be one of format 2."""
    saving = {
        "schema": SCHEMA,
        "version": SCHEMA_VERSION,
        "token": uuid.uuid4().hex,
        "host": socket.gethostname(),
        "time": time.time(),
    }
    file_store.write(SAVE_NAME, json.dumps(saving).encode())


def plain_record(object_id: ObjectId, content: bytes) -> ObjectRecord | None:
    """What the manifest holds of a small plain object; None where it takes a file."""
    plain = plain_value(content) if len(content) <= _MAX_PLAIN_NBYTES else None
    return None if plain is None else ObjectRecord(object_id, 0, None, plain.value)


def digests_record(digests: list[int]) -> Record:
    """What ``write_manifest`` has to know of a chunk."""
    return {"digests": ChunkRecord.of(0, digests).digests.hex()}


def write_manifest(
    file_store: FileStore,
    plan: ConvertPlan,
    records: Mapping[int, Record],
    objects: list[ObjectRecord],
    contents: Contents,
) -> None:
    """Write the manifest of a conversion, its index last.

    Args:
        file_store: the target.
        plan: what was written.
        records: of every unit, as ``digests_record`` gave them.
        objects: all shards of objects.
        contents: what else there is.
    """
    chunks: dict[str, dict[Extent, ChunkRecord]] = defaultdict(dict)
    for number, record in records.items():
        part = plan.units[number].parts[0]
        index = part.array.chunk_at(part.region)
        assert index is not None  # noqa: S101 - the plan has a part for each chunk
        chunks[part.array.key][index] = ChunkRecord(0, bytes.fromhex(record["digests"]))
    arrays = [ArrayRecord(array, chunks.get(array.key, {})) for array in plan.arrays]
    manifest = build_manifest_plan(
        plan.arrays, (found.id.key for found in objects), num_ranks=_MAX_PARTS
    )
    entries = _write_parts(file_store, manifest, arrays, objects)
    common = FileDigest(len(contents.common), digest_of(contents.common))
    index_of = ManifestIndex(entries, common, contents.layout, contents.versions)
    file_store.write(INDEX_NAME, index_content(index_of))


def _write_parts(
    file_store: FileStore,
    manifest: ManifestPlan,
    arrays: list[ArrayRecord],
    objects: list[ObjectRecord],
) -> tuple[PartEntry, ...]:
    described: dict[int, tuple[list[Any], list[Any]]] = defaultdict(lambda: ([], []))
    for record in arrays:
        described[manifest.part_of(record.array.key)][0].append(array_fields(record))
    for found in objects:
        described[manifest.part_of(found.id.key)][1].append(object_fields(found))
    entries = []
    for number, first in enumerate(manifest.firsts):
        content = part_content(*described[number])
        file_store.write(part_name(number), content)
        counts = map(len, described[number])
        entry = PartEntry(part_name(number), first, len(content), digest_of(content), *counts)
        entries.append(entry)
    return tuple(entries)


def _grid_of(part: Part) -> InnerGrid:
    index = part.array.chunk_at(part.region)
    assert index is not None  # noqa: S101 - the plan has a part for each chunk
    return InnerGrid.of(part.array, index)


def write_common(root: Path, content: bytes) -> None:
    """Write the file of the common state, whole and durable."""
    path = root / COMMON_NAME
    with file_errors(None, path):
        write_file(path, content)
