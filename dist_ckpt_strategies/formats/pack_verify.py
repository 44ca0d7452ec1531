"""Check a pack by what it says of itself: its header, its digests, and every range of its bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import xxhash

from dist_ckpt_strategies.core.array import DType
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
from dist_ckpt_strategies.storage.store import Bytes

WHOLE = "a whole pack"
"""What issues expect that are about all of a pack."""

_READ_NBYTES = 16 * RANGE_NBYTES


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a pack.

    Attributes:
        key: of the array, or of the shard of an object; None for what belongs to no key.
        part: which part of it is stored, in words.
        stored: where it is.
    """

    key: str | None
    part: str
    stored: StoredBytes


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

    def tensors(self) -> Iterator[StoredTensor]:
        """All tensors in the order of the file, but for the table of digests."""
        header, table, listed = self.header, self.header.table, []
        sizes = [DType(facts.dtype).itemsize for facts in table.facts]
        for row, (number, (_, start, first)) in enumerate(
            zip(table.array.tolist(), table.place.tolist(), strict=True)
        ):
            region = table.region(row)
            stored = StoredBytes(0, start, first, region.numel * sizes[number])
            listed.append(StoredTensor(table.keys[number], str(region), stored))
        listed += [StoredTensor(name.unique_key, "object", where) for name, where in header.objects]
        if header.common is not None:
            listed.append(StoredTensor(None, "common state", header.common))
        yield from sorted(listed, key=lambda tensor: tensor.stored.byte_offset)
        end = max((t.stored.byte_offset + t.stored.nbytes for t in listed), default=0)
        padding = header.nbytes - table_nbytes(header.num_ranges) - header.data_start - end
        if padding:
            yield StoredTensor(None, PADDING, StoredBytes(0, end, header.num_ranges - 1, padding))


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
        memory = np.empty(_READ_NBYTES, np.uint8)  # memory that was never touched is slow
        for tensor in pack.tensors():
            yield from damaged_ranges(store, pack.record, pack.digests, tensor, memory)


def pack_issues(store: Place, pack: PackRecord) -> Iterator[Issue]:
    """See ``verify_pack``; the pack as the index lists it."""
    return verify_pack(store, pack.name, pack)


def damaged_ranges(
    store: Place, record: PackRecord, digests: Digests, tensor: StoredTensor, memory: Bytes
) -> Iterator[Issue]:
    """The ranges of a tensor of a pack whose bytes do not have their digests.

    Some ranges at a time are read into ``memory``.
    """
    file, stored = file_of(record.name), tensor.stored
    start = record.data_start + stored.byte_offset
    number = stored.first_range
    for at in range(0, stored.nbytes, memory.size):
        content = memory[: stored.nbytes - at]
        store.read_into(file, start + at, [content])
        for begin in range(0, content.size, RANGE_NBYTES):
            piece = content[begin : begin + RANGE_NBYTES]
            digest, first = xxhash.xxh3_64_intdigest(piece.data), start + at + begin
            if digest != digests[number]:
                yield Issue(
                    Problem.DAMAGED,
                    tensor.key,
                    file,
                    f"{tensor.part}, written by rank {record.rank}: bytes {first} to "
                    f"{first + piece.size} with digest {digests[number]:016x}",
                    f"digest {digest:016x}",
                )
            number += 1
