"""Objects and random states on their way: small, and from the ranks that the plan names."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash

from dist_ckpt_strategies.comm.agree import agree, agree_and_gather
from dist_ckpt_strategies.comm.base import Communicator, Receive, Send
from dist_ckpt_strategies.errors import CorruptCheckpointError, PlanError
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


def dump_objects(value: Any) -> bytes:
    """A value for another rank of this job.

    Raises:
        PlanError: it cannot be pickled.
    """
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
    except Exception as error:
        raise PlanError(
            f"the state's objects cannot be sent to another rank: {type(error).__name__}: {error}"
        ) from error
    return buffer.getvalue()


def load_objects(content: bytes) -> Any:
    """What ``dump_objects`` was given by a rank of this job; tensors are on the CPU."""
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=False)  # noqa: TID251 - not from disk


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
        own_objects: what this rank has of the target; None if it receives.
        known: random states that it knows.

    Raises:
        CorruptCheckpointError: something arrived damaged.
    """
    held: list[bytes] = []

    def describe() -> list[Any]:
        random = {rank: content for (rank, step), content in known.items() if step == plan.target}
        held.append(dump_objects((own_objects(), random)))
        return [len(held[0]), xxhash.xxh3_64_hexdigest(held[0])]

    described = agree_and_gather(comm, describe)
    pairs = plan.message_pairs()

    def prepare() -> tuple[list[Send], list[Receive]]:
        mine = np.frombuffer(bytearray(held[0]), np.uint8)
        return [Send(to, mine) for source, to in pairs if source == comm.rank], [
            Receive(source, np.empty(described[source][0], np.uint8))
            for source, to in pairs
            if to == comm.rank
        ]

    sends, receives = agree(comm, prepare)
    if pairs:
        comm.exchange(sends, receives)

    def decoded() -> SmallStates:
        found = {comm.rank: held[0]}
        for one in receives:
            found[one.from_rank] = np.asarray(one.into).tobytes()
        for source, content in found.items():
            if xxhash.xxh3_64_hexdigest(content) != described[source][1]:
                raise CorruptCheckpointError(
                    f"objects and random states from rank {comm.global_rank(source)} arrived "
                    "damaged"
                )
        return _chosen(comm.rank, plan, {rank: load_objects(one) for rank, one in found.items()})

    return agree(comm, decoded)


def _chosen(rank: int, plan: RecoveryPlan, states: Mapping[int, Any]) -> SmallStates:
    """What a rank takes of the states that it has, by their ranks."""
    random: dict[int, bytes] = {}
    for source in {plan.random_sources[rank], *states}:
        random = {**states[source][1], **random}
    return SmallStates(states[plan.object_sources[rank]][0], random)
