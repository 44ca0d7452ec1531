"""The manifest of a format 2 checkpoint: what it says of each file. CheckpointWriter writes it."""

import difflib
import json
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import xxhash

from dist_ckpt_strategies.core.array import ARRAYS_NAME, ArraySpec, DType, ObjectId, Shape
from dist_ckpt_strategies.core.inner_grid import InnerGrid
from dist_ckpt_strategies.errors import (
    ArrayNotFoundError,
    CorruptCheckpointError,
    IncompatibleVersionError,
)
from dist_ckpt_strategies.storage.store import Store

MANIFEST_NAME = "manifest"
INDEX_NAME = f"{MANIFEST_NAME}/index.json"
SAVE_NAME = f"{MANIFEST_NAME}/save.json"
"""The first file of a save: by it the directory is known to be one of format 2."""

OBJECTS_NAME = "objects"

FOLDER_NAMES = (ARRAYS_NAME, OBJECTS_NAME, MANIFEST_NAME)
"""The folders of a save, which hold all its files but two; the one that it is known by last."""

SCHEMA = "dist_ckpt_strategies.manifest"
_VERSION = 1
HEADER = {"schema": SCHEMA, "version": _VERSION}

DIGEST_NBYTES = 8

INDEX_LEAD = b'{"digest":"'
"""How the index begins; the digest of all that follows comes next."""

_DIGEST_HEX = 32

Fields = dict[str, Any]

digest_of = xxhash.xxh3_128_hexdigest
"""The digest by which files are listed that are read whole."""


class ChunkRecord(NamedTuple):
    """The file of one chunk.

    Attributes:
        writer: global rank that wrote it.
        digests: XXH3 of each inner chunk in the order of the file, then of its index;
            ``DIGEST_NBYTES`` each.
    """

    writer: int
    digests: bytes


class ArrayRecord(NamedTuple):
    """An array, and the file of each chunk by its index in the chunk grid."""

    array: ArraySpec
    chunks: Mapping[Shape, ChunkRecord]


class Span(NamedTuple):
    """Bytes of a file of objects, and their digest: XXH3, 128 bits, in hexadecimal."""

    name: str
    byte_offset: int
    nbytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class ObjectRecord:
    """One shard of an object.

    Attributes:
        writer: global rank that wrote it.
        span: where its pickled form lies; None for a plain value.
        value: the object itself, where JSON holds it exactly and ``span`` is None.
    """

    id: ObjectId
    writer: int
    span: Span | None
    value: Any = None


class SegmentEntry(NamedTuple):
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


class FileDigest(NamedTuple):
    """Size and digest of a file that is read whole."""

    nbytes: int
    digest: str

    def __str__(self) -> str:
        """For messages."""
        return f"{self.nbytes} bytes with digest {self.digest}"


def array_record(fields: Fields) -> ArrayRecord:
    """The array that these fields of a segment describe.

    Raises:
        ValueError, LookupError, TypeError: these are not fields of an array, or a file or digest is
            missing.
    """
    key = str(fields["key"])
    dtype, has_crc32c = DType.named(fields["dtype"], key=key), bool(fields["crc32c"])
    names = ("shape", "chunk_shape", "inner_shape")
    shape, chunk_shape, inner_shape = (_numbers(fields[name]) for name in names)
    chunks = {
        _numbers(chunk["index"]): ChunkRecord(int(chunk["writer"]), bytes.fromhex(chunk["digests"]))
        for chunk in fields["chunks"]
    }
    try:
        num_digests = _num_digests(shape, chunk_shape, inner_shape, len(chunks))
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from error
    for index, expected in num_digests.items():
        found, rest = divmod(len(chunks[index].digests), DIGEST_NBYTES)
        if found != expected or rest:
            raise ValueError(f"{key}: chunk {index} has {found} digests, expected {expected}")
    array = ArraySpec(
        key, shape, dtype, chunk_shape, inner_shape=inner_shape, has_crc32c=has_crc32c
    )
    return ArrayRecord(array, chunks)


