"""The index of a checkpoint: which save it is, and what is stored where.

``index``, some 200 bytes, names the full index of one save; replacing it is the commit. The full
index, ``saves/ID/index``, begins with segments: blocks of arrays as columns, shards of objects, and
records of packs; its root, at the end, lists them. A rank reads the root and the segments it needs.
"""

from __future__ import annotations

import json
import re
import struct
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from functools import partial
from itertools import chain
from operator import itemgetter
from typing import Any, Self, TypeVar

import numpy as np
import xxhash

from dist_ckpt_strategies.core.array import ObjectId
from dist_ckpt_strategies.core.blocks import BlockTable, Column, merged
from dist_ckpt_strategies.errors import (
    ArrayNotFoundError,
    CorruptCheckpointError,
    IncompatibleVersionError,
)
from dist_ckpt_strategies.formats.index_parts import (
    RECORDS,
    checked_objects,
    checked_root,
    checked_table,
    inflated,
    require,
)
from dist_ckpt_strategies.formats.pack import StoredBytes, StoredObject, table_nbytes
from dist_ckpt_strategies.formats.pack_header import MALFORMED
from dist_ckpt_strategies.formats.pack_write import PackRecord

T = TypeVar("T")

INDEX_NAME = "index"
SAVES = "saves"
VERSION = 1

_FORMAT = "safetensors packs"
_SAVE_ID = re.compile(r"[0-9A-Za-z_-]{1,64}")

_ROWS = 1024
"""Blocks of a segment; docs/decisions.md has the measurement."""

_OBJECTS = 1024
_LEVEL = 1
_LENGTH = struct.Struct("<Q")
_MAX_NBYTES = 1 << 60

_PACK_RECORD = np.dtype(
    [
        ("name", "V8"),
        ("digest", "V16"),
        ("nbytes", "<u8"),
        ("data_start", "<u4"),
        ("num_ranges", "<u4"),
        ("rank", "<u4"),
    ]
)

_GAP_NBYTES = 64 << 10
"""Read in vain rather than asked for apart."""


def full_index_of(save_id: str) -> str:
    """The file of a full index, below the checkpoint's directory."""
    return f"{SAVES}/{save_id}/{INDEX_NAME}"


@dataclass(frozen=True, slots=True)
class Pointer:
    """The content of ``index``: a save, and place and XXH3-128 of the root of its full index."""

    save_id: str
    byte_offset: int
    nbytes: int
    digest: str

    def to_bytes(self) -> bytes:
        """The content of the file."""
        return json.dumps({"format": _FORMAT, "version": VERSION, **asdict(self)}).encode()

    @classmethod
    def of(cls, save_id: str, full_index: bytes, path: str) -> Pointer:
        """The pointer to a full index, whose last 8 bytes are the size of the root before them."""
        (nbytes,) = _LENGTH.unpack(full_index[-_LENGTH.size :].rjust(_LENGTH.size, b"\xff"))
        start = len(full_index) - _LENGTH.size - nbytes
        if start < 0:
            raise CorruptCheckpointError(f"{path} is damaged: it has no root", path=path)
        root = full_index[start : -_LENGTH.size]
        return cls(save_id, start, nbytes, xxhash.xxh3_128_hexdigest(root))

    @classmethod
    def from_bytes(cls, content: bytes, path: str) -> Pointer:
        """The pointer that the file holds.

        Raises:
            CorruptCheckpointError: it is not whole.
            IncompatibleVersionError: a later version of this package wrote it.
        """
        try:
            fields = json.loads(content)
            version, name = int(fields.pop("version")), fields.pop("format")
            if version != VERSION:
                raise IncompatibleVersionError(
                    f"{path}: version {version} of {name}; this release reads {VERSION}; install a "
                    "newer one",
                    path=path,
                )
            save_id, digest = str(fields["save_id"]), str(fields["digest"])
            require(name == _FORMAT, "format", name)
            require(_SAVE_ID.fullmatch(save_id) is not None, "save_id", save_id)  # part of a path
            byte_offset, nbytes = int(fields["byte_offset"]), int(fields["nbytes"])
            require(0 <= byte_offset < _MAX_NBYTES, "byte_offset", byte_offset)
            require(0 < nbytes < _MAX_NBYTES, "nbytes", nbytes)
            return cls(save_id, byte_offset, nbytes, digest)
        except MALFORMED as error:
            raise CorruptCheckpointError(
                f"{path} is damaged ({error}); if the packs are whole, dist-ckpt rebuild-index "
                "makes the index anew",
                path=path,
            ) from error


