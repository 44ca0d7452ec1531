"""Compare every byte of a pack with its digests. No torch."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import xxhash

from dist_ckpt_strategies.errors import CorruptCheckpointError
from dist_ckpt_strategies.formats.issues import Issue, Problem
from dist_ckpt_strategies.formats.pack import (
    RANGE_NBYTES,
    header_digest,
    opened_table,
    table_nbytes,
)
from dist_ckpt_strategies.formats.pack_header import PackHeader, parse_header
from dist_ckpt_strategies.formats.pack_write import PackRecord, file_of
from dist_ckpt_strategies.storage.bucket import Place
from dist_ckpt_strategies.storage.store import Bytes

_READ_NBYTES = 4 << 20


def pack_issues(store: Place, pack: PackRecord) -> Iterator[Issue]:
    """What of a pack is not what was written: by tensor, bytes and rank; raises if unreadable."""
    name = file_of(pack.name)
    content = _read(store, name, pack.nbytes - table_nbytes(pack.num_ranges), pack.nbytes)
    try:
        digests = opened_table(content.tobytes(), pack.digest, store.path(name))
    except CorruptCheckpointError as error:
        yield Issue(Problem.DAMAGED, None, name, f"its digests, {pack.digest}", error.message)
        return
    start = _read(store, name, 0, pack.data_start).tobytes()
    header: PackHeader | None = None
    if xxhash.xxh3_128_digest(start) != header_digest(content.tobytes()):
        expected = f"the header that rank {pack.rank} wrote"
        yield Issue(Problem.DAMAGED, None, name, expected, "another digest")
    else:
        header = parse_header(start, store.path(name))
    yield from _range_issues(store, pack, digests, header)


def _range_issues(
    store: Place, pack: PackRecord, digests: Bytes, header: PackHeader | None
) -> Iterator[Issue]:
    name, end = file_of(pack.name), pack.nbytes - table_nbytes(pack.num_ranges)
    tensors = list(header.tensors) if header else []
    for key, byte_offset, first, nbytes in tensors:
        for at in range(0, nbytes, _READ_NBYTES):
            begin = pack.data_start + byte_offset + at
            content = _read(store, name, begin, min(begin + _READ_NBYTES, begin - at + nbytes, end))
            for place in range(0, content.size, RANGE_NBYTES):
                piece = content[place : place + RANGE_NBYTES]
                number = first + (at + place) // RANGE_NBYTES
                found, expected = xxhash.xxh3_64_intdigest(piece.data), int(digests[number])
                if found != expected:
                    where = f"bytes {begin + place} to {begin + place + piece.size}"
                    what = f"{where} with digest {expected:016x} (written by rank {pack.rank})"
                    yield Issue(Problem.DAMAGED, key, name, what, f"{found:016x}")


def _read(store: Place, name: str, start: int, end: int) -> Bytes:
    content = np.empty(end - start, np.uint8)
    store.read_into(name, start, [content])
    return content
