"""Write packs: here, on threads, or in the writer process, which has no torch."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
from xxhash import xxh3_64_intdigest

from dist_ckpt_strategies.errors import StorageError, StorageTimeoutError
from dist_ckpt_strategies.formats.pack import RANGE_NBYTES, Digests, PackLayout, sealed_table
from dist_ckpt_strategies.storage.bucket import Place
from dist_ckpt_strategies.storage.io_pool import Job, Transfer
from dist_ckpt_strategies.storage.store import Bytes

logger = logging.getLogger(__name__)

FOLDER = "packs"

_WRITE_NBYTES = 4 << 20
"""Bytes of one write: still in the processor's cache, where its digests were taken."""

_MAX_BUFFERS = 1000
"""Of one call; the system takes 1024."""

_PAGE_NBYTES = 4096


SUFFIX = ".safetensors"


def file_of(name: str) -> str:
    """The file of a pack below the checkpoint's directory; a name that no index lists is a file."""
    return name if name.endswith(SUFFIX) else f"{FOLDER}/{name[:2]}/{name}{SUFFIX}"


@dataclass(frozen=True, slots=True)
class PackRecord:
    """A pack that was written, as the index lists it.

    Attributes:
        name: 16 hexadecimal digits.
        digest: of its table of digests, and so of all of it.
        nbytes: of the file.
        data_start: of its first tensor.
        num_ranges: digests of ranges in the table.
        rank: the global rank that wrote it.
    """

    name: str
    digest: str
    nbytes: int
    data_start: int
    num_ranges: int
    rank: int


Written = tuple[PackRecord, Digests]
"""A pack that was written, and the digests of its ranges."""


def new_pack_name() -> str:
    """A name that no other pack has."""
    return secrets.token_hex(8)


def write_pack(  # noqa: PLR0913 - facts of the save are known when it is written
    store: Place,
    name: str,
    pack: PackLayout,
    contents: Iterable[Sequence[Bytes]],
    *,
    save_id: str,
    rank: int,
    num_packs: int = 0,
    digests: Digests | None = None,
) -> Written:
    """Write a pack, durably. Rank-local.

    Args:
        store: where it goes.
        name: no other pack has it.
        pack: its layout.
        contents: the bytes of each tensor that the layout lists, in its order, in batches; a batch
            is valid until the next is taken. Padding is left out. A tensor may come in parts, all
            but the last of whole ranges.
        save_id: of the save; empty where writers share none.
        rank: the global rank that writes.
        num_packs: that all ranks of the save write, if that is known.
        digests: of the ranges of all contents, where the caller has compared these with them.
    """
    header = pack.header(save_id, num_packs)
    table = np.empty(pack.num_ranges, np.uint64)
    sealed: list[str] = []

    def pieces() -> Iterator[Sequence[Bytes]]:
        yield [np.frombuffer(header, np.uint8)]
        number, sizes, left = 0, iter(pack.sizes), 0
        for batch in _with_padding(pack, contents):
            pending: list[Bytes] = []
            nbytes = 0
            for content in batch:
                left = (left or next(sizes, 0)) - content.size
                if left < 0 or (left and content.size % RANGE_NBYTES):
                    raise StorageError(f"{path}: {content.size} bytes to write, not as announced")
                for start in range(0, content.size, RANGE_NBYTES):
                    piece = content[start : start + RANGE_NBYTES]
                    table[number] = _digest(number, piece, digests)
                    number += 1
                    pending.append(piece)
                    nbytes += piece.size
                    if nbytes >= _WRITE_NBYTES or len(pending) == _MAX_BUFFERS:
                        yield pending
                        pending, nbytes = [], 0
            yield pending
        if left or number != pack.num_ranges:
            raise StorageError(f"{path}: {number} ranges to write, expected {pack.num_ranges}")
        tensor, digest = sealed_table(table, header)
        sealed.append(digest)
        yield [np.frombuffer(tensor, np.uint8)]

    path = file_of(name)
    store.write_pieces(path, pieces())
    record = PackRecord(name, sealed[0], pack.nbytes, pack.data_start, pack.num_ranges, rank)
    return record, table


