"""State dicts whose tensors can be taken out and put back; names and signatures are NVRx's."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, ValuesView
from typing import Any

import torch

from dist_ckpt_strategies.device import require_plain
from dist_ckpt_strategies.errors import PlanError


class TensorAwareStateDict(ABC):
    """A state dict that holds its tensors in order or, once taken out, what they were like.

    The names are those of NVIDIA's resiliency extension. A class of one's own implements all of
    them. It is pickled without its tensors, so that a manager needs it in ``allow``.
    """

    @abstractmethod
    def pop_tensors(self) -> Sequence[torch.Tensor]:
        """Take the tensors out, in their order; the state is hollow then."""

    @property
    @abstractmethod
    def tensors(self) -> Iterable[torch.Tensor]:
        """The tensors, always in the same order."""

    @property
    @abstractmethod
    def is_hollow(self) -> bool:
        """Whether the tensors have been taken out, and none put in their place."""

    @abstractmethod
    def insert_tensors(self, tensor_data: Iterable[torch.Tensor]) -> None:
        """Put tensors into a hollow state, in the order of ``pop_tensors``."""

    @abstractmethod
    def init_tensors(self) -> None:
        """Fill a hollow state with uninitialised tensors, of the shapes and devices it had."""

    @abstractmethod
    def copy_tensors_to_cpu(self, non_blocking: bool = False) -> None:  # noqa: FBT001, FBT002
        """Replace every tensor by a copy on the CPU, and remember the device of each.

        With ``non_blocking``, copies from a device may go on.
        """

    @abstractmethod
    def restore_tensor_device(self, non_blocking: bool = True) -> None:  # noqa: FBT001, FBT002
        """Move every tensor back to the device that it was on.

        With ``non_blocking``, copies to a device may go on.
        """

    def values(self) -> ValuesView[Any]:
        """The values of the state dict's first level."""
        return vars(self).values()


class ListedTensors(TensorAwareStateDict):
    """Base of this package's classes: their tensors are a list, with ``names``.

    Methods raise a PlanError where the state is hollow and should not be, or the other way round.
    """

    def _hold(self, named: Mapping[str, torch.Tensor]) -> None:
        """Begin with these tensors; each belongs to the kind of device that it is on."""
        self.names = list(named)
        self._tensors: list[torch.Tensor] | None = list(named.values())
        self._shapes: list[tuple[torch.Size, torch.dtype]] = []
        self._devices = [tensor.device.type for tensor in self._tensors]

    def __getstate__(self) -> dict[str, Any]:
        """The pickled form, without the shapes that ``pop_tensors`` notes again."""
        return {**vars(self), "_shapes": []}

    def require_tensors(self) -> list[torch.Tensor]:
        """The tensors; PlanError if the state is hollow."""
        if self._tensors is None:
            raise PlanError("the state is hollow: call insert_tensors or init_tensors first")
        return self._tensors

    def _require_hollow(self) -> None:
        if self._tensors is not None:
            raise PlanError("the state is not hollow: call pop_tensors first")

    @property
    def tensors(self) -> Iterator[torch.Tensor]:
        """See TensorAwareStateDict."""
        return iter(self.require_tensors())

    @property
    def is_hollow(self) -> bool:
        """See TensorAwareStateDict."""
        return self._tensors is None

    def pop_tensors(self) -> Sequence[torch.Tensor]:
        """See TensorAwareStateDict."""
        tensors = self.require_tensors()
        self._shapes = [(tensor.shape, tensor.dtype) for tensor in tensors]
        self._tensors = None
        return tensors

    def insert_tensors(self, tensor_data: Iterable[torch.Tensor]) -> None:
        """See TensorAwareStateDict; PlanError if it is another number of tensors."""
        self._require_hollow()
        tensors = list(tensor_data)
        if len(tensors) != len(self._devices):
            raise PlanError(f"expected {len(self._devices)} tensors, found {len(tensors)}")
        self._tensors = tensors

    def init_tensors(self) -> None:
        """See TensorAwareStateDict."""
        self._require_hollow()
        self._tensors = [
            torch.empty(shape, dtype=dtype, device=device)
            for (shape, dtype), device in zip(self._shapes, self._devices, strict=True)
        ]

    def copy_tensors_to_cpu(self, non_blocking: bool = False) -> None:  # noqa: FBT001, FBT002
        """See TensorAwareStateDict."""
        del non_blocking
        tensors = self.require_tensors()
        for name, tensor in zip(self.names, tensors, strict=True):
            require_plain(tensor, key=name)
        self._tensors = [tensor.detach().to("cpu", copy=True) for tensor in tensors]

    def restore_tensor_device(self, non_blocking: bool = True) -> None:  # noqa: FBT001, FBT002
        """See TensorAwareStateDict."""
        self._tensors = [
            tensor if tensor.device.type == device else tensor.to(device, non_blocking=non_blocking)
            for tensor, device in zip(self.require_tensors(), self._devices, strict=True)
        ]


class TensorPlace(int):
    """Stands for the tensor of this number where a state has had it taken out."""

    __slots__ = ()


class BasicTensorAwareStateDict(ListedTensors):
    """Any nested dicts, lists and tuples; their tensors may be on the CPU and on devices.

    The caller's containers are left as they are: what is taken out and put in concerns this object
    alone. The tensors themselves are shared until ``copy_tensors_to_cpu``.
    """

    def __init__(self, state_dict: Any) -> None:
        tensors: dict[str, torch.Tensor] = {}

        def take(value: Any, place: str) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            tensors[place if place not in tensors else f"{place} ({len(tensors)})"] = value
            return TensorPlace(len(tensors) - 1)

        self._hollow = _mapped(take, state_dict, "")
        self._hold(tensors)

    @property
    def state_dict(self) -> Any:
        """The state with its tensors in their places; new containers each time."""
        tensors = self.require_tensors()

        def give(value: Any, _: str) -> Any:
            return tensors[value] if isinstance(value, TensorPlace) else value

        return _mapped(give, self._hollow, "")

    def values(self) -> ValuesView[Any]:
        """The values of the state dict's first level."""
        values: ValuesView[Any] = self.state_dict.values()
        return values


def _mapped(convert: Callable[[Any, str], Any], value: Any, where: str) -> Any:
    """The same containers with every other value converted, given its place."""

    def below(key: Any, held: Any) -> Any:
        return _mapped(convert, held, f"{where}.{key}" if where else str(key))

    if isinstance(value, dict):
        made = copy.copy(value)
        for key, held in value.items():
            dict.__setitem__(made, key, below(key, held))  # a class's own way may do more
        return made
    if type(value) in {list, tuple} or (isinstance(value, tuple) and hasattr(value, "_fields")):
        items = [below(number, held) for number, held in enumerate(value)]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return convert(value, where)
