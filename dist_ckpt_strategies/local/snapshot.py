"""Copies of a rank's tensors on the host, in memory that is kept from save to save."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dist_ckpt_strategies.device import copy_into, host_memory

_ALIGNMENT = 64


class HostSnapshot:
    """Memory for one copy of the tensors, which grows to their size and is kept with the object.

    Memory that was touched before is written several times as fast as new memory.
    """

    def __init__(self) -> None:
        self._memory: torch.Tensor | None = None

    def take(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Copies of the tensors, contiguous and on the host; done on return.

        The copies of the call before are overwritten.
        """
        starts = []
        end = 0
        for tensor in tensors:
            starts.append(end)
            end += -(-_nbytes(tensor) // _ALIGNMENT) * _ALIGNMENT
        memory = self._room(end, is_pinned=any(t.device.type == "cuda" for t in tensors))
        copies = [
            memory[start : start + _nbytes(tensor)].view(tensor.dtype).reshape(tensor.shape)
            for start, tensor in zip(starts, tensors, strict=True)
        ]
        copy_into(copies, tensors)
        return tuple(copies)

    def _room(self, nbytes: int, *, is_pinned: bool) -> torch.Tensor:
        if self._memory is None or self._memory.numel() < nbytes:
            self._memory = None  # before the new one is made
            self._memory = host_memory(nbytes, is_pinned=is_pinned)
        return self._memory


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
