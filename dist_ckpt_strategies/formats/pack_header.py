"""Reads and checks the header of a pack, and every byte by its digest."""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np
import xxhash

from dist_ckpt_strategies.core.array import DType, ObjectId, Region, Shape
from dist_ckpt_strategies.core.blocks import ArrayFacts, BlockTable
from dist_ckpt_strategies.errors import (
    CorruptCheckpointError,
    IncompatibleVersionError,
    IncompleteCheckpointError,
)
from dist_ckpt_strategies.formats.issues import NO_FILE, Issue, Problem
from dist_ckpt_strategies.formats.pack import (
    COMMON,
    DIGESTS,
    LENGTH,
    MAX_HEADER_NBYTES,
    PADDING,
    RANGE_NBYTES,
    SAFETENSORS_NAMES,
    UNVERIFIED,
    VERSION,
    Digests,
    StoredBytes,
    StoredObject,
    num_ranges,
    opened_table,
    table_nbytes,
)
from dist_ckpt_strategies.formats.pack_write import PackRecord, file_of
from dist_ckpt_strategies.storage.bucket import Place

_DTYPES = MappingProxyType({name: dtype for dtype, name in SAFETENSORS_NAMES.items()})
_READ_NBYTES = 16 * RANGE_NBYTES
_NAME = re.compile(r"(.*)([@#])(|\d+(?:\.\d+)*)", re.DOTALL | re.ASCII)

MALFORMED = (
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)


@dataclass(frozen=True, slots=True)
class OpenedPack:
    """The header of a pack, read and checked.

    Attributes:
        record: as the index lists it; its name and digest are empty where only the header was read.
        digests: of all ranges; none where only the header was read.
        save_id: of the save that wrote it; empty where writers share no id.
        num_packs: that all ranks of the save wrote; 0 where the writer did not know.
        features: known ones.
        tensors: all of them but the last: name, first byte after the header, first digest, bytes.
        metadata: all fields of ``__metadata__``, those of the writer's own among them.
    """

    record: PackRecord
    digests: Digests
    save_id: str
    num_packs: int
    features: tuple[str, ...]
    table: BlockTable
    objects: tuple[StoredObject, ...]
    common: StoredBytes | None
    tensors: tuple[tuple[str, int, int, int], ...]
    metadata: Mapping[str, str]


def header_nbytes(start: bytes, path: str) -> int:
    """Bytes before the first tensor, by the first 8 bytes of the file."""
    if len(start) == LENGTH.size:
        (length,) = LENGTH.unpack(start)
        if LENGTH.size < length + LENGTH.size <= 2 * MAX_HEADER_NBYTES:
            return int(length) + LENGTH.size
    raise CorruptCheckpointError(f"{path} is damaged: it has no header of a pack", path=path)


def parse_header(content: bytes, path: str) -> OpenedPack:
    """Parse a header; ``content`` is all that stands before the first tensor.

    Nothing of it has been compared with a digest yet.

    Raises:
        CorruptCheckpointError: it is no header of a pack.
        IncompatibleVersionError: a later version of this package wrote it.
    """
    try:
        fields = json.loads(content[LENGTH.size :])
        metadata = fields.pop("__metadata__")
        if not all(isinstance(value, str) for value in metadata.values()):
            raise TypeError("__metadata__ holds what is no text")
        version, features = int(metadata["version"]), metadata["features"]
        named = tuple(filter(None, features.split(",")))
        if version != VERSION or not {UNVERIFIED}.issuperset(named):
            raise IncompatibleVersionError(
                f"{path}: a pack of version {version}, features {features or 'none'}; this release "
                f"reads version {VERSION}; install a newer one",
                path=path,
            )
        return _parsed(fields, metadata, named, len(content))
    except MALFORMED as error:
        raise CorruptCheckpointError(
            f"{path} is damaged: its header: {error}", path=path
        ) from error


