"""Local checkpoints with what was written for NVRx: states, queues and calls."""

import inspect
import pickle
from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from dist_ckpt_strategies import local
from dist_ckpt_strategies.local import BasicTensorAwareStateDict, LocalCheckpointManager
from tests.support.kept import own_parameters, require_understood

nvrx: Any = pytest.importorskip(
    "nvidia_resiliency_ext.checkpointing.local.base_state_dict",
    reason="needs nvidia-resiliency-ext",
)
AsyncRequest: Any = import_module(
    "nvidia_resiliency_ext.checkpointing.async_ckpt.core"
).AsyncRequest
"""Found by its name here, as in the module of a queue."""


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


def test_a_queue_that_converts_nothing_gets_a_request_of_its_own_class(tmp_path: Path) -> None:
    manager = LocalCheckpointManager(tmp_path)
    state = BasicTensorAwareStateDict({"w": torch.ones(3)})
    saved = manager.save(state, 1, is_async=True)
    assert saved is not None
    assert not isinstance(saved, AsyncRequest)
    request = saved.freeze()._replace(call_idx=1)
    assert isinstance(request, AsyncRequest)
    pickle.loads(pickle.dumps(request._replace(finalize_fns=[]))).async_fn(*request.async_fn_args)
    request.execute_finalize_fns(validate_matching_call_idx=False)

    assert saved.done()
    assert [path.suffix for path in tmp_path.rglob("iter_*")] == [".safetensors"]
    assert not Path(request.async_fn_args[0]).exists()


MODULES = {
    "BasicTensorAwareStateDict": "basic_state_dict",
    "CliqueReplicationStrategy": "replication.strategies",
    "ExchangePlan": "replication.group_utils",
    "LazyCliqueReplicationStrategy": "replication.strategies",
    "LazyReplicationStrategyBuilder": "replication.strategies",
    "LocalCheckpointManager": "ckpt_managers.local_manager",
    "ReplicationStrategy": "replication.strategies",
    "TensorAwareStateDict": "base_state_dict",
}
LEFT_OUT = {
    "ExchangePlan": {"plan"},  # ours is frozen
    "LocalCheckpointManager": {"rank"},  # of no documented use
}


def members_of(cls: Any) -> set[str]:
    return {name for name, _ in inspect.getmembers(cls) if not name.startswith("_")}


@pytest.mark.parametrize("name", MODULES)
def test_every_public_member_is_there_with_the_parameters_it_had(name: str) -> None:
    module = import_module(f"nvidia_resiliency_ext.checkpointing.local.{MODULES[name]}")
    ours, theirs = getattr(local, name), getattr(module, name)
    for member in members_of(theirs) - LEFT_OUT.get(name, set()):
        own, their = getattr(ours, member), getattr(theirs, member)
        if callable(their) and member != "retrieve_execute":
            require_understood(own, own_parameters(their))
    if name != "ExchangePlan":
        require_understood(ours, own_parameters(theirs))
