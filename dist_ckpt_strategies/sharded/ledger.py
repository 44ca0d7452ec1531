"""The first rank's descriptions of all shards, and the proof that they make up the arrays.

Each rank describes its shards once, and again only after they have changed. Shards that are not
written are described once for all ranks that hold the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import xxhash

from dist_ckpt_strategies.comm.base import Communicator, Message
from dist_ckpt_strategies.core.array import ObjectId, ShardSpec
from dist_ckpt_strategies.core.blocks import (
    OBJECT,
    ArrayFacts,
    BlockTable,
    plain_text,
    with_objects,
)
from dist_ckpt_strategies.core.coverage import require_coverage
from dist_ckpt_strategies.errors import PlanError
from dist_ckpt_strategies.formats.index import array_segments, joined_tables
from dist_ckpt_strategies.formats.pack import Layout

Description = tuple[int, bytes, bytes, str]
"""A rank's description of its shards; equal if shards and their places are equal.

How many packs it writes; a table of the shards in them; a table of other replicas that it holds,
and the digest of that.
"""


def described(
    layout: Layout, copies: Sequence[ShardSpec], object_copies: Sequence[ObjectId]
) -> Description:
    """The description of what a rank writes, and of the replicas that it does not write."""
    others = shard_table(copies, object_copies)
    main = with_objects(layout.table, [name for name, _ in layout.objects]).to_bytes()
    return len(layout.packs), main, others, xxhash.xxh3_128_hexdigest(others)


def shard_table(shards: Sequence[ShardSpec], objects: Sequence[ObjectId]) -> bytes:
    """A table of shards that have no place in a pack."""
    arrays = {shard.key: ArrayFacts(shard.dtype.value, shard.array_shape) for shard in shards}
    blocks = sorted((shard.key, shard.region) for shard in shards)
    table = BlockTable.of(arrays, blocks, [(0, 0, 0)] * len(blocks))
    return with_objects(table, objects).to_bytes()


@dataclass(frozen=True, slots=True)
class Ledger:
    """Descriptions of all ranks, on the first rank.

    Attributes:
        session: an id of this ledger alone; each rank that has told it remembers the id.
        told: the number of packs, the table of what is written, and the digest of the copies.
        copies: tables of copies, by digest.
        segments: of the full index, once ``proved`` has made them.
    """

    session: str
    told: tuple[tuple[int, bytes, str], ...]
    copies: dict[str, bytes]
    segments: tuple[tuple[bytes, list[Any]], ...] | None = None


def tell_first_rank(
    comm: Communicator,
    mine: Description,
    announced: Sequence[Message],
    session: str,
    ledger: Ledger | None,
) -> Ledger | None:
    """Bring what ranks have not yet told to the first one; the ledger there, elsewhere None.

    Collective: an exchange. ``announced`` is by rank: None, or the number of packs, the sizes of
    both tables and the digest of the copies. The new ledger has the id ``session``.
    """
    parcels, tables = list(_parcels(announced)), mine[1:3]
    sends = [
        (0, np.frombuffer(bytearray(tables[is_copies]), np.uint8))
        for rank, is_copies, _ in parcels
        if rank == comm.rank > 0
    ]
    arrived = {
        (rank, is_copies): np.empty(nbytes, np.uint8)
        for rank, is_copies, nbytes in parcels
        if rank > 0 == comm.rank
    }
    receives = [(rank, memory) for (rank, _), memory in arrived.items()]
    comm.exchange(sends, receives)
    if comm.rank != 0:
        return None
    told = list(ledger.told) if ledger else [(0, b"", "")] * comm.size
    copies = dict(ledger.copies) if ledger else {}
    for rank, is_copies, _ in parcels:
        content = arrived[rank, is_copies].tobytes() if rank else tables[is_copies]
        num_packs, _, _, digest = announced[rank]
        if is_copies:
            copies[digest] = content
        else:
            told[rank] = num_packs, content, digest
    used = {digest for *_, digest in told}
    return Ledger(session, tuple(told), {d: c for d, c in copies.items() if d in used})


def _parcels(announced: Sequence[Message]) -> Iterator[tuple[int, bool, int]]:
    """Tables that travel: whose, whether of copies, and bytes; equal ones of copies once."""
    seen = set()
    for rank, facts in enumerate(announced):
        if facts is not None:
            _, num_main, num_copies, digest = facts
            yield rank, False, num_main
            if digest not in seen:
                seen.add(digest)
                yield rank, True, num_copies


def proved(ledger: Ledger, global_ranks: Sequence[int]) -> Ledger:
    """The ledger with the segments of the full index, once the shards make up every array.

    Raises:
        CoverageError: they do not.
        PlanError: ranks see an array in different ways.
    """
    if ledger.segments is not None:
        return ledger
    try:
        return _proved(ledger, global_ranks)
    except PlanError as error:
        key = error.key and plain_text(error.key)
        plain = type(error)(plain_text(error.message), key=key)
        plain.global_rank = error.global_rank
        raise plain from None


def _proved(ledger: Ledger, global_ranks: Sequence[int]) -> Ledger:
    ranks = np.array(global_ranks, np.int64)
    tables = [BlockTable.from_bytes(main) for _, main, _ in ledger.told]
    copies = [
        (
            tuple(r for r, (*_, d) in zip(global_ranks, ledger.told, strict=True) if d == digest),
            BlockTable.from_bytes(content),
        )
        for digest, content in ledger.copies.items()
    ]
    num_packs = [number for number, *_ in ledger.told]
    table, sources, differing = joined_tables(tables, num_packs)
    for key, *numbers in differing:
        told = [(tables[n].facts[tables[n].keys.index(key)], global_ranks[n]) for n in numbers]
        text = ", ".join(f"{of_rank} on rank {rank}" for of_rank, rank in told)
        raise PlanError(f"{key}: {text}; all shards of an array have one shape and dtype", key=key)
    facts = dict(zip(table.keys, table.facts, strict=True))
    holder = {key: n for n, t in reversed([*enumerate(tables)]) for key in t.keys}
    for holders, held in copies:
        for key, seen in zip(held.keys, held.facts, strict=True):
            if facts.setdefault(key, seen) != seen:
                raise PlanError(
                    f"{key}: {facts[key]} on rank {global_ranks[holder[key]]}, {seen} on rank "
                    f"{holders[0]}; all replicas of an array have one shape and dtype",
                    key=key,
                )
    require_coverage(table, ranks[sources], copies)
    is_array = np.array([f.dtype != OBJECT for f in table.facts], bool)
    arrays = table.rows(np.flatnonzero(is_array[table.array]))
    return replace(ledger, segments=tuple(array_segments(arrays)))
