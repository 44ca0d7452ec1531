"""Tensors that can be taken out of their places and put back; a part of every state dict here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from dist_ckpt_strategies.errors import PlanError
from dist_ckpt_strategies.local.base_state_dict import TensorAwareStateDict


@dataclass(frozen=True, slots=True)
class _Outline:
    """What is known of a tensor that has been taken out."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


class TensorSlots:
    """The tensors of a state in their order, or, once they are taken out, their outlines.

    Args:
        tensors: all of them.
        devices: the kind of device that each belongs to; by default the one it is on.
    """

    def __init__(
        self, tensors: Iterable[torch.Tensor], devices: Sequence[str] | None = None
    ) -> None:
        self._tensors: list[torch.Tensor] | None = list(tensors)
        self._outlines: list[_Outline] = []
        if devices is None:
            self._homes = [tensor.device for tensor in self._tensors]
        else:
            self._homes = [torch.device(device) for device in devices]

    @property
    def is_hollow(self) -> bool:
        """Whether the tensors have been taken out."""
        return self._tensors is None

    @property
    def devices(self) -> list[str]:
        """The kind of device that each tensor belongs to."""
        return [home.type for home in self._homes]

    def require_tensors(self) -> list[torch.Tensor]:
        """The tensors.

        Raises:
            PlanError: they have been taken out.
        """
        if self._tensors is None:
            raise PlanError("the state is hollow: call insert_tensors or init_tensors first")
        return self._tensors

    def pop(self) -> list[torch.Tensor]:
        """Take the tensors out."""
        tensors = self.require_tensors()
        self._outlines = [_Outline(t.shape, t.dtype, t.device) for t in tensors]
        self._tensors = None
        return tensors

    def insert(self, tensors: Iterable[torch.Tensor]) -> None:
        """Put tensors in."""
        self._require_hollow()
        found = list(tensors)
        if len(found) != len(self._homes):
            raise PlanError(f"expected {len(self._homes)} tensors, found {len(found)}")
        self._tensors = found

    def init(self) -> None:
        """Put uninitialised tensors in, each on its own device."""
        self._require_hollow()
        self._tensors = [
            torch.empty(outline.shape, dtype=outline.dtype, device=home)
            for outline, home in zip(self._outlines, self._homes, strict=True)
        ]

    def copy_to_cpu(self, *, non_blocking: bool) -> None:
        """Put copies on the CPU in the tensors' places."""
        cpu = torch.device("cpu")
        self._tensors = [
            tensor.detach().clone()
            if tensor.device.type == "cpu"
            else tensor.detach().to(cpu, non_blocking=non_blocking)
            for tensor in self.require_tensors()
        ]

    def move_home(self, *, non_blocking: bool) -> None:
        """Put the tensors on their own devices."""
        self._tensors = [
            tensor
            if tensor.device.type == home.type
            else tensor.to(home, non_blocking=non_blocking)
            for tensor, home in zip(self.require_tensors(), self._homes, strict=True)
        ]

    def _require_hollow(self) -> None:
        if self._tensors is not None:
            raise PlanError("the state is not hollow: call pop_tensors first")


class SlottedStateDict(TensorAwareStateDict):
    """A state dict whose tensors are in slots; what derives from it makes the slots."""

    _slots: TensorSlots

    @property
    def devices(self) -> list[str]:
        """The kind of device that each tensor belongs to."""
        return self._slots.devices

    @property
    def tensors(self) -> Iterator[torch.Tensor]:
        """See TensorAwareStateDict."""
        return iter(self._slots.require_tensors())

    @property
    def is_hollow(self) -> bool:
        """See TensorAwareStateDict."""
        return self._slots.is_hollow

    def pop_tensors(self) -> Sequence[torch.Tensor]:
        """See TensorAwareStateDict."""
        return self._slots.pop()

    def insert_tensors(self, tensor_data: Iterable[torch.Tensor]) -> None:
        """See TensorAwareStateDict."""
        self._slots.insert(tensor_data)

    def init_tensors(self) -> None:
        """See TensorAwareStateDict."""
        self._slots.init()

    def copy_tensors_to_cpu(self, non_blocking: bool = False) -> None:  # noqa: FBT001, FBT002
        """See TensorAwareStateDict."""
        self._slots.copy_to_cpu(non_blocking=non_blocking)

    def restore_tensor_device(self, non_blocking: bool = True) -> None:  # noqa: FBT001, FBT002
        """See TensorAwareStateDict."""
        self._slots.move_home(non_blocking=non_blocking)