def _digest(number: int, piece: Bytes, digests: Digests | None) -> int:
    """The digest of a range: one of those that are known, or taken now."""
    if digests is not None and number < len(digests):
        return int(digests[number])
    return xxh3_64_intdigest(piece.data)


def _with_padding(
    pack: PackLayout, contents: Iterable[Sequence[Bytes]]
) -> Iterator[Sequence[Bytes]]:
    yield from contents
    if pack.sources and pack.sources[-1] < 0:
        yield [np.zeros(pack.sizes[-1], np.uint8)]


def delete_files(store: Place, names: Iterable[str]) -> None:
    """Delete files of a save; what cannot be deleted is logged: `prune --unfinished` does it."""
    try:
        store.delete(names)
    except StorageError as error:
        logger.warning("%s: files of an earlier save cannot be deleted: %s", store, error)


PackContents = Sequence[Iterable[Sequence[Bytes]]]
"""The bytes of the tensors of each pack, in its order, in batches; see ``write_pack``."""

Write = Callable[[PackContents], Sequence[Written]]
"""Writes all that a rank holds, durably. It can be sent to another process."""


def write_packs(
    store: Place,
    packs: Sequence[PackLayout],
    facts: Mapping[str, Any],
    num_threads: int,
    timeout_s: float,
    contents: PackContents,
) -> tuple[Written, ...]:
    """Write packs, durably, some on threads at the same time. Rank-local.

    ``facts`` are ``save_id``, ``rank`` and ``num_packs`` of ``write_pack``; ``timeout_s`` is the
    longest wait for the storage.

    Raises:
        StorageError: a pack cannot be written; what was written of the others is deleted.
    """
    names = [new_pack_name() for _ in packs]
    records: dict[str, Written] = {}

    def write(name: str, pack: PackLayout, batches: Iterable[Sequence[Bytes]]) -> None:
        records[name] = write_pack(store, name, pack, batches, **facts)

    jobs = [
        Job("", store.path(file_of(name)), partial(write, name, pack, batches))
        for name, pack, batches in zip(names, packs, contents, strict=True)
    ]
    try:
        Transfer(jobs, num_threads).wait(timeout_s)
    except StorageTimeoutError:
        raise  # a thread may still write: prune --unfinished removes that
    except StorageError:
        delete_files(store, [file_of(name) for name in names])
        raise
    return tuple(records[name] for name in names)


def write_copy(packs: Sequence[PackLayout], write: Write, memory: memoryview) -> Any:
    """Write from memory that holds the packs one after the other, but for headers and tables."""
    content = np.frombuffer(memory, np.uint8)
    return write(
        [
            [[content[at : at + size] for n, at, size in places_of(pack, start) if n >= 0]]
            for pack, start in zip(packs, pack_starts(packs), strict=False)
        ]
    )


def seal(pack: PackLayout, memory: Bytes, save_id: str, num_packs: int) -> Digests:
    """Complete the file of a pack in memory that holds its tensors: header, padding, digests.

    Returns the digests of its ranges.
    """
    header, number = pack.header(save_id, num_packs), 0
    memory[: pack.data_start] = np.frombuffer(header, np.uint8)
    digests = np.empty(pack.num_ranges, np.uint64)
    for source, start, nbytes in places_of(pack):
        tensor = memory[start : start + nbytes]
        if source < 0:
            tensor[:] = 0
        for at in range(0, nbytes, RANGE_NBYTES):
            digests[number] = xxh3_64_intdigest(tensor[at : at + RANGE_NBYTES].data)
            number += 1
    table, _ = sealed_table(digests, header)
    memory[pack.nbytes - len(table) : pack.nbytes] = np.frombuffer(table, np.uint8)
    return digests


def pack_starts(packs: Sequence[PackLayout]) -> Iterator[int]:
    """The start of each pack in memory that holds them all; then the size of that memory."""
    return accumulate((-(-pack.nbytes // _PAGE_NBYTES) * _PAGE_NBYTES for pack in packs), initial=0)


def places_of(pack: PackLayout, start: int = 0) -> Iterator[tuple[int, int, int]]:
    """Source, first byte and size of each tensor of a pack, which begins there, but its digests."""
    starts = accumulate(pack.sizes, initial=start + pack.data_start)
    return zip(pack.sources, starts, pack.sizes, strict=False)
