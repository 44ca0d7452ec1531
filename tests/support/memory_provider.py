"""A StateProvider over tensors at hand, that counts what is asked of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

Parts = Mapping[str, Mapping[str, torch.Tensor]]


class MemoryProvider:
    """Parts as they are given; an update adds one to every tensor."""

    def __init__(
        self, parts: Parts, *, step: int = 0, gathered: frozenset[str] | None = None
    ) -> None:
        self._parts = parts
        self._step = step
        self._gathered = gathered or frozenset()
        self._objects: dict[str, Any] = {"step": step}
        self.num_gathers = 0

    @property
    def step(self) -> int:
        """See StateProvider."""
        return self._step

    def set_step(self, step: int) -> None:
        """See StateProvider."""
        self._step = step

    def parts(self) -> Parts:
        """See StateProvider."""
        return self._parts

    def gathered_parts(self) -> frozenset[str]:
        """See StateProvider."""
        return self._gathered

    def objects(self) -> Mapping[str, Any]:
        """See StateProvider."""
        return self._objects

    def load_objects(self, objects: Mapping[str, Any]) -> None:
        """See StateProvider."""
        self._objects = dict(objects)

    def apply_update(self) -> None:
        """See StateProvider."""
        self._objects["step"] += 1
        for tensors in self._parts.values():
            for tensor in tensors.values():
                tensor.detach().add_(1)

    def gather_weights(self) -> None:
        """See StateProvider."""
        self.num_gathers += 1
