"""Gather what is too large for a message."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import numpy as np
import xxhash

from dist_ckpt_strategies.comm.agree import agree, agree_and_gather
from dist_ckpt_strategies.comm.base import Bytes, Communicator, Receive, Send


def agree_and_gather_bytes(comm: Communicator, step: Callable[[], bytes]) -> list[bytes]:
    """Like ``agree_and_gather``, for bytes: every rank's, by rank.

    Collective: one meeting, and where ranks have different bytes another one and an exchange.
    Ranks with equal bytes are sent them by nobody, and their lists hold one object many times:
    replicas that ask for the same cost little.
    """
    held: list[bytes] = []

    def describe() -> list[Any]:
        held.append(step())
        return [len(held[0]), xxhash.xxh3_128_hexdigest(held[0])]

    described = [tuple(answer) for answer in agree_and_gather(comm, describe)]
    holder: dict[tuple[int, str], int] = {}
    for rank, what in enumerate(described):
        holder.setdefault(what, rank)
    mine, content = described[comm.rank], held[0]
    if len(holder) == 1:
        return [content for _ in described]
    rooms = {what: _Room() for what in holder if what != mine}

    def make_room() -> list[Send]:
        for what, room in rooms.items():
            room.make(what[0])
        if holder[mine] != comm.rank or not content:
            return []
        data = np.frombuffer(bytearray(content), np.uint8)
        return [Send(rank, data) for rank, what in enumerate(described) if what != mine]

    sends = agree(comm, make_room)
    comm.exchange(sends, [Receive(holder[w], room.memory) for w, room in rooms.items() if w[0]])
    found = {what: room.content() for what, room in rooms.items()} | {mine: content}
    return [found[what] for what in described]


class _Room:
    """Memory for bytes to arrive in, which are there then without another copy of them.

    Attributes:
        memory: where they arrive.
    """

    memory: Bytes

    def make(self, nbytes: int) -> None:
        """Get the memory."""
        self._held = io.BytesIO(bytes(nbytes))
        self.memory = np.frombuffer(self._held.getbuffer(), np.uint8)

    def content(self) -> bytes:
        """What has arrived."""
        return self._held.getvalue()