def _parsed(
    tensors: dict[str, Any], metadata: dict[str, str], features: tuple[str, ...], data_start: int
) -> OpenedPack:
    if int(metadata["range_nbytes"]) != RANGE_NBYTES:
        raise ValueError(f"range_nbytes {metadata['range_nbytes']}, expected {RANGE_NBYTES}")
    shapes, dtypes, grids = (json.loads(metadata[n]) for n in ("arrays", "dtypes", "objects"))
    ordered = sorted(tensors.items(), key=lambda item: item[1]["data_offsets"])
    blocks: list[tuple[str, ArrayFacts, Region, StoredBytes]] = []
    objects: list[StoredObject] = []
    common = None
    end = first = 0
    places: list[tuple[str, int, int, int]] = []
    for name, tensor in ordered[:-1]:
        stored = _after(end, first, name, tensor["data_offsets"])
        places.append((name, end, first, stored.nbytes))
        match = _NAME.fullmatch(name)
        if name == COMMON:
            common = stored
        elif match and match[2] == "#":
            grid = tuple(map(checked_size, grids[match[1]]))
            objects.append((ObjectId(match[1], _numbers(match[3]), grid), stored))
        elif match:
            key, origin = match[1], _numbers(match[3])
            blocks.append((key, *_block(tensor, origin, shapes[key], dtypes.get(key)), stored))
        elif name != PADDING:
            raise ValueError(f"unknown tensor {name!r}")
        end += stored.nbytes
        first += num_ranges(stored.nbytes)
    last, table = ordered[-1]
    expected = [end, end + table_nbytes(first)]
    if last != DIGESTS or table["data_offsets"] != expected:
        raise ValueError(f"expected digests of {first} ranges as the last tensor")
    rank = checked_size(int(metadata["rank"]), 1 << 32)
    return OpenedPack(
        PackRecord("", "", data_start + expected[1], data_start, first, rank),
        np.zeros(0, np.uint64),
        metadata["save"],
        int(metadata["packs"]),
        features,
        BlockTable.of(
            {key: facts for key, facts, _, _ in blocks},
            [(key, region) for key, _, region, _ in blocks],
            [(0, stored.byte_offset, stored.first_range) for *_, stored in blocks],
        ),
        tuple(objects),
        common,
        tuple(places),
        metadata,
    )


def _after(end: int, first_range: int, name: str, offsets: Sequence[int]) -> StoredBytes:
    """The place of a tensor that begins at a byte."""
    start, stop = offsets
    if start != end or not start <= stop < 1 << 60:
        raise ValueError(f"{name}: bytes {start} to {stop}, expected {end} as the first")
    return StoredBytes(0, start, first_range, stop - start)


def _block(
    tensor: dict[str, Any], origin: Shape, array_shape: Any, stated: str | None
) -> tuple[ArrayFacts, Region]:
    dtype = _DTYPES[tensor["dtype"]] if stated is None else DType(stated)
    shape = tuple(map(checked_size, tensor["shape"]))
    if dtype not in SAFETENSORS_NAMES and dtype.itemsize > 1:
        shape = shape[:-1]
    start, stop = tensor["data_offsets"]
    facts, region = (
        ArrayFacts(dtype.value, tuple(map(checked_size, array_shape))),
        Region(origin, shape),
    )
    if len(origin) != region.ndim or region.ndim != len(facts.shape):
        raise ValueError(f"{region.ndim} dims at {origin} in an array {facts}")
    if region.numel * dtype.itemsize != stop - start:
        raise ValueError(f"{stop - start} bytes, expected {shape} of {dtype.value}")
    return facts, region


def checked_size(number: Any, limit: int = 1 << 63) -> int:
    """A number if it is an int from 0 to below the limit; else a ValueError."""
    if type(number) is not int or not 0 <= number < limit:
        raise ValueError(f"expected a size, found {number!r}")
    return number


def _numbers(text: str) -> Shape:
    return tuple(map(int, text.split("."))) if text else ()


def open_pack(store: Place, name: str, expected: PackRecord | None = None) -> OpenedPack:
    """A pack, once its header and its table of digests have been compared with their digests.

    Its tensors are not compared yet.

    ``expected``: how the index lists it, if there is one.

    Raises:
        IncompleteCheckpointError: it is missing.
        CorruptCheckpointError: its header, its table or its size is not what was written.
        IncompatibleVersionError: a later version of this package wrote it.
    """
    file = file_of(name)
    path = store.path(file)
    header = None
    if expected is None:
        start = header_nbytes(store.read(file, 0, LENGTH.size), path)
        content = store.read(file, 0, start)
        header = parse_header(content, path)
        end, num_ranges = header.record.nbytes, header.record.num_ranges
    else:  # a damaged version or size in the header is damage
        start, end, num_ranges = expected.data_start, expected.nbytes, expected.num_ranges
        content = store.read(file, 0, start)
    table = store.read(file, end - table_nbytes(num_ranges), table_nbytes(num_ranges))
    if len(table) < table_nbytes(num_ranges) or _has_byte(store, file, end):
        raise CorruptCheckpointError(f"{path} is damaged: expected {end} bytes", path=path)
    digests = opened_table(table, None if expected is None else expected.digest, path)
    digest, stated = xxhash.xxh3_128_digest(content).hex(), table[-32:-16].hex()
    if digest != stated:
        text = f"{path} is damaged: its header has digest {digest}, expected {stated}"
        raise CorruptCheckpointError(text, path=path)
    header = header or parse_header(content, path)
    if (header.record.nbytes, header.record.num_ranges) != (end, num_ranges):
        text = f"{path} is damaged: its header tells of {header.record.num_ranges} ranges"
        raise CorruptCheckpointError(f"{text}, its index of {num_ranges}", path=path)
    record = replace(header.record, name=name, digest=table[-16:].hex(), data_start=start)
    return replace(header, record=record, digests=digests)


