"""Modes of torch that belong to the thread, which an interrupted block may leave switched."""

from __future__ import annotations

from dataclasses import dataclass

import torch

_DEVICE_TYPES = ("cpu", "cuda")


@dataclass(frozen=True, slots=True)
class TorchModes:
    """How this thread's modes are set.

    An interruption may come between the switch that ``with torch.no_grad()`` makes and the body
    that it is for: nobody switches back then, and no later attempt would have gradients.

    Attributes:
        grad: whether operations are recorded for gradients.
        autocast: device types whose operations are cast.
    """

    grad: bool
    autocast: frozenset[str]

    @classmethod
    def take(cls) -> TorchModes:
        """Of now."""
        found = (kind for kind in _DEVICE_TYPES if torch.is_autocast_enabled(kind))
        return cls(torch.is_grad_enabled(), frozenset(found))

    def restore(self) -> None:
        """Set them back, in the thread that they were taken in."""
        torch.set_grad_enabled(self.grad)
        for kind in _DEVICE_TYPES:
            torch.set_autocast_enabled(kind, kind in self.autocast)
