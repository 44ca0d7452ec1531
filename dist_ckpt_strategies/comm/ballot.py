"""The meeting of every step: four bytes of all ranks, and a few bytes among replicas."""

from __future__ import annotations

import logging
import struct
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import xxhash

from dist_ckpt_strategies.comm.group_users import GROUP_USERS
from dist_ckpt_strategies.comm.process_group import ProcessGroup, is_distributed
from dist_ckpt_strategies.config import limit_of_wait

logger = logging.getLogger(__name__)

_LENGTH = struct.Struct("<q")
_TOO_LONG = -1
_LARGEST_SUM = (1 << 31) - 1


class Ballot:
    """Votes of a group of ranks, and what each of them mirrors to its replicas.

    Plain collectives of torch.distributed, two in each step: an error ends them as it ends those
    of the training beside them. Without torch.distributed this process is alone. A local save
    behind training that sends over one of the groups is waited for, so that training stalls: it
    is better given a group of its own.

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
        self._longest_wait_s = limit_of_wait(timeout_s)
        self._has_waited = False
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
        """Whether all ranks vote on the same number; four bytes. Collective over those that vote.

        What is added up tells each whether any differs, not only those below the highest. Where
        they differ, a rank whose value happens to be the mean of all takes them for equal: that
        is one chance in about 2**31 divided by the number of ranks.
        """
        if not is_distributed():
            return True
        size = dist.get_world_size(self._group)
        mine = _scattered(number) % (_LARGEST_SUM // size)
        self._let_others_finish(self._group)
        value = torch.tensor([mine], dtype=torch.int32, device=_device_of(self._group))
        work: Any = dist.all_reduce(value, group=self._group, async_op=True)
        work.wait(self._limit)
        return int(value.item()) == size * mine

    def _let_others_finish(self, group: ProcessGroup | None) -> None:
        if GROUP_USERS.is_used(group) and not self._has_waited:
            self._has_waited = True
            logger.warning(
                "a step waits for a save behind training that sends over the group of its votes; "
                "give the save's strategy a group of its own"
            )
        GROUP_USERS.wait(group, self._longest_wait_s)

    def _gathered(self, mine: torch.Tensor) -> list[torch.Tensor]:
        self._let_others_finish(self._replicas)
        mine = mine.to(_device_of(self._replicas))
        size = dist.get_world_size(self._replicas)
        found = [torch.empty_like(mine) for _ in range(size)]
        work: Any = dist.all_gather(found, mine, group=self._replicas, async_op=True)
        work.wait(self._limit)
        return [one.cpu() for one in found]


def _scattered(number: int) -> int:
    """A number by which sums of different numbers differ."""
    return xxhash.xxh3_64_intdigest(str(number).encode())


def _device_of(group: ProcessGroup | None) -> torch.device:
    if "nccl" in dist.get_backend(group) and "gloo" not in dist.get_backend(group):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
