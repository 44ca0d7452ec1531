"""ShardedObjects that a group of ranks reads once and passes on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dist_ckpt_strategies.comm.agree import agree, agree_and_gather
from dist_ckpt_strategies.comm.base import Bytes, Communicator, Receive, Send
from dist_ckpt_strategies.core.array import ObjectId
from dist_ckpt_strategies.formats.objects import Allowed, load_content
from dist_ckpt_strategies.megatron.shards import object_id


@dataclass(frozen=True, slots=True)
class ObjectShares:
    """Who reads which objects, and who requests them.

    Attributes:
        wanted_by: the ranks that request each object, by its unique key.
        reader: the rank that reads it.
    """

    wanted_by: Mapping[str, tuple[int, ...]]
    reader: Mapping[str, int]

    def read_by_rank(self) -> Mapping[int, list[str]]:
        """What each rank reads, sorted; only ranks that read something."""
        found: dict[int, list[str]] = defaultdict(list)
        for key, reader in self.reader.items():
            found[reader].append(key)
        return found

    def read_by(self, rank: int) -> list[str]:
        """What one rank reads, sorted."""
        return [key for key, reader in self.reader.items() if reader == rank]

    def sent_to(self, rank: int) -> list[str]:
        """What one rank gets from others, sorted."""
        return [
            key for key, by in self.wanted_by.items() if rank in by and self.reader[key] != rank
        ]


NO_SHARES = ObjectShares({}, {})
"""No rank requests an object."""


def share_objects(objects: Iterable[Any], comm: Communicator) -> ObjectShares:
    """Assign the objects that any rank requests to the ranks in turn. Collective."""

    def names() -> list[str]:
        return sorted({object_id(found).unique_key for found in objects})

    wanted_by: dict[str, list[int]] = defaultdict(list)
    for rank, found in enumerate(agree_and_gather(comm, names)):
        for unique_key in found:
            wanted_by[unique_key].append(rank)
    order = sorted(wanted_by)
    return ObjectShares(
        {key: tuple(wanted_by[key]) for key in order},
        {key: number % comm.size for number, key in enumerate(order)},
    )


def send_objects(
    shares: ObjectShares, comm: Communicator, read: Callable[[], Mapping[str, bytes]]
) -> dict[str, bytes | Bytes]:
    """The pickled form of each object that this rank reads or requests, by unique key.

    Collective: two error checks and an exchange, if there are objects.

    Args:
        shares: equal on every rank.
        comm: the group.
        read: gives the pickled form of each object that this rank reads.
    """
    if not shares.reader:
        return {}
    mine: dict[str, bytes] = {}
    read_by_rank = shares.read_by_rank()
    own = read_by_rank.get(comm.rank, [])

    def describe() -> list[int]:
        mine.update(read())
        return [len(mine[key]) for key in own]

    answers = agree_and_gather(comm, describe)
    nbytes = {
        key: size
        for rank, sizes in enumerate(answers)
        for key, size in zip(read_by_rank.get(rank, ()), sizes, strict=True)
    }
    arrived: dict[str, Bytes] = {}

    def allocate() -> list[Send]:
        wanted = shares.sent_to(comm.rank)
        arrived.update({key: np.empty(nbytes[key], np.uint8) for key in wanted})
        return [
            Send(rank, np.frombuffer(bytearray(mine[key]), np.uint8))
            for key in own
            for rank in shares.wanted_by[key]
            if rank != comm.rank
        ]

    sends = agree(comm, allocate)
    comm.exchange(sends, [Receive(shares.reader[key], into) for key, into in arrived.items()])
    return mine | arrived


def unpickled(
    objects: Sequence[Any],
    contents: Mapping[str, bytes | Bytes],
    path_of: Callable[[ObjectId], str],
    allowed: Callable[[], Allowed],
) -> dict[int, Any]:
    """What was loaded for each ShardedObject, by its identity.

    ``path_of`` says where an object is stored, for messages.
    """
    allow = allowed() if objects else ()
    names = {id(found): object_id(found) for found in objects}
    return {
        found: load_content(bytes(contents[n.unique_key]), path_of(n), n.unique_key, allow)
        for found, n in names.items()
    }
