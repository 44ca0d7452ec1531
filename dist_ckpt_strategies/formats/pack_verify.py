"""Check a pack by what it says of itself: its header, its digests, and every range of its bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import xxhash

from dist_ckpt_strategies.core.array import DType, ObjectId
from dist_ckpt_strategies.errors import CorruptCheckpointError, IncompleteCheckpointError
from dist_ckpt_strategies.formats.issues import NO_FILE, Issue, Problem
from dist_ckpt_strategies.formats.pack import (
    LENGTH,
    PADDING,
    RANGE_NBYTES,
    Digests,
    StoredBytes,
    header_digest,
    opened_table,
    table_nbytes,
)
from dist_ckpt_strategies.formats.pack_header import PackHeader, header_nbytes, parse_header
from dist_ckpt_strategies.formats.pack_write import PackRecord, file_of
from dist_ckpt_strategies.storage.bucket import Place

WHOLE = "a whole pack"
"""What issues expect that are about all of a pack."""

_READ_NBYTES = 16 * RANGE_NBYTES


@dataclass(frozen=True, slots=True)
class OpenedPack:
    """A pack whose header and table of digests are whole. Its tensors are not compared yet.

    Attributes:
        record: as the index lists it.
        header: what it says of itself.
        digests: of all ranges.
    """

    record: PackRecord
    header: PackHeader
    digests: Digests


def open_pack(store: Place, name: str, expected: PackRecord | None = None) -> OpenedPack:
    """A pack, once its header and its table of digests have been compared with their digests.

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
        end, num_ranges = header.nbytes, header.num_ranges
    else:  # a damaged version or size in the header is damage
        start, end, num_ranges = expected.data_start, expected.nbytes, expected.num_ranges
        content = store.read(file, 0, start)
    table = store.read(file, end - table_nbytes(num_ranges), table_nbytes(num_ranges))
    if len(table) < table_nbytes(num_ranges) or _has_byte(store, file, end):
        raise CorruptCheckpointError(f"{path} is damaged: expected {end} bytes", path=path)
    digests = opened_table(table, None if expected is None else expected.digest, path)
    found = xxhash.xxh3_128_digest(content)
    if found != header_digest(table):
        raise CorruptCheckpointError(
            f"{path} is damaged: its header has digest {found.hex()}, expected "
            f"{header_digest(table).hex()}",
            path=path,
        )
    header = header or parse_header(content, path)
    record = PackRecord(name, table[-16:].hex(), end, start, num_ranges, header.rank)
    return OpenedPack(record, header, digests)


def _has_byte(store: Place, name: str, byte_offset: int) -> bool:
    try:
        return bool(store.read(name, byte_offset, 1))
    except CorruptCheckpointError:  # a bucket says so where the object ends before
        return False


def verify_pack(store: Place, name: str, expected: PackRecord | None = None) -> Iterator[Issue]:
    """All that is damaged in a pack, in the order of the file. Reads every byte, 4 MiB at a time.

    Where the header or the table is damaged, nothing tells what the other bytes should be: then
    that is the only issue. ``expected``: how the index lists it, if there is one.

    Raises:
        StorageError: storage fails.
        IncompatibleVersionError: a later version of this package wrote it.
    """
    by = "" if expected is None else f", written by rank {expected.rank}"
    whole = f"{WHOLE}{by}"
    try:
        pack = open_pack(store, name, expected)
    except IncompleteCheckpointError:
        yield Issue(Problem.MISSING_FILE, None, file_of(name), whole, NO_FILE)
    except CorruptCheckpointError as error:
        yield Issue(Problem.DAMAGED, None, file_of(name), whole, error.message)
    else:
        yield from _damaged_ranges(store, pack)


def _damaged_ranges(store: Place, pack: OpenedPack) -> Iterator[Issue]:
    """The ranges of a pack whose bytes do not have their digests, read some at a time."""
    file, rank = file_of(pack.record.name), pack.record.rank
    memory = np.empty(_READ_NBYTES, np.uint8)  # memory that was never touched is slow
    ranges = list(_ranges(pack))
    first = 0
    while first < len(ranges):
        stop, start, end = first, ranges[first].start, ranges[first].start
        while stop < len(ranges) and ranges[stop].stop - start <= memory.size:
            if ranges[stop].start != end:
                break
            end, stop = ranges[stop].stop, stop + 1
        store.read_into(file, start, [memory[: end - start]])
        for found in ranges[first:stop]:
            digest = xxhash.xxh3_64_intdigest(memory[found.start - start : found.stop - start].data)
            if digest != found.digest:
                key, part = _named(pack.header, found.tensor)
                where = f"{part}, written by rank {rank}: bytes {found.start} to {found.stop}"
                expected = f"{where} with digest {found.digest:016x}"
                yield Issue(Problem.DAMAGED, key, file, expected, f"digest {digest:016x}")
        first = stop


class _Range(NamedTuple):
    """Bytes of the file, and the tensor that they are of: see ``_named``."""

    start: int
    stop: int
    digest: int
    tensor: int | ObjectId | str


def _ranges(pack: OpenedPack) -> Iterator[_Range]:
    """All ranges in the order of the file, but for the table of digests."""
    header, table, digests = pack.header, pack.header.table, pack.digests.tolist()
    sizes = np.array([DType(facts.dtype).itemsize for facts in table.facts], np.int64)
    nbytes = (table.extent.prod(axis=1) * sizes[table.array]).tolist() if len(table) else []
    listed: list[tuple[int, int, int, int | ObjectId | str]] = [
        (start, size, first, row)
        for row, ((_, start, first), size) in enumerate(
            zip(table.place.tolist(), nbytes, strict=True)
        )
    ]
    of_bytes: list[tuple[ObjectId | str, StoredBytes]] = [*header.objects]
    if header.common is not None:
        of_bytes.append(("common state", header.common))
    listed += ((at.byte_offset, at.nbytes, at.first_range, name) for name, at in of_bytes)
    listed.sort(key=lambda tensor: tensor[:2])
    end = max((start + size for start, size, *_ in listed), default=0)
    padding = header.nbytes - table_nbytes(header.num_ranges) - header.data_start - end
    if padding:
        listed.append((end, padding, header.num_ranges - 1, PADDING))
    for start, size, number, tensor in listed:
        begin, stop = header.data_start + start, header.data_start + start + size
        for n, at in enumerate(range(begin, stop, RANGE_NBYTES), number):
            yield _Range(at, min(at + RANGE_NBYTES, stop), digests[n], tensor)


def _named(header: PackHeader, tensor: int | ObjectId | str) -> tuple[str | None, str]:
    """The key and the part of it that a tensor is: a row of the table, an object, or neither."""
    if isinstance(tensor, int):
        return header.table.keys[header.table.array[tensor]], str(header.table.region(tensor))
    return (None, tensor) if isinstance(tensor, str) else (tensor.unique_key, "object")
