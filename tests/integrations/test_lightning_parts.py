"""What the Lightning adapter is made of, without Lightning."""

from __future__ import annotations

from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dist_ckpt_strategies.errors import (
    MissingDependencyError,
    StrategyError,
)
from dist_ckpt_strategies.integrations.lightning_state import call_after_closure, clear_tensor_hooks
from dist_ckpt_strategies.recovery import CheckpointManager
from tests.support.memory_provider import MemoryProvider


def test_a_call_comes_after_the_closure_and_in_the_place_of_an_earlier_one() -> None:
    seen: list[str] = []
    plugin = SimpleNamespace(_after_closure=lambda: seen.append("closure"))

    call_after_closure(plugin, lambda: seen.append("first"))
    call_after_closure(plugin, lambda: seen.append("second"))
    plugin._after_closure()

    assert seen == ["closure", "second"]
    with pytest.raises(StrategyError, match="_after_closure"):
        call_after_closure(object(), lambda: None)


def test_hooks_are_taken_off_the_tensors_of_a_device() -> None:
    tensor = torch.ones(2, requires_grad=True)
    seen: list[Any] = []
    tensor.register_hook(seen.append)  # type: ignore[no-untyped-call]

    assert clear_tensor_hooks("meta") == 0
    assert clear_tensor_hooks("cpu") >= 1
    tensor.sum().backward()  # type: ignore[no-untyped-call]

    assert seen == []


def test_a_manager_takes_a_trainer_that_has_a_state_provider() -> None:
    trainer: Any = SimpleNamespace(state_provider=MemoryProvider({"p": {"x": torch.zeros(2)}}))
    manager = CheckpointManager()

    manager.save_checkpoint(trainer)

    assert manager.global_step == 0
    assert manager.checkpointless_recovery_feasible(trainer)
    assert manager.try_checkpointless_load(trainer) is not None
    with pytest.raises(StrategyError, match="SimpleNamespace: expected a StateProvider"):
        manager.save_checkpoint(SimpleNamespace())


@pytest.mark.skipif(find_spec("lightning") is not None, reason="Lightning is installed")
def test_without_lightning_the_error_says_what_to_install() -> None:
    with pytest.raises(MissingDependencyError, match="pip install lightning"):
        import dist_ckpt_strategies.integrations.lightning  # noqa: F401, PLC0415
