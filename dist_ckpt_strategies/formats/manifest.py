"""The manifest of a format 2 checkpoint: what it says about each file, its writing and reading."""

from __future__ import annotations

import difflib
import importlib.metadata
import json
import socket
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import xxhash

from dist_ckpt_strategies.core.array import ArraySpec, DType, ObjectId
from dist_ckpt_strategies.core.inner_grid import num_inner_chunks
from dist_ckpt_strategies.core.region import Shape
from dist_ckpt_strategies.errors import (
    ArrayNotFoundError,
    CorruptCheckpointError,
    IncompatibleVersionError,
)
from dist_ckpt_strategies.storage.store import Store

DIGEST_NBYTES = 8


@dataclass(frozen=True, slots=True)
class ChunkRecord:
    """The file of one chunk.

    Attributes:
        writer: global rank that wrote it.
        digests: XXH3 of each inner chunk in the order of the file, then of its index; 8 bytes
            each, big-endian.
    """

    writer: int
    digests: bytes

    @classmethod
    def of(cls, writer: int, digests: list[int]) -> ChunkRecord:
        """The record with these digests."""
        return cls(writer, b"".join(d.to_bytes(DIGEST_NBYTES, "big") for d in digests))

    @property
    def num_digests(self) -> int:
        """How many there are, that of the index included."""
        return len(self.digests) // DIGEST_NBYTES

    def digest(self, number: int) -> int:
        """The digest of an inner chunk; the last one is that of the index."""
        at = DIGEST_NBYTES * number
        return int.from_bytes(self.digests[at : at + DIGEST_NBYTES], "big")


@dataclass(frozen=True, slots=True)
class ArrayRecord:
    """An array and its files.

    Attributes:
        array: what is stored.
        chunks: the file of each chunk, by its index in the chunk grid.
    """

    array: ArraySpec
    chunks: Mapping[Shape, ChunkRecord]


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes of a file that holds several objects.

    Attributes:
        name: of the file, below the checkpoint's directory.
        byte_offset: where they begin.
        nbytes: how many there are.
        digest: XXH3, 128 bits, in hexadecimal.
    """

    name: str
    byte_offset: int
    nbytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class ObjectRecord:
    """One shard of an object.

    Attributes:
        id: which.
        writer: global rank that wrote it.
        span: where its pickled form lies; None for a plain value.
        value: the object itself, where JSON holds it exactly and ``span`` is None.
    """

    id: ObjectId
    writer: int
    span: Span | None
    value: Any = None


@dataclass(frozen=True, slots=True)
class SegmentEntry:
    """One file of the manifest, a segment, as the index lists it; the field names are on disk.

    Attributes:
        name: of the file, below the checkpoint's directory.
        first: the first key in it; it ends before the first key of the next.
        nbytes: its size.
        digest: XXH3 of the file, 128 bits, in hexadecimal.
        num_arrays: arrays in it.
        num_objects: object shards in it.
    """

    name: str
    first: str
    nbytes: int
    digest: str
    num_arrays: int
    num_objects: int


@dataclass(frozen=True, slots=True)
class FileDigest:
    """A file that is read whole.

    Attributes:
        nbytes: its size.
        digest: XXH3, 128 bits, in hexadecimal.
    """

    nbytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class ManifestIndex:
    """The manifest's table of contents.

    Attributes:
        segments: its files, by their first keys.
        common: the common state's file; None where there was none at the time of the save.
        layout: parallel sizes of the job that saved, by name, and its number of ranks.
        versions: of the packages that took part, by name.
    """

    segments: tuple[SegmentEntry, ...]
    common: FileDigest | None
    layout: Mapping[str, int]
    versions: Mapping[str, str]


MANIFEST_NAME = "manifest"
INDEX_NAME = f"{MANIFEST_NAME}/index.json"
SAVE_NAME = f"{MANIFEST_NAME}/save.json"
"""The first file of a save: by it the directory is known to be one of format 2."""

OBJECTS_NAME = "objects"

SCHEMA = "dist_ckpt_strategies.manifest"
SCHEMA_VERSION = 1

_PACKAGES = ("dist-ckpt-strategies", "megatron-core", "torch", "numpy", "tensorstore", "zarr")

_DIGEST_LEAD = b'{"digest":"'
_DIGEST_HEX = 32

Fields = dict[str, Any]


def segment_name(number: int) -> str:
    """The name of a segment, below the checkpoint's directory."""
    return f"{MANIFEST_NAME}/part-{number:05d}.json"


def begun_content(save_id: str) -> bytes:
    """The bytes of the first file of a save, which says where and when it began."""
    begun = {
        "schema": SCHEMA,
        "version": SCHEMA_VERSION,
        "token": save_id,
        "host": socket.gethostname(),
        "time": time.time(),
    }
    return json.dumps(begun).encode()


