"""Gather what is too large for a message."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import xxhash

from dist_ckpt_strategies.comm.agree import agree_and_gather
from dist_ckpt_strategies.comm.base import Bytes, Communicator, Receive, Send


def agree_and_gather_bytes(comm: Communicator, step: Callable[[], bytes]) -> list[bytes]:
    """Like ``agree_and_gather``, for bytes: every rank's, by rank.

    Collective, a meeting and an exchange. Ranks with equal bytes are sent them by nobody, and
    their lists hold one object many times: replicas that ask for the same cost little.
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
    sends: list[Send] = []
    if holder[mine] == comm.rank and content:
        data = np.frombuffer(bytearray(content), np.uint8)
        sends = [Send(rank, data) for rank, what in enumerate(described) if what != mine]
    wanted = {what: rank for what, rank in holder.items() if what != mine}
    arrived: dict[tuple[int, str], Bytes] = {what: np.empty(what[0], np.uint8) for what in wanted}
    comm.exchange(sends, [Receive(rank, arrived[what]) for what, rank in wanted.items() if what[0]])
    found = {what: into.tobytes() for what, into in arrived.items()} | {mine: content}
    return [found[what] for what in described]
