"""A group of one: single processes, command-line tools, one-rank process groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import torch

from dist_ckpt_strategies.comm.base import Exchange, Receive, Send

T = TypeVar("T")


class Arrived:
    """An Exchange that is over."""

    def wait(self) -> None:
        """See Exchange."""


class SoloCommunicator:
    """A Communicator without peers.

    Args:
        global_rank: what this process is called in messages.
    """

    def __init__(self, global_rank: int = 0) -> None:
        self._global_rank = global_rank
        self.rank = 0
        self.size = 1
        self.device = torch.device("cpu")

    def global_rank(self, rank: int) -> int:  # noqa: ARG002 - there is one
        """See Communicator."""
        return self._global_rank

    def all_gather(self, item: T) -> list[T]:
        """See Communicator."""
        return [item]

    def exchange(self, sends: Sequence[Send], receives: Sequence[Receive]) -> None:
        """See Communicator."""
        for send, receive in zip(sends, receives, strict=True):
            np.asarray(receive.into)[...] = np.asarray(send.data)

    def begin_exchange(self, sends: Sequence[Send], receives: Sequence[Receive]) -> Exchange:
        """See Communicator."""
        self.exchange(sends, receives)
        return Arrived()
