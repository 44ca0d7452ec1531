"""Copies of a rank's tensors on the host, in memory that is kept from save to save."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate

import torch

from dist_ckpt_strategies.device import Slot, copy_into, host_memory, pin_while_alive
from dist_ckpt_strategies.sharded.writer_main import SharedBytes

_ALIGNMENT = 64


class HostSnapshot:
    """Memory for one copy of the tensors, which grows to their size and is kept with the object.

    Memory that was touched before is written several times as fast as new memory.

    Args:
        allocate: gives bytes on the host, pinned or not.
    """

    def __init__(self, allocate: Callable[..., torch.Tensor] = host_memory) -> None:
        self._allocate = allocate
        self._memory: torch.Tensor | None = None

    @property
    def memory(self) -> torch.Tensor:
        """All of it, as bytes; of no use before anything was placed there."""
        assert self._memory is not None  # noqa: S101 - see above
        return self._memory

    def take(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Copies of the tensors, contiguous and on the host; done on return.

        The copies of the call before are overwritten.
        """
        is_pinned = any(tensor.device.type == "cuda" for tensor in tensors)
        slots = self.slots([(t.shape, t.dtype) for t in tensors], is_pinned=is_pinned)
        copies = tuple(slot.tensor for slot in slots)
        copy_into(copies, tensors)
        return copies

    def slots(
        self, layouts: Sequence[tuple[Sequence[int], torch.dtype]], *, is_pinned: bool
    ) -> list[Slot]:
        """A place for each tensor of these shapes and dtypes; those of the call before are gone.

        Args:
            layouts: shape and dtype of each.
            is_pinned: whether the memory is filled from CUDA.
        """
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in layouts]
        starts = list(accumulate(map(_aligned, sizes), initial=0))
        memory = self._room(starts.pop(), is_pinned=is_pinned)
        return [
            Slot(start, memory[start : start + size].view(dtype).reshape(tuple(shape)))
            for start, size, (shape, dtype) in zip(starts, sizes, layouts, strict=True)
        ]

    def _room(self, nbytes: int, *, is_pinned: bool) -> torch.Tensor:
        if self._memory is None or self._memory.numel() < nbytes:
            self._memory = None  # before the new one is made
            self._memory = self._allocate(nbytes, is_pinned=is_pinned)
        return self._memory


class SharedMemory:
    """Gives the memory of a snapshot, so that another process can map it.

    Attributes:
        shared: what was given last.
    """

    def __init__(self) -> None:
        self.shared: SharedBytes | None = None

    def allocate(self, nbytes: int, *, is_pinned: bool) -> torch.Tensor:
        """See HostSnapshot.

        Raises:
            StorageError: there is not so much.
        """
        self.shared = None  # before the new one is made
        self.shared = SharedBytes(nbytes)
        memory = torch.frombuffer(self.shared.memory, dtype=torch.uint8)
        if is_pinned:
            pin_while_alive(self.shared, memory)
        return memory


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
