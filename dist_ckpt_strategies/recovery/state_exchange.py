"""Objects and random states on their way: small, and from whoever the plan names."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from dist_ckpt_strategies.comm.agree import agree, agree_and_gather
from dist_ckpt_strategies.comm.base import Communicator, Receive, Send
from dist_ckpt_strategies.errors import CorruptCheckpointError
from dist_ckpt_strategies.recovery.plan import RecoveryPlan

RandomStates = Mapping[tuple[int, int], bytes]
"""Encoded random states, by rank and step."""


@dataclass(frozen=True, slots=True)
class SmallStates:
    """What a rank has of the target that is no tensor of a part.

    Attributes:
        objects: for its provider.
        random: random states that it knows, by rank; its own among them.
    """

    objects: Mapping[str, Any]
    random: dict[int, bytes]


def exchange_states(
    comm: Communicator,
    plan: RecoveryPlan,
    own_objects: Callable[[], Mapping[str, Any] | None],
    known: RandomStates,
) -> SmallStates:
    """The objects and random states of the target, on every rank.

    Collective: either every rank returns, or every rank raises.

    Args:
        comm: the ranks of the plan.
        plan: equal on all of them.
        own_objects: what this rank has of the target, as JSON types; None if it receives.
        known: random states that it knows.

    Raises:
        CorruptCheckpointError: something arrived damaged.
    """
    held: list[bytes] = []

    def describe() -> list[Any]:
        random = {
            str(rank): base64.b64encode(content).decode()
            for (rank, step), content in sorted(known.items())
            if step == plan.target
        }
        held.append(json.dumps([own_objects(), random]).encode())
        return [len(held[0]), xxhash.xxh3_64_hexdigest(held[0])]

    described = agree_and_gather(comm, describe)

    def prepare() -> _Messages:
        return _Messages.of(comm.rank, plan, held[0], [size for size, _ in described])

    messages = agree(comm, prepare)
    if plan.message_pairs():
        comm.exchange(messages.sends, messages.receives)

    def decoded() -> SmallStates:
        found = {one.from_rank: np.asarray(one.into).tobytes() for one in messages.receives}
        digests = [digest for _, digest in described]
        return _decoded_states(comm, plan, found | {comm.rank: held[0]}, digests)

    return agree(comm, decoded)


@dataclass(frozen=True, slots=True)
class _Messages:
    sends: list[Send]
    receives: list[Receive]

    @classmethod
    def of(cls, rank: int, plan: RecoveryPlan, content: bytes, sizes: Sequence[int]) -> _Messages:
        """Those of a rank, with room for what arrives."""
        mine = np.frombuffer(bytearray(content), np.uint8)
        pairs = plan.message_pairs()
        return cls(
            [Send(to, mine) for source, to in pairs if source == rank],
            [
                Receive(source, np.empty(sizes[source], np.uint8))
                for source, to in pairs
                if to == rank
            ],
        )


def _decoded_states(
    comm: Communicator,
    plan: RecoveryPlan,
    found: Mapping[int, bytes],
    digests: Sequence[str],
) -> SmallStates:
    decoded: dict[int, Any] = {}
    for source, content in found.items():
        if xxhash.xxh3_64_hexdigest(content) != digests[source]:
            raise CorruptCheckpointError(
                f"objects and random states from rank {comm.global_rank(source)} arrived damaged"
            )
        decoded[source] = json.loads(content)
    random: dict[int, bytes] = {}
    for source in {plan.random_sources[comm.rank], *decoded}:
        for rank, text in decoded[source][1].items():
            random.setdefault(int(rank), _from_base64(text))
    return SmallStates(decoded[plan.object_sources[comm.rank]][0], random)


def _from_base64(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise CorruptCheckpointError(f"random states that are no base64: {error}") from error