# Written by the first rank


def array_segments(table: BlockTable) -> list[tuple[bytes, list[Any]]]:
    """The segments of the blocks of arrays, each with what the root says of it.

    That is its first key, its number of blocks, and for one array alone the box around them.
    """
    ranks = np.argsort(np.argsort(np.array(table.keys, dtype=object)))
    columns = [table.origin[:, dim] for dim in reversed(range(table.origin.shape[1]))]
    order = np.lexsort([*columns, ranks[table.array]]) if len(table) else np.zeros(0, np.int64)
    segments = []
    for start in range(0, len(order), _ROWS):
        part = table.rows(order[start : start + _ROWS])
        box = None
        if len(part.keys) == 1:
            ends = part.origin + part.extent
            ndim = len(part.facts[0].shape)
            box = [part.origin.min(0)[:ndim].tolist(), ends.max(0)[:ndim].tolist()]
        segments.append((zlib.compress(part.to_bytes(), _LEVEL), [part.keys[0], len(part), box]))
    return segments


@dataclass(frozen=True, slots=True)
class PackSummary:
    """The packs of one rank; their blocks are in the table of its layout.

    Attributes:
        packs: in the order of its layout.
        objects: shards of objects, and where they are.
        common: where the common state is; None if this rank has not written it.
    """

    packs: tuple[PackRecord, ...]
    objects: tuple[StoredObject, ...] = ()
    common: StoredBytes | None = None

    def to_message(self) -> list[Any]:
        """The summary in JSON types."""
        packs, objects = map(astuple, self.packs), _rows_of(self.objects)
        return [list(packs), objects, self.common and astuple(self.common)]

    @classmethod
    def from_message(cls, message: list[Any]) -> Self:
        """The summary that ``to_message`` made a message of."""
        packs, rows, common = message
        objects = (
            (ObjectId(key, tuple(offset), tuple(shape)), StoredBytes(*where))
            for key, offset, shape, *where in rows
        )
        records = tuple(PackRecord(*record) for record in packs)
        return cls(records, tuple(objects), common and StoredBytes(*common))


def _rows_of(objects: Iterable[StoredObject]) -> list[list[Any]]:
    return [[*astuple(name), *astuple(where)] for name, where in objects]


@dataclass(frozen=True, slots=True)
class NewSave:
    """All that a commit needs of a save whose packs are written.

    Attributes:
        save_id: of the save.
        segments: what ``array_segments`` made of the blocks of all ranks.
        summaries: of all ranks, in the order of ``joined_tables``.
        facts: further fields of the index, of JSON types, such as the number of ranks.
        common: the new content of ``common.pt``; None where Megatron-Core has written it.
        marker: the new content of ``metadata.json``; None where Megatron-Core writes it.
    """

    save_id: str
    segments: Sequence[tuple[bytes, list[Any]]]
    summaries: Sequence[PackSummary]
    facts: Mapping[str, Any]
    common: bytes | None = None
    marker: bytes | None = None

    @property
    def packs(self) -> list[PackRecord]:
        """All packs, by their numbers in the index."""
        return list(chain.from_iterable(summary.packs for summary in self.summaries))


def joined_tables(
    tables: Sequence[BlockTable], num_packs: Sequence[int]
) -> tuple[BlockTable, Column, list[tuple[str, int, int]]]:
    """The blocks of all ranks, as ``merged`` returns them; packs are numbered through."""
    table, sources, differing = merged(tables)
    table.place[:, 0] += np.cumsum([0, *num_packs])[sources]
    return table, sources, differing