def pack_name(writer: int) -> str:
    """The file of all objects that one rank wrote."""
    return f"{OBJECTS_NAME}/rank-{writer:05d}.bin"


def digest_of(content: bytes) -> str:
    """The digest by which files are listed that are read whole."""
    return xxhash.xxh3_128_hexdigest(content)


def array_fields(record: ArrayRecord) -> Fields:
    """An array and its files, of JSON types."""
    array = record.array
    assert array.inner_shape is not None  # noqa: S101 - format 2 has no others
    return {
        "key": array.key,
        "shape": list(array.shape),
        "dtype": array.dtype.value,
        "chunk_shape": list(array.chunk_shape),
        "inner_shape": list(array.inner_shape),
        "crc32c": array.has_crc32c,
        "chunks": [
            {"index": list(index), "writer": chunk.writer, "digests": chunk.digests.hex()}
            for index, chunk in sorted(record.chunks.items())
        ],
    }


def array_record(fields: Fields) -> ArrayRecord:
    """The array that ``array_fields`` described.

    Raises:
        ValueError, LookupError, TypeError: these are not fields of an array.
    """
    key = str(fields["key"])
    shape, chunk_shape, inner_shape = (
        _extent(fields[name]) for name in ("shape", "chunk_shape", "inner_shape")
    )
    if not len(shape) == len(chunk_shape) == len(inner_shape):
        raise ValueError(f"{key}: dims of shape, chunk_shape and inner_shape differ")
    if any(i < 1 or c < i or c % i for c, i in zip(chunk_shape, inner_shape, strict=True)):
        raise ValueError(f"{key}: inner_shape {inner_shape} does not divide {chunk_shape}")
    array = ArraySpec(
        key,
        shape,
        DType.named(fields["dtype"], key=key),
        chunk_shape,
        inner_shape=inner_shape,
        has_crc32c=bool(fields["crc32c"]),
    )
    chunks = {
        _extent(chunk["index"]): ChunkRecord(int(chunk["writer"]), bytes.fromhex(chunk["digests"]))
        for chunk in fields["chunks"]
    }
    return ArrayRecord(array, chunks)


def require_complete(record: ArrayRecord) -> None:
    """Raise unless an array has a file for every chunk and a digest for every inner chunk.

    Raises:
        ValueError: it has not.
    """
    array = record.array
    if len(record.chunks) != array.num_chunks:
        raise ValueError(f"{array.key}: {len(record.chunks)} of {array.num_chunks} chunks")
    for index in array.chunk_indices():
        expected = num_inner_chunks(array, index) + 1
        if record.chunks[index].num_digests != expected:
            raise ValueError(
                f"{array.key}: chunk {index} has {record.chunks[index].num_digests} digests, "
                f"expected {expected}"
            )


def object_fields(record: ObjectRecord) -> Fields:
    """One shard of an object, of JSON types."""
    fields: Fields = {
        "key": record.id.key,
        "offset": list(record.id.offset),
        "shape": list(record.id.shape),
        "writer": record.writer,
    }
    if record.span is None:
        return fields | {"value": record.value}
    span = record.span
    return fields | {"span": [span.name, span.byte_offset, span.nbytes, span.digest]}


def object_record(fields: Fields) -> ObjectRecord:
    """The shard that ``object_fields`` described; errors as in ``array_record``."""
    found = ObjectId(str(fields["key"]), _extent(fields["offset"]), _extent(fields["shape"]))
    writer = int(fields["writer"])
    if "span" not in fields:
        return ObjectRecord(found, writer, None, fields["value"])
    name, byte_offset, nbytes, digest = fields["span"]
    _require_below(name, OBJECTS_NAME)
    (byte_offset, nbytes) = _extent([byte_offset, nbytes])
    return ObjectRecord(found, writer, Span(name, byte_offset, nbytes, str(digest)))


def segment_content(arrays: Iterable[Fields], objects: Iterable[Fields]) -> bytes:
    """The bytes of a segment."""
    segment = {"arrays": list(arrays), "objects": list(objects)}
    return json.dumps(segment, separators=(",", ":"), allow_nan=False).encode()


def merged_segment(contents: Iterable[bytes]) -> tuple[list[Fields], list[Fields]]:
    """The arrays and objects of one segment, out of what several ranks know of it.

    Raises:
        ValueError: ranks describe an array differently, or a chunk of it is missing.
    """
    arrays: dict[str, Fields] = {}
    objects: list[Fields] = []
    for content in contents:
        segment = json.loads(content)
        objects += segment["objects"]
        for fields in segment["arrays"]:
            known = arrays.setdefault(fields["key"], fields)
            if known is not fields:
                _require_same(known, fields)
                known["chunks"] += fields["chunks"]
    for fields in arrays.values():
        require_complete(array_record(fields))
    objects.sort(key=lambda fields: (fields["key"], fields["offset"]))
    return [arrays[key] for key in sorted(arrays)], objects


