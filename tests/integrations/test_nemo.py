"""The documented calls of the NeMo adapters, over small bases with NeMo's methods."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from dist_ckpt_strategies.errors import MissingDependencyError, StrategyError
from dist_ckpt_strategies.inprocess import (
    CheckpointlessFinalizeCleanup,
    Compose,
    HPCallWrapper,
    HPWrapper,
)
from dist_ckpt_strategies.integrations import nemo
from dist_ckpt_strategies.integrations.lightning_state import LightningStateProvider
from dist_ckpt_strategies.integrations.nemo import auto_resume_class, strategy_class
from dist_ckpt_strategies.megatron.types import TENSOR_AWARE_CLASS
from dist_ckpt_strategies.recovery import CheckpointManager
from tests.support.memory_provider import MemoryProvider
from tests.support.processes import run_script

TENSOR_AWARE_MODULE = TENSOR_AWARE_CLASS.rpartition(".")[0]


class Base:
    """With the methods of NeMo's MegatronStrategy that are built upon; notes its calls."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.made_with = args, kwargs
        self.calls: list[Any] = []
        self.store: Any = None

    def setup(self, trainer: Any) -> None:
        self.calls.append("setup")

    def setup_distributed(self) -> None:
        self.calls.append(self.store)

    def load_model_state_dict(self, checkpoint: Any, strict: bool) -> None:
        self.calls.append((checkpoint, strict))

    def teardown(self) -> None:
        self.calls.append("teardown")


class Resume:
    """With AutoResume's method."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def setup(self, trainer: Any, model: Any = None) -> None:
        self.calls.append((trainer, model))


class Part:
    """Of an abort, or a callback with hooks: wants to know the trainer."""

    trainer: Any = None

    def __call__(self, state: Any) -> Any:
        return state

    def register_attributes(self, trainer: Any) -> None:
        self.trainer = trainer

    register_hooks = register_attributes


def made(*callbacks: Any) -> tuple[Any, Any]:
    part: Any = Part()
    finalize = CheckpointlessFinalizeCleanup()
    wrapper = HPWrapper(
        abort=Compose(part), finalize=finalize, checkpoint_manager=CheckpointManager()
    )
    trainer = SimpleNamespace(wrapper=HPCallWrapper(wrapper), callbacks=list(callbacks))
    return strategy_class(Base)(1, x=2), trainer


def test_setting_up_tells_every_part_of_the_trainer() -> None:
    hooked = Part()
    strategy, trainer = made(hooked)

    strategy.setup(trainer)

    wrapper = trainer.wrapper.wrapper
    assert strategy.made_with == ((1,), {"x": 2})
    assert strategy.calls == ["setup"]
    assert hooked.trainer is wrapper.finalize.trainer is wrapper.abort.instances[0].trainer
    assert strategy.get_wrapper() is trainer.wrapper
    assert not strategy.is_peft()
    trainer.callbacks.append(type("PEFT", (), {})())  # named as NeMo's
    assert strategy.is_peft()


def test_ranks_meet_over_the_base_store_under_keys_of_the_attempt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    strategy, _ = made()
    strategy.setup_distributed()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "3")
    strategy.base_store = HashStore()
    strategy.setup_distributed()

    without, store = strategy.calls
    store.set("a", "1")
    assert without is None
    assert strategy.base_store.get("attempt3/a") == b"1"


def test_a_state_from_memory_is_not_loaded_again_and_nothing_is_destroyed() -> None:
    strategy, _ = made()

    strategy.load_model_state_dict({})
    strategy.load_model_state_dict({"a": 1}, strict=False)
    strategy.teardown()

    assert strategy.calls == [({"a": 1}, False)]


def test_looking_for_a_checkpoint_is_put_off_until_it_is_forced() -> None:
    _, trainer = made()
    resume: Any = auto_resume_class(Resume)()

    resume.setup(trainer, "model")
    assert (resume.calls, trainer.fresume) == ([], resume)
    resume.setup(trainer, "model", force_setup=True)
    assert resume.calls == [(trainer, "model")]
    plain = SimpleNamespace()
    resume.setup(plain)
    assert resume.calls[1:] == [(plain, None)]


def test_neither_integrations_nor_managers_import_other_frameworks(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        "before = set(sys.modules)\n"
        "import dist_ckpt_strategies.integrations.nemo\n"
        "from dist_ckpt_strategies.local import LocalCheckpointManager\n"
        "LocalCheckpointManager('local')\n"
        "names = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "frameworks = {'nemo', 'lightning', 'pytorch_lightning', 'nvidia_resiliency_ext'}\n"
        f"print(sorted(names & frameworks), {TENSOR_AWARE_MODULE!r} in sys.modules)\n"
    )

    done = run_script(script)

    assert done.stdout == "[] False\n", done.stderr


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


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="Nothing"):
        _ = nemo.Nothing


def test_a_manager_takes_a_trainer_that_has_a_state_provider() -> None:
    trainer: Any = SimpleNamespace(state_provider=MemoryProvider({"p": {"x": torch.zeros(2)}}))
    manager = CheckpointManager()

    manager.save_checkpoint(trainer)

    assert manager.checkpointless_recovery_feasible(trainer)
    assert manager.try_checkpointless_load(trainer) is not None
    with pytest.raises(StrategyError, match="SimpleNamespace: expected a StateProvider"):
        manager.save_checkpoint(SimpleNamespace())


def test_a_strategy_that_divides_the_state_is_not_taken_for_replicas() -> None:
    """NeMo's is made from DDPStrategy; without Megatron-Core's optimizer it gets no other."""
    replicating = type("DDPStrategy", (), {})
    strategy = type("OwnStrategy", (type("MegatronStrategy", (replicating,), {}),), {})()

    with pytest.raises(StrategyError, match="OwnStrategy: expected a strategy whose ranks all"):
        LightningStateProvider(SimpleNamespace(strategy=strategy)).parts()
