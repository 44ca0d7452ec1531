"""A state class that was written for NVRx is saved and loaded by our manager."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from dist_ckpt_strategies import local
from dist_ckpt_strategies.local import LocalCheckpointManager

nvrx: Any = pytest.importorskip(
    "nvidia_resiliency_ext.checkpointing.local.base_state_dict",
    reason="needs nvidia-resiliency-ext: tox -e nvrx",
)


class _Own:
    """The members that NVRx asks for, and no others."""

    def __init__(self, weights: torch.Tensor, name: str) -> None:
        self.name = name
        self._weights: torch.Tensor | None = weights
        self._like = torch.empty_like(weights, device="meta")

    def pop_tensors(self) -> Sequence[torch.Tensor]:
        assert self._weights is not None
        taken, self._weights = [self._weights], None
        self._like = torch.empty(taken[0].shape, dtype=taken[0].dtype, device="meta")
        return taken

    @property
    def tensors(self) -> Iterable[torch.Tensor]:
        assert self._weights is not None
        return [self._weights]

    @property
    def is_hollow(self) -> bool:
        return self._weights is None

    def insert_tensors(self, tensor_data: Iterable[torch.Tensor]) -> None:
        (self._weights,) = tensor_data

    def init_tensors(self) -> None:
        self._weights = torch.empty_like(self._like, device="cpu")

    def copy_tensors_to_cpu(self, non_blocking: bool = False) -> None:  # noqa: FBT002
        (weights,) = self.tensors
        self._weights = weights.to("cpu", non_blocking=non_blocking, copy=True)

    def restore_tensor_device(self, non_blocking: bool = True) -> None:  # noqa: FBT002
        pass


class OfOurs(_Own, local.TensorAwareStateDict):
    """As it is after the import was changed."""


class OfTheirs(_Own, nvrx.TensorAwareStateDict):  # type: ignore[misc]
    """As it was."""


@pytest.mark.parametrize("kind", [OfOurs, OfTheirs])
@pytest.mark.parametrize("is_async", [False, True])
def test_it_comes_back_as_it_was(kind: Any, is_async: bool, tmp_path: Path) -> None:
    manager = LocalCheckpointManager(tmp_path, allow=[kind])
    state = kind(torch.arange(6.0).reshape(2, 3), "mine")
    (before,) = state.tensors
    request = manager.save(state, 5, is_async)
    if request is not None:
        request.wait(30)
    loaded, _ = manager.load()

    assert next(iter(state.tensors)) is before
    assert type(loaded) is kind
    assert loaded.name == "mine"
    assert torch.equal(next(iter(loaded.tensors)), before)