def _has_byte(store: Place, name: str, byte_offset: int) -> bool:
    try:
        return bool(store.read(name, byte_offset, 1))
    except CorruptCheckpointError:  # a bucket says so where the object ends before
        return False


def verify_pack(
    store: Place,
    name: str,
    expected: PackRecord | None = None,
    holds: str = "",
    listed: Callable[[], tuple[BlockTable, Sequence[StoredObject]]] | None = None,
) -> Iterator[Issue]:
    """All that is damaged in a pack, in the order of the file. Reads every byte, 4 MiB at a time.

    Where the header or the table is damaged, nothing tells what the other bytes should be: then
    that is the only issue, which says what the pack ``holds``. ``expected`` and ``listed``: how
    the index lists it, and what it lists in it, if there is one.

    Raises:
        StorageError: storage fails.
        IncompatibleVersionError: a later version of this package wrote it.
    """
    by = "" if expected is None else f", written by rank {expected.rank}"
    whole = f"a whole pack{by}{holds}"
    try:
        pack = open_pack(store, name, expected)
    except IncompleteCheckpointError:
        yield Issue(Problem.MISSING_FILE, None, file_of(name), whole, NO_FILE)
    except CorruptCheckpointError as error:
        yield Issue(Problem.DAMAGED, None, file_of(name), whole, error.message)
    else:
        yield from _damaged_ranges(store, pack)
        if listed is not None:
            yield from _mislisted(pack, *listed())


def _mislisted(
    pack: OpenedPack, listed: BlockTable, objects: Sequence[StoredObject]
) -> Iterator[Issue]:
    """Issues of blocks that the index lists in a pack, and the pack does not."""
    file = file_of(pack.record.name)
    for key, text in sorted(_blocks(listed) - _blocks(pack.table)):
        yield Issue(Problem.DAMAGED, key, file, f"{text}, as the index says", "no such block")
    places = dict(pack.objects)
    for name, stored in objects:
        if places.get(name) != replace(stored, pack=0):
            key, text = name.unique_key, f"it at byte {stored.byte_offset}, as the index says"
            yield Issue(Problem.DAMAGED, key, file, text, "another")


def _blocks(table: BlockTable) -> set[tuple[str, str]]:
    """Key of each block, and what is said of it."""
    places = zip(table.array.tolist(), table.place[:, 1:].tolist(), strict=True)
    return {
        (table.keys[n], f"{table.region(row)} of {table.facts[n]} at byte {at}, digest {first}")
        for row, (n, (at, first)) in enumerate(places)
    }


def _damaged_ranges(store: Place, pack: OpenedPack) -> Iterator[Issue]:
    """The ranges of a pack whose bytes do not have their digests, read some at a time."""
    record, file = pack.record, file_of(pack.record.name)
    memory = np.empty(_READ_NBYTES, np.uint8)  # memory that was never touched is slow
    tensors = [number for number, tensor in enumerate(pack.tensors) for _ in _starts(*tensor)]
    starts = [record.data_start + at for tensor in pack.tensors for at in _starts(*tensor)]
    ends = [*starts[1:], record.nbytes - table_nbytes(record.num_ranges)]  # without a gap
    first = 0
    while first < len(starts):
        begin, stop = starts[first], bisect_right(ends, starts[first] + memory.size)
        store.read_into(file, begin, [memory[: ends[stop - 1] - begin]])
        for number in range(first, stop):
            start, end, stated = starts[number], ends[number], int(pack.digests[number])
            digest = xxhash.xxh3_64_intdigest(memory[start - begin : end - begin].data)
            if digest != stated:
                key, part = _named(pack, *pack.tensors[tensors[number]][:2])
                where = f"{part}, written by rank {record.rank}: bytes {start} to {end}"
                expected = f"{where} with digest {stated:016x}"
                yield Issue(Problem.DAMAGED, key, file, expected, f"digest {digest:016x}")
        first = stop


def _starts(_: str, start: int, _first: int, nbytes: int) -> range:
    """The first bytes of a tensor's ranges, after the header."""
    return range(start, start + nbytes, RANGE_NBYTES)


def _named(pack: OpenedPack, name: str, byte_offset: int) -> tuple[str | None, str]:
    """The key of a tensor that has bytes, if it is of one, and which part of that it is."""
    if name in {COMMON, PADDING}:
        return None, "common state" if name == COMMON else name
    for object_id, where in pack.objects:
        if where.nbytes and where.byte_offset == byte_offset:
            return object_id.unique_key, "object"
    table = pack.table
    (row,) = np.flatnonzero((table.place[:, 1] == byte_offset) & (table.nbytes > 0)).tolist()
    return table.keys[table.array[row]], str(table.region(row))
