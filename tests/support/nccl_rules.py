"""A process group over gloo whose abort is NCCL's: pending works end without an error.

What they were to receive is garbage then: memory as it was, or other bytes.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dist_ckpt_strategies.comm.interruptible_gloo import InterruptibleGloo
from dist_ckpt_strategies.errors import WaitReleasedError

BACKEND = "aborts_without_error"

_GARBAGE = 0xAB


class NcclRules(InterruptibleGloo):
    """See above."""

    def allreduce(self, tensors: Any, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """In place: an aborted one leaves this rank's own numbers."""
        return _Work(super().allreduce(tensors, *args, **kwargs), [])

    def allgather(self, outputs: Any, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """What is received of ranks that did not send is garbage."""
        received = [tensor for tensors in outputs for tensor in tensors]
        return _Work(super().allgather(outputs, *args, **kwargs), received)


class _Work(dist.Work):
    def __init__(self, inner: Any, outputs: list[torch.Tensor]) -> None:
        super().__init__()
        self._inner = inner
        self._outputs = outputs

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        try:
            self._inner.wait(timeout)
        except WaitReleasedError:
            for output in self._outputs:
                output.view(torch.uint8).fill_(_GARBAGE)
        return True


def register() -> None:
    """Make the backend known to torch.distributed; again does nothing."""
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, NcclRules, devices=["cpu"])
