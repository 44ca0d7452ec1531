"""Recovery of Megatron-Core's state together with Lightning's loops, on one rank, as with NeMo."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.utils.data import DataLoader

pl: Any = pytest.importorskip("lightning.pytorch")

from lightning.pytorch.strategies import SingleDeviceStrategy  # noqa: E402
from megatron.core import num_microbatches_calculator, parallel_state  # noqa: E402
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402

from dist_ckpt_strategies.cli.demo.cpu_stand_ins import cpu_stand_ins  # noqa: E402
from dist_ckpt_strategies.inprocess import (  # noqa: E402
    CheckpointlessFinalizeCleanup,
    Compose,
    HPAbortTorchDistributed,
    HPCallWrapper,
    HPWrapper,
)
from dist_ckpt_strategies.integrations.lightning import (  # noqa: E402
    CheckpointlessCallback,
    CheckpointlessCompatibleConnector,
    FaultPoint,
    HPFaultInjectionCallback,
    PlannedFault,
)
from dist_ckpt_strategies.integrations.nemo import auto_resume_class, strategy_class  # noqa: E402
from dist_ckpt_strategies.recovery import CheckpointManager  # noqa: E402
from tests.integrations.lightning_training import QUIET, digest  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # Lightning's advice

MICRO_BATCH, NUM_MICRO_BATCHES, NUM_SAMPLES = 2, 2, 60


class Wrapped(torch.optim.Optimizer):
    """Megatron-Core's optimizer for Lightning, as NeMo's McoreDistributedOptimizer."""

    def __init__(self, optimizer: Any) -> None:
        self.mcore_optimizer = optimizer
        self.defaults = {}

    param_groups = property(lambda self: self.mcore_optimizer.param_groups)
    state = property(lambda self: self.mcore_optimizer.state)

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        self.mcore_optimizer.step()
        return loss


class Model(pl.LightningModule):  # type: ignore[misc]
    """Draws its micro-batches itself; keeps what it has seen."""

    def __init__(self, seen: set[Any]) -> None:
        super().__init__()
        self.seen = seen

    def configure_model(self) -> None:
        config = TransformerConfig(
            num_layers=1,
            hidden_size=4,
            num_attention_heads=1,
            use_cpu_initialization=True,
            gradient_accumulation_fusion=False,
        )
        layers = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))
        wrapping = DistributedDataParallelConfig(use_distributed_optimizer=True)
        self.chunk = DistributedDataParallel(config, wrapping, layers)

    def configure_optimizers(self) -> Any:
        options = OptimizerConfig(optimizer="adam", lr=0.01, use_distributed_optimizer=True)
        mcore = get_megatron_optimizer(options, [self.chunk], use_gloo_process_groups=False)
        optimizer = Wrapped(mcore)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.7)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def training_step(self, dataloader_iter: Iterator[Any]) -> torch.Tensor:
        self.chunk.zero_grad_buffer()
        self.trainer.optimizers[0].mcore_optimizer.zero_grad()
        losses = []
        for _ in range(NUM_MICRO_BATCHES):
            batch, _, _ = next(dataloader_iter)
            loss = self.chunk(batch).square().mean()
            loss.backward()
            losses.append(loss.detach())
            self.seen.add((self.global_step, float(loss.detach()).hex()))
        self.chunk.finish_grad_sync()
        return torch.stack(losses).mean()


class Data(pl.LightningDataModule):  # type: ignore[misc]
    """Says how many samples were consumed, and begins after them, as NeMo's; unless without."""

    def __init__(self, has_state: bool) -> None:
        super().__init__()
        self.has_state, self.first = has_state, 0

    def train_dataloader(self) -> DataLoader[Any]:
        inputs: Any = torch.randn(NUM_SAMPLES, 4, generator=torch.Generator().manual_seed(5))
        starts = range(self.first, NUM_SAMPLES, MICRO_BATCH)
        batches: Any = [list(range(start, start + MICRO_BATCH)) for start in starts]
        return DataLoader(inputs, batch_sampler=batches)

    def state_dict(self) -> dict[str, Any]:
        per_step = MICRO_BATCH * NUM_MICRO_BATCHES
        return {"consumed_samples": self.trainer.global_step * per_step} if self.has_state else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.first = state["consumed_samples"]


class Strategy(SingleDeviceStrategy):  # type: ignore[misc]
    """What of NeMo's strategy matters here."""

    restore_checkpoint_after_setup = True
    store: Any = None

    def setup_environment(self) -> None:
        super().setup_environment()
        self.setup_distributed()

    def setup_distributed(self) -> None:
        store = self.store or HashStore()
        store.set("here", "")
        if not dist.is_initialized():
            dist.init_process_group("gloo", rank=0, world_size=1, store=store)
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
        num_microbatches_calculator.init_num_microbatches_calculator(0, None, 4, MICRO_BATCH, 1)

    def setup(self, trainer: Any) -> None:
        super().setup(trainer)
        self.megatron_parallel = [trainer.lightning_module.chunk]
        trainer.fit_loop._skip_backward = True


