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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass
from typing import Any

import numpy as np
import xxhash

from dist_ckpt_strategies.core.array import ObjectId
from dist_ckpt_strategies.core.blocks import BlockTable, merged
from dist_ckpt_strategies.errors import (
    ArrayNotFoundError,
    CorruptCheckpointError,
    IncompatibleVersionError,
)
from dist_ckpt_strategies.formats.pack import StoredBytes
from dist_ckpt_strategies.formats.pack_header import MALFORMED
from dist_ckpt_strategies.formats.pack_write import PackRecord

INDEX_NAME = "index"
SAVES = "saves"
VERSION = 1

_FORMAT = "safetensors packs"
_SAVE_ID = re.compile(r"[0-9A-Za-z_-]{1,64}")

_ROWS = 1024
"""Blocks of a segment; docs/decisions.md has the measurement."""

_OBJECTS = 1024
_RECORDS = 1024
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
    """What ``index`` holds: the save that counts, and where the root of its full index is.

    Attributes:
        save_id: of the save.
        byte_offset: of the root.
        nbytes: of the root.
        digest: XXH3-128 of the root.
    """

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
            found = json.loads(content)
            version, name = int(found.pop("version")), found.pop("format")
            if version != VERSION:
                raise IncompatibleVersionError(
                    f"{path}: version {version} of {name}; this release reads {VERSION}; install a "
                    "newer one",
                    path=path,
                )
            save_id, digest = str(found["save_id"]), str(found["digest"])
            _require(name == _FORMAT, "format", name)
            _require(_SAVE_ID.fullmatch(save_id) is not None, "save_id", save_id)  # part of a path
            byte_offset, nbytes = int(found["byte_offset"]), int(found["nbytes"])
            _require(0 <= byte_offset < _MAX_NBYTES, "byte_offset", byte_offset)
            _require(0 < nbytes < _MAX_NBYTES, "nbytes", nbytes)
            return cls(save_id, byte_offset, nbytes, digest)
        except MALFORMED as error:
            raise CorruptCheckpointError(
                f"{path} is damaged ({error}); the packs are not: dist-ckpt rebuild-index makes "
                "the index anew",
                path=path,
            ) from error


def _require(is_good: bool, name: str, value: object) -> None:  # noqa: FBT001
    if not is_good:
        raise ValueError(f"{name} {value!r}")


@dataclass(frozen=True, slots=True)
class StoredObject:
    """One shard of a grid of objects, and where it is."""

    id: ObjectId
    stored: StoredBytes


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


def build_full_index(
    save_id: str,
    arrays: Sequence[tuple[bytes, list[Any]]],
    objects: Iterable[StoredObject],
    packs: Sequence[PackRecord],
    common: StoredBytes | None,
    facts: dict[str, Any],
) -> tuple[bytes, Pointer]:
    """The full index of a save, and what ``index`` says of it.

    Args:
        save_id: of the save.
        arrays: what ``array_segments`` made.
        objects: all shards of objects.
        packs: all packs, by their numbers.
        common: where the common state is.
        facts: further fields of JSON types, such as the number of ranks.
    """
    content = bytearray()

    def add(segment: bytes) -> list[Any]:
        content.extend(segment)
        return [len(content) - len(segment), len(segment), xxhash.xxh3_128_hexdigest(segment)]

    blocks = [[*said, *add(segment)] for segment, said in arrays]
    ordered = sorted(objects, key=lambda found: found.id)
    listed = []
    for start in range(0, len(ordered), _OBJECTS):
        part = ordered[start : start + _OBJECTS]
        rows = [[o.id.key, o.id.offset, o.id.shape, *astuple(o.stored)] for o in part]
        segment = zlib.compress(json.dumps(rows).encode(), _LEVEL)
        listed.append([part[0].id.key, len(part), *add(segment)])
    records = np.array(
        [(bytes.fromhex(p.name), bytes.fromhex(p.digest), *astuple(p)[2:]) for p in packs],
        _PACK_RECORD,
    )
    root = {
        "save_id": save_id,
        "version": VERSION,
        **facts,
        "common": None if common is None else astuple(common),
        "arrays": blocks,
        "objects": listed,
        "num_packs": len(packs),
        "packs": [
            add(zlib.compress(rows.tobytes(), _LEVEL))
            for start in range(0, len(packs), _RECORDS)
            for rows in [records[start : start + _RECORDS]]
        ],
    }
    described = json.dumps(root, separators=(",", ":")).encode()
    content += described + _LENGTH.pack(len(described))
    return bytes(content), Pointer.of(save_id, bytes(content), "")


def _record_in(content: bytes, number: int) -> PackRecord:
    """One of the records of a segment of packs."""
    name, digest, *numbers = np.frombuffer(content, _PACK_RECORD)[number].tolist()
    return PackRecord(name.hex(), digest.hex(), *numbers)


# Read by every rank


