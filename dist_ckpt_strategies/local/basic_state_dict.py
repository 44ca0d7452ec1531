"""State dicts of nested containers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dist_ckpt_strategies.local.tensor_slots import SlottedStateDict, TensorSlots


@dataclass(frozen=True, slots=True)
class _Slot:
    """The place of a tensor."""

    number: int


class BasicTensorAwareStateDict(SlottedStateDict):
    """Any nested dicts, lists and tuples; their tensors may be on the CPU and on devices.

    The caller's containers are left as they are: what is taken out and put in concerns this
    object alone. The tensors themselves are shared until ``copy_tensors_to_cpu``.

    Args:
        state_dict: the state.
        devices: the kind of device that each tensor belongs to, in order; by default the one
            that it is on.
    """

    def __init__(self, state_dict: Any, *, devices: Sequence[str] | None = None) -> None:
        found: list[torch.Tensor] = []

        def take(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            found.append(value)
            return _Slot(len(found) - 1)

        self._frame = _mapped(take, state_dict)
        self._slots = TensorSlots(found, devices)

    @property
    def state_dict(self) -> Any:
        """The state with its tensors in their places; new containers each time."""
        tensors = self._slots.require_tensors()
        return _mapped(lambda v: tensors[v.number] if isinstance(v, _Slot) else v, self._frame)


def _mapped(convert: Callable[[Any], Any], value: Any) -> Any:
    """The same containers with every other value converted."""
    if isinstance(value, dict):
        items = {key: _mapped(convert, held) for key, held in value.items()}
        return items if type(value) is dict else _like(value, items)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_mapped(convert, held) for held in value))
    if type(value) in {list, tuple}:
        return type(value)(_mapped(convert, held) for held in value)
    return convert(value)


def _like(value: Any, items: dict[Any, Any]) -> Any:
    """A dict of the same class with these items; its own code makes it, if it can copy itself."""
    made = value.copy()
    if type(made) is not type(value):
        made = copy.copy(value)
    for key, held in items.items():
        dict.__setitem__(made, key, held)  # a class's own way may do more, as a Counter's does
    return made
