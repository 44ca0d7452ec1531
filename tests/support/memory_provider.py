"""A StateProvider over tensors at hand, that counts what is asked of it."""

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
        self.step = step
        self._gathered = gathered or frozenset()
        self._objects: dict[str, Any] = {"step": step}
        self.num_gathers = 0

    def set_step(self, step: int) -> None:
        self.step = step

    def parts(self) -> Parts:
        return self._parts

    def gathered_parts(self) -> frozenset[str]:
        return self._gathered

    def objects(self) -> Mapping[str, Any]:
        return self._objects

    def load_objects(self, objects: Mapping[str, Any]) -> None:
        self._objects = dict(objects)

    def apply_update(self) -> None:
        self._objects["step"] += 1
        for tensors in self._parts.values():
            for tensor in tensors.values():
                tensor.detach().add_(1)

    def gather_weights(self) -> None:
        self.num_gathers += 1