@lru_cache(maxsize=256)
def _num_digests(
    shape: Shape, chunk_shape: Shape, inner_shape: Shape, num_chunks: int
) -> Mapping[Shape, int]:
    """How many digests each chunk has, by index. The arrays of all layers have few shapes."""
    if not len(shape) == len(chunk_shape) == len(inner_shape):
        raise ValueError("dims of shape, chunk_shape and inner_shape differ")
    if any(i < 1 or c < i or c % i for c, i in zip(chunk_shape, inner_shape, strict=True)):
        raise ValueError(f"inner_shape {inner_shape} does not divide {chunk_shape}")
    array = ArraySpec("", shape, DType.UINT8, chunk_shape, inner_shape=inner_shape)
    if num_chunks != array.num_chunks:
        raise ValueError(f"{num_chunks} of {array.num_chunks} chunks")
    return {n: InnerGrid.of(array, n).num_chunks + 1 for n in array.chunk_indices()}


def _object_record(fields: Fields) -> ObjectRecord:
    found = ObjectId(str(fields["key"]), _numbers(fields["offset"]), _numbers(fields["shape"]))
    writer = int(fields["writer"])
    if "span" not in fields:
        return ObjectRecord(found, writer, None, fields["value"])
    name, byte_offset, nbytes, digest = fields["span"]
    if not name.startswith(f"{OBJECTS_NAME}/") or ".." in name:
        raise ValueError(f"{name!r}, expected a file in {OBJECTS_NAME}")
    byte_offset, nbytes = _numbers([byte_offset, nbytes])
    return ObjectRecord(found, writer, Span(name, byte_offset, nbytes, str(digest)))


def _numbers(found: Any) -> Shape:
    if not isinstance(found, list) or [n for n in found if type(n) is not int or n < 0]:
        raise ValueError(f"{found!r}, expected a list of whole numbers")
    return tuple(found)


@contextmanager
def _parsing(path: str) -> Iterator[None]:
    """Turn what parsing a file raises into an error that names it."""
    try:
        yield
    except IncompatibleVersionError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        # PlanError, of a dtype that there is not, is a ValueError too.
        text = f"{path} is damaged: it is no file of a manifest: {error!r}"
        raise CorruptCheckpointError(text, path=path) from error


class _Segment(NamedTuple):
    """What a segment lists; the fields of its arrays are made into records one at a time."""

    path: str
    arrays: dict[str, Fields]
    objects: dict[str, ObjectRecord]