def build_full_index(save: NewSave) -> tuple[bytes, Pointer]:
    """The full index of a save, and what ``index`` says of it."""
    content = bytearray()

    def add(segment: bytes) -> list[Any]:
        content.extend(segment)
        return [len(content) - len(segment), len(segment), xxhash.xxh3_128_hexdigest(segment)]

    objects, common, first = [], None, 0
    for summary in save.summaries:
        objects += [(name, _moved(where, first)) for name, where in summary.objects]
        common = _moved(summary.common, first) if summary.common else common
        first += len(summary.packs)
    objects.sort(key=itemgetter(0))
    blocks = [[*said, *add(segment)] for segment, said in save.segments]
    listed = []
    for start in range(0, len(objects), _OBJECTS):
        part = objects[start : start + _OBJECTS]
        segment = zlib.compress(json.dumps(_rows_of(part)).encode(), _LEVEL)
        listed.append([part[0][0].key, len(part), *add(segment)])
    packs = save.packs
    records = np.array(
        [(bytes.fromhex(p.name), bytes.fromhex(p.digest), *astuple(p)[2:]) for p in packs],
        _PACK_RECORD,
    )
    root = {
        "save_id": save.save_id,
        "version": VERSION,
        **save.facts,
        "common": None if common is None else astuple(common),
        "arrays": blocks,
        "objects": listed,
        "num_packs": len(packs),
        "packs": [
            add(zlib.compress(records[start : start + RECORDS].tobytes(), _LEVEL))
            for start in range(0, len(packs), RECORDS)
        ],
    }
    described = json.dumps(root, separators=(",", ":")).encode()
    content += described + _LENGTH.pack(len(described))
    return bytes(content), Pointer.of(save.save_id, bytes(content), "")


def _moved(stored: StoredBytes, first_pack: int) -> StoredBytes:
    return replace(stored, pack=first_pack + stored.pack)


# Read by every rank


def _record_in(content: bytes, number: int) -> PackRecord:
    """One of the records of a segment of packs."""
    name, digest, *numbers = np.frombuffer(content, _PACK_RECORD)[number].tolist()
    record = PackRecord(name.hex(), digest.hex(), *numbers)
    least = record.data_start + table_nbytes(record.num_ranges)
    require(least <= record.nbytes < _MAX_NBYTES, f"size of pack {record.name}", record.nbytes)
    return record


