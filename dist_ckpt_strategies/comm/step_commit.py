"""The two collectives of every step: its commit by all ranks, and bytes for replicas."""

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


class StepCommit:
    """Commits steps of a group of ranks, and replicates a few bytes of each rank.

    Plain collectives of torch.distributed: an error ends them as it ends those of the training.
    Without torch.distributed this process is alone.

    Args:
        group: ranks that commit; None for the world.
        replica_group: ranks that keep each other's bytes; None for those of ``group``.
        timeout_s: longest wait in each collective.

    Attributes:
        is_new: whether nothing has been replicated yet.
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

    def replicate(self, content: bytes) -> dict[int, bytes]:
        """What the other replicas give, by global rank. Collective over the replicas.

        The first call determines how long content may be, with room to spare. Longer content is
        not replicated later on: the other ranks get none from this one.
        """
        self.is_new = False
        if not is_distributed() or dist.get_world_size(self._replicas) == 1:
            return {}
        if self._capacity is None:
            lengths = self._gathered(torch.tensor([len(content)], dtype=torch.int64))
            self._capacity = 2 * max(int(length) for length in lengths) + _LENGTH.size
        if len(content) > self._capacity - _LENGTH.size:
            logger.warning("%d bytes are too many to be replicated", len(content))
            packed = _LENGTH.pack(_TOO_LONG)
        else:
            packed = _LENGTH.pack(len(content)) + content
        buffer = bytearray(packed.ljust(self._capacity, b"\0"))
        ranks = dist.get_process_group_ranks(self._replicas or dist.group.WORLD)
        found: dict[int, bytes] = {}
        all_data = self._gathered(torch.frombuffer(buffer, dtype=torch.uint8))
        for rank, data in zip(ranks, all_data, strict=True):
            raw = data.numpy().tobytes()
            (length,) = _LENGTH.unpack_from(raw)
            if rank != dist.get_rank() and length != _TOO_LONG:
                found[rank] = raw[_LENGTH.size : _LENGTH.size + length]
        return found

    def should_commit(self, step: int) -> bool:
        """Whether all ranks are at the same step. Collective over the ranks that commit."""
        if not is_distributed():
            return True
        device = message_device(self._group)
        value = torch.tensor([step, -step], dtype=torch.int64, device=device)
        work: Any = dist.all_reduce(value, dist.ReduceOp.MAX, group=self._group, async_op=True)
        work.wait(self._limit)
        return value.tolist() == [step, -step]

    def _gathered(self, mine: torch.Tensor) -> list[torch.Tensor]:
        mine = mine.to(message_device(self._replicas))
        size = dist.get_world_size(self._replicas)
        found = [torch.empty_like(mine) for _ in range(size)]
        work: Any = dist.all_gather(found, mine, group=self._replicas, async_op=True)
        work.wait(self._limit)
        return [one.cpu() for one in found]
