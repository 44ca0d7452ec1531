"""What a local checkpoint asks of a state dict."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence, ValuesView
from typing import Any

import torch


class TensorAwareStateDict(ABC):
    """A state dict whose tensors can be told from the rest of it.

    The names are those of NVIDIA's resiliency extension. A class of one's own needs a codec too
    (``register_state_codec``), since nothing is pickled.
    """

    @abstractmethod
    def pop_tensors(self) -> Sequence[torch.Tensor]:
        """Take the tensors out, in their order; the state is hollow then.

        Raises:
            PlanError: it is hollow already.
        """

    @property
    @abstractmethod
    def tensors(self) -> Iterator[torch.Tensor]:
        """The tensors, always in the same order.

        Raises:
            PlanError: the state is hollow.
        """

    @property
    @abstractmethod
    def is_hollow(self) -> bool:
        """Whether the tensors have been taken out, and nothing put in their place."""

    @abstractmethod
    def insert_tensors(self, tensor_data: Iterable[torch.Tensor]) -> None:
        """Put tensors into a hollow state, in the order of ``pop_tensors``.

        Raises:
            PlanError: the state is not hollow, or it is another number of tensors.
        """

    @abstractmethod
    def init_tensors(self) -> None:
        """Fill a hollow state with uninitialised tensors of the shapes, dtypes and devices it had.

        Raises:
            PlanError: the state is not hollow.
        """

    @abstractmethod
    def copy_tensors_to_cpu(self, non_blocking: bool = False) -> None:  # noqa: FBT001, FBT002
        """Replace every tensor by a copy on the CPU, and remember the device of each.

        Args:
            non_blocking: return before copies from a device are done.
        """

    @abstractmethod
    def restore_tensor_device(self, non_blocking: bool = True) -> None:  # noqa: FBT001, FBT002
        """Move every tensor back to the device that it was on.

        Args:
            non_blocking: return before copies to a device are done.
        """

    @property
    @abstractmethod
    def state_dict(self) -> Any:
        """What a training script loads: the state with its tensors in their places.

        Raises:
            PlanError: the state is hollow.
        """

    def values(self) -> ValuesView[Any]:
        """The values of the state dict's first level."""
        found: ValuesView[Any] = self.state_dict.values()
        return found