class FullIndex:
    """The full index of a save; segments are read as they are asked for, and kept.

    One of up to 64 KiB is read whole. ``read`` gives bytes of the file, by the first and how many.

    Attributes:
        pointer: what ``index`` says.
        nbytes: of the file.
        facts: the root, a dict of JSON types.

    Raises:
        CorruptCheckpointError: a part is not what was written.
    """

    def __init__(self, pointer: Pointer, read: Callable[[int, int], bytes], path: str) -> None:
        self._read, self._path, self.pointer = read, path, pointer
        self.nbytes = pointer.byte_offset + pointer.nbytes + _LENGTH.size
        if self.nbytes <= _GAP_NBYTES:
            content = read(0, self.nbytes)
            self._read = lambda start, nbytes: content[start : start + nbytes]
        (root,) = self._parts([(pointer.byte_offset, pointer.nbytes, pointer.digest)])
        self.facts = self._understood(checked_root, root, pointer.byte_offset)
        self._held: dict[tuple[str, int], Any] = {}

    @property
    def common(self) -> StoredBytes | None:
        """The place of the common state; None if there is none."""
        where = self.facts["common"]
        return None if where is None else StoredBytes(*where)

    def find(self, keys: Iterable[str]) -> BlockTable:
        """The blocks of some arrays.

        Raises:
            ArrayNotFoundError: there is no such array.
        """
        wanted = sorted(set(keys))
        segments = self._segments("arrays", self._numbers("arrays", wanted), checked_table)
        table, _, differing = merged(_of_keys(segment, wanted) for segment in segments)
        order = np.lexsort([*table.origin.T[::-1], table.array])
        is_sorted = bool((order[1:] > order[:-1]).all()) and [*table.keys] == sorted(table.keys)
        self._understood(require, is_sorted and not differing, "blocks of", table.keys)
        for key in sorted(set(wanted).difference(table.keys)):
            raise ArrayNotFoundError(f"{key}: no such array in {self._path}", key=key)
        return table

    def tables(self) -> Iterator[BlockTable]:
        """The blocks of all arrays, segment by segment, by key and origin; none of them is kept."""
        end = _LENGTH.pack(self.pointer.nbytes)
        last = self.nbytes - len(end), len(end), xxhash.xxh3_128_hexdigest(end)
        list(self._parts([last]))
        for _, _, _, *part in self.facts["arrays"]:
            (content,) = self._parts([part])
            yield self._segment(content, checked_table)

    def objects(self, keys: Iterable[str] | None = None) -> list[StoredObject]:
        """Shards of objects of these keys, or all, sorted."""
        wanted = None if keys is None else set(keys)
        numbers = None if wanted is None else self._numbers("objects", wanted)
        segments = self._segments("objects", numbers, checked_objects)
        return [one for part in segments for one in part if wanted is None or one[0].key in wanted]

    def packs(self, numbers: Iterable[int] | None = None) -> dict[int, PackRecord]:
        """The records of these packs, or of all."""
        wanted = sorted(set(range(self.facts["num_packs"]) if numbers is None else numbers))
        parts = sorted({n // RECORDS for n in wanted})
        segments = self._segments("packs", parts, lambda content, _: content)
        held = dict(zip(parts, segments, strict=True))
        record = partial(self._understood, _record_in)
        return {n: record(held[n // RECORDS], n % RECORDS) for n in wanted}

    def _numbers(self, name: str, keys: Iterable[str]) -> set[int]:
        """The segments that may hold some of these keys, by the first key of each."""
        firsts = [segment[0] for segment in self.facts[name]]
        return {
            n
            for key in keys
            for n in range(max(0, bisect_left(firsts, key) - 1), bisect_right(firsts, key))
        }

    def _segments(
        self, name: str, numbers: Iterable[int] | None, parse: Callable[[bytes, int], T]
    ) -> list[T]:
        """Segments of arrays, objects or packs, by number, or all; each is read once."""
        listed, held = self.facts[name], self._held
        wanted = sorted(range(len(listed)) if numbers is None else numbers)
        missing = [n for n in wanted if (name, n) not in held]
        for n, content in zip(missing, self._parts([listed[n][-3:] for n in missing]), strict=True):
            held[name, n] = self._segment(content, parse)
        return [held[name, n] for n in wanted]

    def _segment(self, content: bytes, parse: Callable[[bytes, int], T]) -> T:
        return self._understood(parse, self._understood(inflated, content), self.facts["num_packs"])

    def _understood(self, parse: Callable[..., T], *parts: Any) -> T:
        """Parse a part; CorruptCheckpointError if it is malformed."""
        try:
            return parse(*parts)
        except (*MALFORMED, zlib.error) as error:
            raise CorruptCheckpointError(
                f"{self._path} is damaged ({type(error).__name__}: {error}); if the packs are "
                "whole, dist-ckpt rebuild-index makes the index anew",
                path=self._path,
            ) from error

    def _parts(self, parts: Sequence[Sequence[Any]]) -> Iterator[bytes]:
        """The bytes of parts, each by offset, size and digest; neighbours are read at once.

        Raises:
            CorruptCheckpointError: one has another digest.
        """
        runs: list[list[Sequence[Any]]] = []
        for part in parts:
            if runs and part[0] - sum(runs[-1][-1][:2]) <= _GAP_NBYTES:
                runs[-1].append(part)
            else:
                runs.append([part])
        for run in runs:
            start, end = run[0][0], sum(run[-1][:2])
            content = self._read(start, end - start)
            for byte_offset, nbytes, expected in run:
                part = content[byte_offset - start : byte_offset - start + nbytes]
                digest = xxhash.xxh3_128_hexdigest(part)
                if digest != expected:
                    raise CorruptCheckpointError(
                        f"{self._path} is damaged: {len(part)} bytes from byte {byte_offset} have "
                        f"digest {digest}, expected {expected}; if the packs are whole, "
                        "dist-ckpt rebuild-index makes the index anew",
                        path=self._path,
                    )
                yield part


def _of_keys(table: BlockTable, wanted: Sequence[str]) -> BlockTable:
    """The blocks of a segment that are of these keys, which are sorted as those of the segment."""
    stored_keys = table.keys
    start, stop = bisect_left(wanted, stored_keys[0]), bisect_right(wanted, stored_keys[-1])
    places = [(bisect_left(stored_keys, key), key) for key in wanted[start:stop]]
    is_wanted = np.zeros(len(stored_keys), bool)
    is_wanted[[at for at, key in places if stored_keys[at] == key]] = True
    return table.rows(np.flatnonzero(is_wanted[table.array]))