class Rates(pl.Callback):  # type: ignore[misc]
    """Has a state that the ends of batches change."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.found.append(trainer.optimizers[0].param_groups[0]["lr"])

    def state_dict(self) -> dict[str, Any]:
        return {"found": self.found}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.found = list(state["found"])


class FailingManager(CheckpointManager):
    """Raises once in a step, right after its call of ``vote`` or ``begin_update``."""

    def __init__(self, fault: tuple[int, str] | None) -> None:
        super().__init__(enable_checksum=True)
        self.fault = fault

    def vote(self) -> None:
        super().vote()
        self._reach("vote")

    def begin_update(self) -> None:
        super().begin_update()
        self._reach("begin_update")

    def _reach(self, name: str) -> None:
        if self.fault == (self.global_step or 0, name):
            self.fault = None
            raise ValueError("on purpose")


@pytest.fixture(autouse=True)
def megatron() -> Iterator[None]:
    with cpu_stand_ins():
        yield
    parallel_state.destroy_model_parallel()
    num_microbatches_calculator.destroy_num_microbatches_calculator()
    if dist.is_initialized():
        dist.destroy_process_group()


def run(
    scratch: Path,
    fault: tuple[int, str] | None = None,
    faults: tuple[PlannedFault, ...] = (),
    *,
    has_state: bool = True,
    base_store: Any = None,
) -> Any:
    """What there is at the end; where attempts began, and why not from memory; Resume's notes."""
    scratch.mkdir()
    manager = FailingManager(fault)
    seen: set[Any] = set()
    starts: list[Any] = []
    looked: list[int] = []

    class Start(pl.Callback):  # type: ignore[misc]
        """A callback and a part of the abort, told of the trainer as both."""

        def __call__(self, state: Any) -> Any:
            return state

        def register_hooks(self, trainer: Any) -> None:
            self.hooked = trainer

        def register_attributes(self, trainer: Any) -> None:
            self.told = trainer

        def on_train_start(self, trainer: Any, *_: Any) -> None:
            assert self.hooked is self.told is wrapper.finalize.trainer is trainer
            assert trainer.strategy.get_wrapper() is trainer.wrapper
            assert not trainer.strategy.is_peft()
            starts.append((trainer.global_step, str(manager.last_failure)))

    class Resume:
        """Finds nothing; notes the attempts in which it looks, 0 for a trainer without one."""

        def setup(self, trainer: Any, model: Any = None) -> None:
            wrapper = getattr(trainer, "wrapper", None)
            looked.append(wrapper.num_attempts if wrapper else 0)
            assert (model is None) == (wrapper is None)

    start = Start()

    def block(call: HPCallWrapper | None = None) -> Any:
        torch.manual_seed(3)
        flags = CheckpointlessCallback(enable_inprocess=True, enable_checkpointless=True)
        rates, strategy = Rates(), strategy_class(Strategy)(device="cpu")
        strategy.base_store = base_store
        trainer: Any = pl.Trainer(
            strategy=strategy,
            callbacks=[rates, HPFaultInjectionCallback(faults, scratch), flags, start],
            default_root_dir=scratch,
            max_steps=7,
            max_epochs=-1,
            **QUIET,
        )
        trainer._checkpoint_connector = CheckpointlessCompatibleConnector(trainer)
        model, resume = Model(seen), auto_resume_class(Resume)()
        resume.setup(trainer)
        trainer.wrapper = call
        resume.setup(trainer, model)
        trainer.fit(model, datamodule=Data(has_state))
        progress = trainer.fit_loop.epoch_loop.batch_progress.current.ready
        counts = trainer.global_step, trainer.current_epoch, progress
        return digest(model, trainer), counts, rates.found

    wrapper: Any = HPWrapper(
        abort=Compose(HPAbortTorchDistributed(), start),
        checkpoint_manager=manager,
        finalize=CheckpointlessFinalizeCleanup(),
    )
    return (wrapper(block)(), seen), starts, looked


def planned(*steps: int, point: FaultPoint) -> dict[str, Any]:
    return {"faults": tuple(PlannedFault(0, step, point) for step in steps)}


@pytest.mark.slow
def test_faults_at_the_beginning_of_steps_change_nothing(tmp_path: Path) -> None:
    store, faults = HashStore(), planned(1, 3, 6, point=FaultPoint.BATCH_START)

    undisturbed, *_ = run(tmp_path / "undisturbed")
    found, starts, looked = run(tmp_path / "faults", base_store=store, **faults)

    assert found == undisturbed
    assert [start for start, _ in starts] == [0, 1, 3, 6]
    assert looked == [0, 1, 0, 0, 0]
    assert store.check([f"attempt{number}/here" for number in range(1, 5)])


@pytest.mark.parametrize(
    ("fault", "has_state", "why"),
    [
        ({"fault": (2, "vote")}, True, "which only its trainer can complete"),
        ({"fault": (2, "begin_update")}, True, "was interrupted in its update of step 2"),
        (planned(3, point=FaultPoint.BATCH_END), True, "interrupted in its update"),
        (planned(3, point=FaultPoint.BATCH_START), False, "Data has no state_dict"),
    ],
)
@pytest.mark.slow
def test_where_no_rank_has_ended_the_step_or_the_data_has_no_state_memory_is_declined(
    fault: dict[str, Any], has_state: bool, why: str, tmp_path: Path
) -> None:
    undisturbed, *_ = run(tmp_path / "undisturbed", has_state=has_state)
    found, starts, looked = run(tmp_path / "faults", has_state=has_state, **fault)

    assert looked == [0, 1, 0, 2]
    assert starts[1][0] == 0
    assert why in starts[1][1]
    assert found == undisturbed
