"""The documented calls of the NeMo adapters, over small bases with NeMo's methods."""

from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest

from dist_ckpt_strategies.errors import MissingDependencyError, StrategyError
from dist_ckpt_strategies.integrations import nemo
from dist_ckpt_strategies.integrations.lightning_state import LightningStateProvider
from dist_ckpt_strategies.integrations.nemo import strategy_class
from dist_ckpt_strategies.recovery import CheckpointManager


class Base:
    """With methods of NeMo's MegatronStrategy that are built upon; notes its calls."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def load_model_state_dict(self, checkpoint: Any, strict: bool) -> None:
        self.calls.append((checkpoint, strict))

    def teardown(self) -> None:
        self.calls.append("teardown")


def test_a_state_from_memory_is_not_loaded_again_and_nothing_is_destroyed() -> None:
    strategy: Any = strategy_class(Base)()

    strategy.load_model_state_dict({})
    strategy.load_model_state_dict({"a": 1}, strict=False)
    strategy.teardown()

    assert strategy.calls == [({"a": 1}, False)]


def test_nemos_peft_is_found_among_the_callbacks() -> None:
    strategy: Any = strategy_class(Base)()

    strategy.trainer = SimpleNamespace(callbacks=[type("PEFT", (), {})()])  # named as NeMo's

    assert strategy.is_peft()


@pytest.mark.parametrize(
    ("framework", "module", "name", "package"),
    [
        *(("nemo", "nemo", name, "'nemo_toolkit") for name in nemo.__all__),
        ("lightning", "lightning", "CheckpointlessCallback", "lightning"),
    ],
)
def test_without_the_framework_the_error_says_what_to_install(
    framework: str, module: str, name: str, package: str
) -> None:
    if find_spec(framework) is not None:
        pytest.skip(f"{framework} is installed")
    with pytest.raises(MissingDependencyError, match=f"pip install {package}"):
        getattr(import_module(f"dist_ckpt_strategies.integrations.{module}"), name)


def test_a_trainer_without_a_state_provider_is_refused() -> None:
    with pytest.raises(StrategyError, match="SimpleNamespace: expected a StateProvider"):
        CheckpointManager().save_checkpoint(SimpleNamespace())


def test_a_strategy_that_divides_the_state_is_not_taken_for_replicas() -> None:
    """NeMo's is made from DDPStrategy; without Megatron-Core's optimizer it gets no other."""
    replicating = type("DDPStrategy", (), {})
    strategy = type("OwnStrategy", (type("MegatronStrategy", (replicating,), {}),), {})()

    with pytest.raises(StrategyError, match="OwnStrategy: expected a strategy whose ranks all"):
        LightningStateProvider(SimpleNamespace(strategy=strategy)).parts()
