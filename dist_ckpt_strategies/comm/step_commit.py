"""The two collectives of every step: its commit by all ranks, and bytes for replicas."""

import logging
import struct
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import xxhash

from dist_ckpt_strategies.comm.process_group import (
    ProcessGroup,
    is_distributed,
    message_device,
    raise_if_aborted,
)
from dist_ckpt_strategies.device import uses_cuda
from dist_ckpt_strategies.errors import PeerTimeoutError, RestartError

logger = logging.getLogger(__name__)

_HEADER = struct.Struct("<qQ")
"""Of replicated bytes: their length, and their digest (xxh3)."""

_TOO_LONG = -1
_PAUSE_S = 0.0002


class StepCommit:
    """Commits steps of a group of ranks, and replicates a few bytes of each rank.

    Plain collectives of torch.distributed: an error ends them as it ends those of the training.
    Without torch.distributed this process is alone.

    The ranks of ``group``, by default the world, commit; those of ``replica_group``, by default the
    same, keep each other's bytes. ``is_new`` says that nothing has been replicated yet.
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

        The first call determines how long content may be, with a reserve. Longer content is
        not replicated later on: the other ranks get none from this one.

        Raises a RestartError if bytes arrive damaged, and a WaitReleasedError if communication was
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
        Raises a PeerTimeoutError if they are not there in time, and a WaitReleasedError if
        communication was ended before: they may be garbage then.
        """
        if not is_distributed():
            return True
        if uses_cuda():
            self._await_gradients(step)
        raise_if_aborted()
        device = message_device(self._group)
        value = torch.tensor([step, -step], dtype=torch.int64, device=device)
        work: Any = dist.all_reduce(value, dist.ReduceOp.MAX, group=self._group, async_op=True)
        work.wait(self._limit)
        found = value.tolist()
        raise_if_aborted()
        return bool(found == [step, -step])

    def _await_gradients(self, step: int) -> None:
        """Return when the GPU has done what was queued on this thread's stream."""
        done: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()
        deadline = time.monotonic() + self._limit.total_seconds()
        while not done.query():
            raise_if_aborted()
            if time.monotonic() >= deadline:
                raise PeerTimeoutError(
                    None,
                    f"commit of step {step}: the GPU was not done with its gradients within "
                    f"{self._limit.total_seconds():g} s; a rank does not reduce them, or a GPU "
                    "hangs",
                )
            time.sleep(_PAUSE_S)

    def _gathered(self, mine: torch.Tensor) -> torch.Tensor:
        """The tensors of all replicas, in rows, on the host."""
        mine = mine.to(message_device(self._replicas))
        found = mine.new_empty((dist.get_world_size(self._replicas), mine.numel()))
        rows = list(found.unbind())
        work: Any = dist.all_gather(rows, mine, group=self._replicas, async_op=True)
        work.wait(self._limit)
        found = found.cpu()
        raise_if_aborted()
        return found