def _require_same(one: Fields, other: Fields) -> None:
    for name in one:
        if name != "chunks" and one[name] != other[name]:
            raise ValueError(
                f"{one['key']}: {name} {one[name]} on one rank, {other[name]} on another"
            )


def write_segment(
    store: Store, number: int, first: str, arrays: list[Fields], objects: list[Fields]
) -> SegmentEntry:
    """Write a segment, durably; its entry in the index.

    Args:
        store: the checkpoint.
        number: of the segment.
        first: the first key that it may list.
        arrays: as ``array_fields`` describes them.
        objects: as ``object_fields`` describes them.
    """
    content, name = segment_content(arrays, objects), segment_name(number)
    store.write(name, content)
    return SegmentEntry(name, first, len(content), digest_of(content), len(arrays), len(objects))


def package_versions() -> dict[str, str]:
    """Versions of the packages that take part in a save, by name."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # a package run from its sources
    return found


def index_content(index: ManifestIndex) -> bytes:
    """The bytes of the index: JSON whose first field is the digest of all that follows."""
    body = {
        "schema": SCHEMA,
        "version": SCHEMA_VERSION,
        "layout": dict(index.layout),
        "versions": dict(index.versions),
        "common": None if index.common is None else [index.common.nbytes, index.common.digest],
        "parts": [asdict(segment) for segment in index.segments],
    }
    rest = b'",' + json.dumps(body, indent=1).encode()[1:]
    return _DIGEST_LEAD + digest_of(rest).encode() + rest


def parse_index(content: bytes, path: str) -> ManifestIndex:
    """The index that the bytes hold.

    Raises:
        CorruptCheckpointError: they are damaged.
        IncompatibleVersionError: a later version of this package wrote them.
    """
    start = len(_DIGEST_LEAD)
    digest, rest = content[start : start + _DIGEST_HEX], content[start + _DIGEST_HEX :]
    if not content.startswith(_DIGEST_LEAD) or len(digest) < _DIGEST_HEX:
        raise CorruptCheckpointError(
            f"{path} is damaged: its {len(content)} bytes do not begin with a digest of "
            f"{_DIGEST_HEX} digits, expected those that a save writes",
            path=path,
        )
    if digest != digest_of(rest).encode():
        raise CorruptCheckpointError(
            f"{path} is damaged: its content has digest {digest_of(rest)}, "
            f"expected {digest.decode(errors='replace')}",
            path=path,
        )
    try:
        fields = json.loads(content)
        if (fields["schema"], fields["version"]) != (SCHEMA, SCHEMA_VERSION):
            raise IncompatibleVersionError(
                f"{path}: schema {fields['schema']} {fields['version']}, this version of the "
                f"package reads {SCHEMA} {SCHEMA_VERSION}; install a later one"
            )
        common = fields["common"]
        return ManifestIndex(
            _segment_entries(fields["parts"]),
            None if common is None else FileDigest(int(common[0]), str(common[1])),
            fields["layout"],
            fields["versions"],
        )
    except (ValueError, LookupError, TypeError) as error:
        raise CorruptCheckpointError(f"{path} is no manifest: {error!r}", path=path) from error


def _segment_entries(listed: Any) -> tuple[SegmentEntry, ...]:
    if not isinstance(listed, list):
        raise TypeError(f"{listed!r}, expected a list of segments")
    entries = tuple(SegmentEntry(**fields) for fields in listed)
    for entry in entries:
        _require_below(entry.name, MANIFEST_NAME)
    firsts = [entry.first for entry in entries]
    if firsts != sorted(set(firsts)):
        raise ValueError("the first keys of its segments do not ascend")
    return entries


def _require_below(name: Any, directory: str) -> None:
    """Raise unless it is the name of a file in a directory of the checkpoint."""
    if not (isinstance(name, str) and name.startswith(f"{directory}/")) or ".." in name:
        raise ValueError(f"{name!r}, expected a file in {directory}")


def _extent(numbers: Any) -> Shape:
    if not isinstance(numbers, list) or any(type(n) is not int or n < 0 for n in numbers):
        raise ValueError(f"{numbers!r}, expected a list of whole numbers")
    return tuple(numbers)


class Manifest:
    """The manifest of a checkpoint; segments are read and parsed as far as they are asked for.

    Args:
        store: the checkpoint.

    Attributes:
        index: its table of contents.
        digest: of the file of that.

    Raises:
        IncompleteCheckpointError: it has none.
        CorruptCheckpointError: its index is damaged.
        IncompatibleVersionError: a later version of this package wrote it.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        content = store.read(INDEX_NAME)
        self.index = parse_index(content, store.path(INDEX_NAME))
        self.digest = digest_of(content)
        self._firsts = [segment.first for segment in self.index.segments]
        self._contents: dict[str, _Contents] = {}
        self._records: dict[str, ArrayRecord] = {}

    def find(self, key: str) -> ArrayRecord:
        """The array of that key.

        Raises:
            ArrayNotFoundError: there is none; names similar ones.
            CorruptCheckpointError: the segment that lists it is damaged.
        """
        found = self._records.get(key)
        if found is None:
            contents = self._contents_for(key)
            if contents is None or key not in contents.arrays:
                raise self._not_found(key, list(self.keys()), "array")
            found = self._records[key] = contents.array(key)
        return found

    def find_object(self, object_id: ObjectId) -> ObjectRecord:
        """One shard of an object; errors as in ``find``."""
        contents, name = self._contents_for(object_id.key), object_id.unique_key
        if contents is None or name not in contents.objects:
            raise self._not_found(name, [r.id.unique_key for r in self.objects()], "object")
        return contents.object(name)

    def keys(self) -> Iterator[str]:
        """The keys of all arrays, sorted."""
        for segment in self.index.segments:
            yield from self._contents_of(segment).arrays

    def arrays(self) -> Iterator[ArrayRecord]:
        """All arrays, sorted by key."""
        return map(self.find, self.keys())

    def objects(self) -> Iterator[ObjectRecord]:
        """All shards of objects, sorted."""
        for segment in self.index.segments:
            contents = self._contents_of(segment)
            yield from map(contents.object, contents.objects)

    def contents_of(self, segment: SegmentEntry) -> tuple[list[ArrayRecord], list[ObjectRecord]]:
        """The arrays and objects that one segment lists.

        Raises:
            IncompleteCheckpointError: it is missing.
            CorruptCheckpointError: it is damaged.
        """
        found = self._contents_of(segment)
        return list(map(found.array, found.arrays)), list(map(found.object, found.objects))

    def _contents_for(self, key: str) -> _Contents | None:
        number = bisect_right(self._firsts, key) - 1
        return self._contents_of(self.index.segments[number]) if number >= 0 else None

    def _contents_of(self, segment: SegmentEntry) -> _Contents:
        if segment.name not in self._contents:
            content, path = self._store.read(segment.name), self._store.path(segment.name)
            found = digest_of(content)
            if found != segment.digest:
                raise CorruptCheckpointError(
                    f"{path} is damaged: it has digest {found}, expected {segment.digest}",
                    path=path,
                )
            self._contents[segment.name] = _Contents(content, path)
        return self._contents[segment.name]

    def _not_found(self, name: str, known: Sequence[str], what: str) -> ArrayNotFoundError:
        near = difflib.get_close_matches(name, known, n=3)
        hint = f"; similar ones: {', '.join(near)}" if near else ""
        return ArrayNotFoundError(
            f"{name}: no such {what} among the {len(known)} in {self._store}{hint}",
            key=name,
            path=self._store.path(INDEX_NAME),
        )