class FullIndex:
    """The full index of a save; segments are read as they are asked for, and kept.

    Args:
        pointer: what ``index`` says.
        read: bytes of the file, by the first and how many.
        path: for messages.

    Attributes:
        save_id: of the save.
        nbytes: of the file.
        facts: the root, a dict of JSON types.

    Raises:
        CorruptCheckpointError: a part is not what was written.
    """

    def __init__(self, pointer: Pointer, read: Callable[[int, int], bytes], path: str) -> None:
        self._read, self._path = read, path
        self.save_id = pointer.save_id
        self.nbytes = pointer.byte_offset + pointer.nbytes + _LENGTH.size
        self._end = _LENGTH.pack(pointer.nbytes)
        root = self._part(pointer.byte_offset, pointer.nbytes, pointer.digest)
        self.facts: dict[str, Any] = json.loads(root)
        self._tables: dict[int, BlockTable] = {}
        self._objects: dict[int, list[StoredObject]] = {}
        self._packs: dict[int, bytes] = {}

    @property
    def num_packs(self) -> int:
        """How many packs there are."""
        return int(self.facts["num_packs"])

    @property
    def common(self) -> StoredBytes | None:
        """Where the common state is."""
        where = self.facts["common"]
        return None if where is None else StoredBytes(*where)

    def find(self, keys: Iterable[str]) -> BlockTable:
        """The blocks of some arrays.

        Raises:
            ArrayNotFoundError: there is no such array.
        """
        wanted = sorted(set(keys))
        firsts = [segment[0] for segment in self.facts["arrays"]]
        numbers = {n for key in wanted for n in _numbers(firsts, key)}
        missing = [n for n in sorted(numbers) if n not in self._tables]
        parts = [self.facts["arrays"][n][3:] for n in missing]
        for n, content in zip(missing, self._parts(parts), strict=True):
            self._tables[n] = BlockTable.from_bytes(zlib.decompress(content))
        table, _, _ = merged(_of_keys(self._tables[n], wanted) for n in sorted(numbers))
        for key in sorted(set(wanted).difference(table.keys)):
            raise ArrayNotFoundError(f"{key}: no such array in {self._path}", key=key)
        return table

    def tables(self) -> Iterator[BlockTable]:
        """The blocks of all arrays, segment by segment, by key and origin; none of them is kept."""
        end = self.nbytes - _LENGTH.size
        self._part(end, _LENGTH.size, xxhash.xxh3_128_hexdigest(self._end))
        for *_, byte_offset, nbytes, digest in self.facts["arrays"]:
            content = self._part(byte_offset, nbytes, digest)
            yield BlockTable.from_bytes(zlib.decompress(content))

    def objects(self, keys: Iterable[str] | None = None) -> list[StoredObject]:
        """Shards of objects of these keys, or all, sorted."""
        listed = self.facts["objects"]
        wanted = None if keys is None else set(keys)
        firsts = [segment[0] for segment in listed]
        numbers = [*range(len(listed))]
        if wanted is not None:
            numbers = sorted({n for key in wanted for n in _numbers(firsts, key)})
        found: list[StoredObject] = []
        for n in numbers:
            if n not in self._objects:
                content = zlib.decompress(self._part(*listed[n][2:]))
                self._objects[n] = [
                    StoredObject(ObjectId(k, tuple(o), tuple(s)), StoredBytes(*where))
                    for k, o, s, *where in json.loads(content)
                ]
            found += self._objects[n]
        return [one for one in found if wanted is None or one.id.key in wanted]

    def packs(self, numbers: Iterable[int]) -> dict[int, PackRecord]:
        """The records of these packs."""
        wanted = sorted(set(numbers))
        missing = sorted({n // _RECORDS for n in wanted} - self._packs.keys())
        parts = self._parts([self.facts["packs"][n] for n in missing])
        for n, content in zip(missing, parts, strict=True):
            self._packs[n] = zlib.decompress(content)
        return {n: _record_in(self._packs[n // _RECORDS], n % _RECORDS) for n in wanted}

    def _parts(self, parts: Sequence[Sequence[Any]]) -> Iterator[bytes]:
        """The bytes of parts, each by offset, size and digest; neighbours are read at once."""
        runs: list[list[Sequence[Any]]] = []
        for part in parts:
            if runs and part[0] - sum(runs[-1][-1][:2]) <= _GAP_NBYTES:
                runs[-1].append(part)
            else:
                runs.append([part])
        for run in runs:
            start, end = run[0][0], sum(run[-1][:2])
            content = self._read(start, end - start)
            for byte_offset, nbytes, digest in run:
                found = content[byte_offset - start : byte_offset - start + nbytes]
                yield self._compared(found, byte_offset, digest)

    def _part(self, byte_offset: int, nbytes: int, digest: str) -> bytes:
        return self._compared(self._read(byte_offset, nbytes), byte_offset, digest)

    def _compared(self, content: bytes, byte_offset: int, digest: str) -> bytes:
        found = xxhash.xxh3_128_hexdigest(content)
        if found != digest:
            raise CorruptCheckpointError(
                f"{self._path} is damaged: {len(content)} bytes from byte {byte_offset} have "
                f"digest {found}, expected {digest}; the packs are not damaged: dist-ckpt "
                "rebuild-index makes the index anew",
                path=self._path,
            )
        return content


def _of_keys(table: BlockTable, wanted: Sequence[str]) -> BlockTable:
    """The blocks of a segment that are of these keys, which are sorted as those of the segment."""
    known = table.keys
    start, stop = bisect_left(wanted, known[0]), bisect_right(wanted, known[-1])
    places = [(bisect_left(known, key), key) for key in wanted[start:stop]]
    is_wanted = np.zeros(len(known), bool)
    is_wanted[[at for at, key in places if known[at] == key]] = True
    return table.rows(np.flatnonzero(is_wanted[table.array]))


def _numbers(firsts: Sequence[str], key: str) -> range:
    """The segments that may hold a key, by the first key of each."""
    return range(max(0, bisect_left(firsts, key) - 1), bisect_right(firsts, key))
