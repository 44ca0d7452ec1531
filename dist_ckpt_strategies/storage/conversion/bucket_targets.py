"""Conversions to ("zarr", 2) in an object store: a chunk is put whole."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

from dist_ckpt_strategies.plan.chunking import MAX_OBJECT_NBYTES
from dist_ckpt_strategies.plan.convert import ConvertPlan
from dist_ckpt_strategies.spec.array import ArraySpec
from dist_ckpt_strategies.spec.conversion import Unit
from dist_ckpt_strategies.spec.manifest import ObjectRecord, Span
from dist_ckpt_strategies.spec.marker import CheckpointMarker
from dist_ckpt_strategies.spec.object import ObjectId
from dist_ckpt_strategies.storage.buckets.arrays import encoded_chunk
from dist_ckpt_strategies.storage.buckets.bucket import MAX_REQUESTS, Bucket
from dist_ckpt_strategies.storage.conversion.journal import (
    JOURNAL_NAME,
    Record,
    journal_line,
    journal_lines,
    of_another_conversion,
)
from dist_ckpt_strategies.storage.conversion.targets import Contents, Memory, ReadBox, read_part
from dist_ckpt_strategies.storage.conversion.zarr_targets import (
    begin_save,
    digests_record,
    plain_record,
    write_manifest,
)
from dist_ckpt_strategies.storage.disk.files import COMMON_NAME
from dist_ckpt_strategies.storage.format2.chunk_files import ChunkFile
from dist_ckpt_strategies.storage.format2.layout import ARRAYS_NAME, metadata_content, metadata_name
from dist_ckpt_strategies.storage.format2.manifest import digest_of, pack_name


class BucketConversion:
    """Writes ("zarr", 2) to an object store; see Target.

    Takes memory for each thread for a chunk, three times: the plan bounds chunks.

    Args:
        bucket: the place.
    """

    marker = CheckpointMarker("zarr", 2)

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._memory = Memory()
        self._there: frozenset[str] = frozenset()

    def begin(self, plan: ConvertPlan) -> None:
        """See Target."""
        self._there = frozenset(self._bucket.names(ARRAYS_NAME))
        begin_save(self._bucket)
        with ThreadPoolExecutor(MAX_REQUESTS, "dist-ckpt-describe") as pool:
            for _ in pool.map(self._describe, plan.arrays):
                pass

    def _describe(self, array: ArraySpec) -> None:
        self._bucket.write(metadata_name(array.key), metadata_content(array))

    def write(self, unit: Unit, read: ReadBox) -> Record:
        """See Target."""
        (part,) = unit.parts
        index = part.array.chunk_at(part.region)
        assert index is not None  # noqa: S101 - the plan has a part for each chunk
        file = ChunkFile.of(part.array, index, self._bucket.path(unit.name))
        elements = read_part(part, file.grid.region, read, self._memory)
        content, digests = encoded_chunk(file, elements)
        self._bucket.write(unit.name, content)
        return digests_record(digests)

    def is_there(self, unit: Unit, record: Record) -> bool:  # noqa: ARG002
        """See Target. By its name: an object is put whole or not at all."""
        return unit.name in self._there

    def finish(self, plan: ConvertPlan, records: Mapping[int, Record], contents: Contents) -> None:
        """See Target."""
        objects = self._put_objects(contents.objects)
        self._bucket.write(COMMON_NAME, contents.common)
        write_manifest(self._bucket, plan, records, objects, contents)

    def _put_objects(self, objects: Iterable[tuple[ObjectId, bytes]]) -> list[ObjectRecord]:
        """Small plain values are for the manifest; the others go together, 64 MiB at a time."""
        found: list[ObjectRecord] = []
        pack, number = bytearray(), 0
        for object_id, content in objects:
            plain = plain_record(object_id, content)
            if plain is not None:
                found.append(plain)
                continue
            if pack and len(pack) + len(content) > MAX_OBJECT_NBYTES:
                self._bucket.write(pack_name(number), bytes(pack))
                pack, number = bytearray(), number + 1
            span = Span(pack_name(number), len(pack), len(content), digest_of(content))
            found.append(ObjectRecord(object_id, 0, span))
            pack += content
        if pack:
            self._bucket.write(pack_name(number), bytes(pack))
        return found


class BucketJournal:
    """The journal of a conversion into an object store; see Notes.

    An object for the purpose, and one for each time that something is noted: nothing is appended.

    Args:
        bucket: the place.
        purpose: what tells this conversion from any other.

    Raises:
        CheckpointExistsError: the journal there is of another conversion.
        StorageError: it cannot be read or written.
    """

    def __init__(self, bucket: Bucket, purpose: str) -> None:
        self._bucket = bucket
        self._purpose = purpose
        self._names = sorted(bucket.names(JOURNAL_NAME))
        self.done: dict[int, Record] = {}
        for name in self._names:
            self.done |= self._read(name)
        if not self._names:
            self.add({})

    def add(self, records: Mapping[int, Record]) -> None:
        """See Notes."""
        last = int(self._names[-1].rpartition("/")[2]) if self._names else -1
        name = f"{JOURNAL_NAME}/{last + 1:08d}"
        lines = [self._purpose, *records.items()]
        self._bucket.write(name, b"".join(map(journal_line, lines)))
        self._names.append(name)

    def remove(self) -> None:
        """See Notes."""
        self._bucket.delete(self._names)

    def _read(self, name: str) -> dict[int, Record]:
        lines = [value for _, value in journal_lines(self._bucket.read(name))]
        if not lines or lines[0] != self._purpose:
            raise of_another_conversion(self._bucket)
        return {int(number): record for number, record in lines[1:]}