class _Contents:
    """A segment of the manifest, made into records one at a time."""

    def __init__(self, content: bytes, path: str) -> None:
        self._damage = partial(_damage, path)
        with self._damage():
            fields = json.loads(content)
            self.arrays = _by_name(fields["arrays"], _key)
            self.objects = _by_name(fields["objects"], _unique_key)

    def array(self, key: str) -> ArrayRecord:
        """The array of a key that the segment has."""
        with self._damage():
            record = array_record(self.arrays[key])
            require_complete(record)
            return record

    def object(self, unique_key: str) -> ObjectRecord:
        """An object shard that the segment has."""
        with self._damage():
            return object_record(self.objects[unique_key])


@contextmanager
def _damage(path: str) -> Iterator[None]:
    """Turn what parsing raises into an error that names the file."""
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        # PlanError, of a dtype that there is not, is a ValueError too.
        raise CorruptCheckpointError(
            f"{path} is no segment of a manifest: {error!r}", path=path
        ) from error


def _by_name(listed: list[Fields], name_of: Callable[[Fields], str]) -> dict[str, Fields]:
    found = {name_of(fields): fields for fields in listed}
    if len(found) < len(listed):
        counts = Counter(map(name_of, listed))
        raise ValueError(f"{counts.most_common(1)[0][0]}: listed twice")
    return found


def _key(fields: Fields) -> str:
    key = fields["key"]
    if not isinstance(key, str):
        raise TypeError(f"{key!r}, expected a text")
    return key


def _unique_key(fields: Fields) -> str:
    return ObjectId(_key(fields), tuple(fields["offset"]), tuple(fields["shape"])).unique_key
