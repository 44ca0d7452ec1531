"""The two collectives of every step: its commit by all ranks, and bytes for replicas."""

import logging
import struct
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import xxhash

from dist_ckpt_strategies.comm.process_group import (
    ProcessGroup,
    begin_gather_rows,
    is_distributed,
    message_device,
)
from dist_ckpt_strategies.device import await_gpu, raise_if_aborted
from dist_ckpt_strategies.errors import RestartError

logger = logging.getLogger(__name__)

_HEADER = struct.Struct("<qQ")
"""Of replicated bytes: their length, and their digest (xxh3)."""

_TOO_LONG = -1


class StepCommit:
    """Commits steps of a group of ranks, and replicates a few bytes of each rank.

    Plain collectives of torch.distributed: an error ends them as it ends those of the training.
    Without torch.distributed this process is alone.

    The ranks of ``group``, by default the world, commit; those of ``replica_group``, by default the
    same, keep each other's bytes. ``is_new`` says that nothing has been replicated yet.
    ``gpu_timeout_s`` is the longest wait for this rank's GPU to do its step; by default the same.
    """

    def __init__(
        self,
        group: ProcessGroup | None = None,
        replica_group: ProcessGroup | None = None,
        *,
        timeout_s: float,
        gpu_timeout_s: float | None = None,
    ) -> None:
        self._group = group
        self._replicas = replica_group if replica_group is not None else group
        self._limit = timedelta(seconds=timeout_s)
        self._gpu_timeout_s = timeout_s if gpu_timeout_s is None else gpu_timeout_s
        self._capacity: int | None = None
        self.is_new = True

    def replicate(self, content: bytes) -> dict[int, bytes]:
        """The content of the other replicas, by global rank. Collective over the replicas.

        The first call determines how long content may be, with a reserve. Longer content is
        not replicated later on: the other ranks get none from this one.

        Raises a RestartError if bytes arrive damaged, and a PeerLostError if communication was
        ended meanwhile.
        """
        self.is_new = False
        if not is_distributed() or dist.get_world_size(self._replicas) == 1:
            return {}
        if self._capacity is None:
            lengths = self._gathered(torch.tensor([len(content)], dtype=torch.int64))
            self._capacity = 2 * int(lengths.max()) + _HEADER.size
        if len(content) > self._capacity - _HEADER.size:
            logger.warning("random states of %d bytes are too large to be replicated", len(content))
            packed = _HEADER.pack(_TOO_LONG, 0)
        else:
            packed = _HEADER.pack(len(content), xxhash.xxh3_64_intdigest(content)) + content
        buffer = bytearray(packed.ljust(self._capacity, b"\0"))
        ranks = dist.get_process_group_ranks(self._replicas or dist.group.WORLD)
        found: dict[int, bytes] = {}
        all_data = self._gathered(torch.frombuffer(buffer, dtype=torch.uint8))
        for rank, data in zip(ranks, all_data, strict=True):
            raw = data.numpy().tobytes()
            length, digest = _HEADER.unpack_from(raw)
            if rank == dist.get_rank() or length == _TOO_LONG:
                continue
            found[rank] = raw[_HEADER.size :][: max(0, length)]
            if len(found[rank]) != length or xxhash.xxh3_64_intdigest(found[rank]) != digest:
                raise RestartError(f"the random states of rank {rank} arrived damaged")
        return found

    def should_commit(self, step: int) -> bool:
        """Whether all ranks are at the same step. Collective over the ranks that commit.

        A rank takes part once the gradients that its GPU reduces are there, over whatever group.
        Raises a PeerTimeoutError if they are not there in time, and a PeerLostError if
        communication was ended before: they may be garbage then.
        """
        if not is_distributed():
            return True
        self.await_gradients(step)
        device = message_device(self._group)
        value = torch.tensor([step, -step], dtype=torch.int64, device=device)
        work: Any = dist.all_reduce(value, dist.ReduceOp.MAX, group=self._group, async_op=True)
        work.wait(self._limit)
        found = value.tolist()
        raise_if_aborted()
        return bool(found == [step, -step])

    def await_gradients(self, step: int) -> None:
        """Return when the GPU has done what was queued on this thread's stream; see await_gpu."""
        await_gpu(self._gpu_timeout_s, f"gradients of step {step}")

    def _gathered(self, mine: torch.Tensor) -> torch.Tensor:
        """The tensors of all replicas, in rows, on the host."""
        found, work = begin_gather_rows(mine.to(message_device(self._replicas)), self._replicas)
        work.wait(self._limit)
        found = found.cpu()
        raise_if_aborted()
        return found
