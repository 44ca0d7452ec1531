"""What the package asks of a group of ranks; a process alone is a group of one."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dist_ckpt_strategies.errors import PeerLostError

Message = Any
"""What ranks send each other: JSON types only. Nothing that comes from a peer is unpickled."""

Bytes = npt.NDArray[Any]
"""A one-dimensional, contiguous array of uint8."""


Buffer = Bytes | torch.Tensor
"""Bytes on the host, or a one-dimensional tensor of uint8 on the communicator's device."""


@dataclass(frozen=True, slots=True)
class Send:
    """Bytes for another rank of the group."""

    to_rank: int
    data: Buffer


@dataclass(frozen=True, slots=True)
class Receive:
    """Memory for bytes from another rank of the group, of exactly their size."""

    from_rank: int
    into: Buffer


class Communicator:
    """A fixed set of ranks that call the same methods in the same order; here, one process alone.

    Every method waits at most the timeout given when the communicator was made, and raises
    PeerTimeoutError after that, PeerLostError where contact with a peer broke off. After either the
    group is out of step: nothing more may be asked of it.

    ``rank`` is this process, counted within the group; ``global_ranks`` are those of its members.
    Tensors on ``device`` travel without a copy to the host or from it. A rank logs its reports at
    ``report_level``: INFO on global rank 0 alone, as Megatron-LM prints what any rank logs at INFO.
    """

    device = torch.device("cpu")

    def __init__(self, global_ranks: Sequence[int] = (0,), rank: int = 0) -> None:
        self.global_ranks = tuple(global_ranks)
        self.rank = rank
        self.size = len(self.global_ranks)
        self.report_level = logging.DEBUG if self.global_ranks[rank] else logging.INFO

    def all_gather(self, item: Message) -> list[Message]:
        """Every rank's item, by rank. Collective."""
        return [item]

    def exchange(self, sends: Sequence[Send], receives: Sequence[Receive]) -> None:
        """Carry all the bytes. Collective.

        Between any two ranks, the n-th send matches the n-th receive, and their sizes are equal.
        """
        self.begin_exchange(sends, receives)()

    def begin_exchange(
        self, sends: Sequence[Send], receives: Sequence[Receive]
    ) -> Callable[[], None]:
        """Like ``exchange``, but return at once. Collective; one at a time may be under way.

        What is returned waits until this rank's bytes are sent, and those for it have arrived.
        Their memory belongs to the exchange until then.
        """
        for send, receive in zip(sends, receives, strict=True):
            np.asarray(receive.into)[...] = np.asarray(send.data)
        return lambda: None


def who_is_where(comm: Communicator, kinds: Sequence[Hashable], texts: Sequence[str]) -> str:
    """Which ranks are alike, in words: ``ranks [0, 1, 3] in a save; ranks [2] in a load``.

    Ranks of equal ``kinds`` are alike; the first one's text is shown.
    """
    alike: defaultdict[Hashable, list[int]] = defaultdict(list)
    for rank, kind in enumerate(kinds):
        alike[kind].append(rank)
    return "; ".join(
        f"ranks {[comm.global_ranks[rank] for rank in ranks]} in {texts[ranks[0]]}"
        for ranks in alike.values()
    )


def out_of_step(global_rank: int, what: str) -> PeerLostError:
    """The error for a rank that answers, but in another step than this one."""
    return PeerLostError(
        global_rank,
        f"ranks are out of step: what this one has sent does not belong to {what}; it has left an "
        "earlier step by an error of its own, or this one has: see what each of them raised first",
    )
