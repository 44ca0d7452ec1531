"""The collectives of every step: two numbers of all ranks, and a few bytes among replicas."""

from __future__ import annotations

import logging
import struct
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dist_ckpt_strategies.comm.process_group import (
    ProcessGroup,
    is_distributed,
    message_device,
)

logger = logging.getLogger(__name__)

_LENGTH = struct.Struct("<q")
_TOO_LONG = -1


class Ballot:
    """Votes of a group of ranks, and what each of them mirrors to its replicas.

    Plain collectives of torch.distributed, two in each step: an error ends them as it ends those
    of the training beside them. Without torch.distributed this process is alone.

    Args:
        group: ranks that vote; None for the world.
        replica_group: ranks that keep each other's bytes; None for those of ``group``.
        timeout_s: longest wait in each collective.

    Attributes:
        is_new: whether nothing has been mirrored yet.
    """

    def __init__(
        self,
        group: ProcessGroup | None = None,
        replica_group: ProcessGroup | None = None,
        *,
        timeout_s: float,
    ) -> None:
        self._group = group
        self._replicas = replica_group if replica_group is not None else group
        self._limit = timedelta(seconds=timeout_s)
        self._capacity: int | None = None
        self.is_new = True

    def mirror(self, content: bytes) -> dict[int, bytes]:
        """What the other replicas hand in, by global rank. Collective over the replicas.

        The first call settles how long content may be, with room to spare; what is longer later
        on is not mirrored, which the others see as nothing.
        """
        self.is_new = False
        if not is_distributed() or dist.get_world_size(self._replicas) == 1:
            return {}
        if self._capacity is None:
            lengths = self._gathered(torch.tensor([len(content)], dtype=torch.int64))
            self._capacity = 2 * max(int(length) for length in lengths) + _LENGTH.size
        packed = torch.zeros(self._capacity, dtype=torch.uint8)
        if len(content) > self._capacity - _LENGTH.size:
            logger.warning("%d bytes are too many to be mirrored", len(content))
            head = _LENGTH.pack(_TOO_LONG)
        else:
            head = _LENGTH.pack(len(content)) + content
        packed[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        ranks = dist.get_process_group_ranks(self._replicas or dist.group.WORLD)
        found: dict[int, bytes] = {}
        for rank, data in zip(ranks, self._gathered(packed), strict=True):
            raw = data.numpy().tobytes()
            (length,) = _LENGTH.unpack_from(raw)
            if rank != dist.get_rank() and length != _TOO_LONG:
                found[rank] = raw[_LENGTH.size : _LENGTH.size + length]
        return found

    def is_unanimous(self, number: int) -> bool:
        """Whether all ranks vote on the same number. Collective over those that vote."""
        if not is_distributed():
            return True
        device = message_device(self._group)
        value = torch.tensor([number, -number], dtype=torch.int64, device=device)
        work: Any = dist.all_reduce(value, dist.ReduceOp.MAX, group=self._group, async_op=True)
        work.wait(self._limit)
        return value.tolist() == [number, -number]

    def _gathered(self, mine: torch.Tensor) -> list[torch.Tensor]:
        mine = mine.to(message_device(self._replicas))
        size = dist.get_world_size(self._replicas)
        found = [torch.empty_like(mine) for _ in range(size)]
        work: Any = dist.all_gather(found, mine, group=self._replicas, async_op=True)
        work.wait(self._limit)
        return [one.cpu() for one in found]
