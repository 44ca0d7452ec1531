"""Which messages the members of a clique send each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dist_ckpt_strategies.plan.messages import MESSAGE_NBYTES, Message, build_messages


@dataclass(frozen=True, slots=True)
class ReplicationPlan:
    """What every member of a clique sends to all others.

    In each round every member sends its next message, as long as it has one.

    Attributes:
        messages: by rank within the clique.
    """

    messages: tuple[tuple[Message, ...], ...]

    @property
    def num_rounds(self) -> int:
        """Rounds until all is sent."""
        return max(map(len, self.messages))

    def message(self, rank: int, number: int) -> Message | None:
        """What a member sends in a round; None if it is done."""
        of_rank = self.messages[rank]
        return of_rank[number] if number < len(of_rank) else None


def build_replication_plan(
    byte_offsets: Sequence[Sequence[int]],
    sizes: Sequence[Sequence[int]],
    max_bucket_nbytes: int,
) -> ReplicationPlan:
    """Plan the exchange of whole parts among the members of a clique.

    A message has ``MESSAGE_NBYTES`` at most, also where there would be room for more.

    Args:
        byte_offsets: for each member, where the buffers of its part begin in their file.
        sizes: for each member, the bytes of each buffer.
        max_bucket_nbytes: bound on the messages that a member receives in one round, all of them
            together, and on the one that it sends.
    """
    num_peers = max(1, len(sizes) - 1)
    bound = max(1, min(max_bucket_nbytes // num_peers, MESSAGE_NBYTES))
    return ReplicationPlan(
        tuple(
            build_messages(offsets, found, bound)
            for offsets, found in zip(byte_offsets, sizes, strict=True)
        )
    )