class Manifest:
    """The manifest of a checkpoint; segments are read and parsed as far as they are asked for.

    Args:
        store: the checkpoint.

    Attributes:
        segments: its files, by their first keys.
        common: the common state's file; None where there was none at the time of the save.
        layout: parallel sizes of the job that saved, by name, and its number of ranks.
        versions: of the packages that took part, by name.
        digest: of the index, which lists all these.

    Raises:
        IncompleteCheckpointError: it has none.
        CorruptCheckpointError: its index is damaged.
        IncompatibleVersionError: a later version of this package wrote it.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._segments: dict[str, _Segment] = {}
        self._records: dict[str, ArrayRecord] = {}
        content, path = store.read(INDEX_NAME), store.path(INDEX_NAME)
        self.digest = digest_of(content)
        start = len(INDEX_LEAD)
        digest, rest = content[start : start + _DIGEST_HEX], content[start + _DIGEST_HEX :]
        if not content.startswith(INDEX_LEAD) or digest != digest_of(rest).encode():
            raise CorruptCheckpointError(
                f"{path} is damaged: its {len(content)} bytes do not begin with the digest of what "
                f"follows, {digest_of(rest)}",
                path=path,
            )
        with _parsing(path):
            fields = json.loads(content)
            if (fields["schema"], fields["version"]) != (SCHEMA, _VERSION):
                raise IncompatibleVersionError(
                    f"{path}: schema {fields['schema']} {fields['version']}, this version of the "
                    f"package reads {SCHEMA} {_VERSION}; install a later one"
                )
            self.segments = tuple(SegmentEntry(**listed) for listed in fields["parts"])
            for segment in self.segments:
                if not segment.name.startswith(f"{MANIFEST_NAME}/") or ".." in segment.name:
                    raise ValueError(f"{segment.name!r}, expected a file in {MANIFEST_NAME}")
            firsts = [segment.first for segment in self.segments]
            if not firsts or firsts != sorted(set(firsts)):
                raise ValueError("the first keys of its segments do not ascend")
            common = fields["common"]
            self.common = None if common is None else FileDigest(*common)
            self.layout: Mapping[str, int] = fields["layout"]
            self.versions: Mapping[str, str] = fields["versions"]

    def find(self, key: str) -> ArrayRecord:
        """The array of that key.

        Raises:
            ArrayNotFoundError: there is none; names similar ones.
            CorruptCheckpointError: the segment that lists it is damaged.
        """
        if key not in self._records:
            segment = self._segment(key)
            if key not in segment.arrays:
                raise self._not_found(key, list(self.keys()), "array")
            with _parsing(segment.path):
                self._records[key] = array_record(segment.arrays[key])
        return self._records[key]

    def find_object(self, object_id: ObjectId) -> ObjectRecord:
        """One shard of an object; errors as in ``find``."""
        segment, name = self._segment(object_id.key), object_id.unique_key
        if name not in segment.objects:
            raise self._not_found(name, [r.id.unique_key for r in self.objects()], "object")
        return segment.objects[name]

    def keys(self) -> Iterator[str]:
        """The keys of all arrays, sorted."""
        for entry in self.segments:
            yield from self._segment(entry.first).arrays

    def arrays(self) -> Iterator[ArrayRecord]:
        """All arrays, sorted by key."""
        return map(self.find, self.keys())

    def objects(self) -> Iterator[ObjectRecord]:
        """All shards of objects, sorted."""
        for entry in self.segments:
            yield from self._segment(entry.first).objects.values()

    def contents_of(self, entry: SegmentEntry) -> tuple[list[ArrayRecord], list[ObjectRecord]]:
        """The arrays and objects that one segment lists.

        Raises IncompleteCheckpointError if it is missing, CorruptCheckpointError if it is damaged.
        """
        segment = self._segment(entry.first)
        return list(map(self.find, segment.arrays)), list(segment.objects.values())

    def _segment(self, key: str) -> _Segment:
        """The segment that lists a key, if one does."""
        number = bisect_right(self.segments, key, key=lambda entry: entry.first) - 1
        entry = self.segments[max(number, 0)]
        if entry.name in self._segments:
            return self._segments[entry.name]
        content, path = self._store.read(entry.name), self._store.path(entry.name)
        found = digest_of(content)
        if found != entry.digest:
            text = f"{path} is damaged: it has digest {found}, expected {entry.digest}"
            raise CorruptCheckpointError(text, path=path)
        with _parsing(path):
            fields = json.loads(content)
            arrays = {str(listed["key"]): listed for listed in fields["arrays"]}
            records = map(_object_record, fields["objects"])
            objects = {record.id.unique_key: record for record in records}
            if (len(arrays), len(objects)) != (len(fields["arrays"]), len(fields["objects"])):
                raise ValueError("an array or object is listed twice")
        self._segments[entry.name] = _Segment(path, arrays, objects)
        return self._segments[entry.name]

    def _not_found(self, name: str, known: Sequence[str], what: str) -> ArrayNotFoundError:
        count = f"{name}: no such {what} among the {len(known)} in {self._store}"
        return ArrayNotFoundError(
            count + similar_text(name, known), key=name, path=self._store.path(INDEX_NAME)
        )


def similar_text(name: str, known: Sequence[str]) -> str:
    """What follows an error about a name that is not there: similar ones, if there are."""
    near = difflib.get_close_matches(name, known, n=3)
    return f"; similar ones: {', '.join(near)}" if near else ""
