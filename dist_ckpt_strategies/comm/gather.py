"""Gather what is too large for a message."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import xxhash

from dist_ckpt_strategies.comm.agree import agree, agree_and_gather
from dist_ckpt_strategies.comm.base import Bytes, Communicator, Receive, Send


def agree_and_gather_bytes(comm: Communicator, step: Callable[[], bytes]) -> list[bytes]:
    """Like ``agree_and_gather``, for bytes: every rank's, by rank.

    Collective: one gather, and where ranks have different bytes another one and an exchange.
    Equal bytes are sent once to each rank that lacks them, and the list holds one object many
    times: replicas that ask for the same cost little.
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

    def prepare() -> tuple[list[Send], dict[tuple[int, str], Bytes]]:
        buffers = {what: np.empty(what[0], np.uint8) for what in holder if what != mine}
        if holder[mine] != comm.rank or not content:
            return [], buffers
        data = np.frombuffer(bytearray(content), np.uint8)
        return [Send(rank, data) for rank, what in enumerate(described) if what != mine], buffers

    sends, buffers = agree(comm, prepare)
    comm.exchange(sends, [Receive(holder[what], to) for what, to in buffers.items() if what[0]])
    found = {what: buffer.tobytes() for what, buffer in buffers.items()} | {mine: content}
    return [found[what] for what in described]
