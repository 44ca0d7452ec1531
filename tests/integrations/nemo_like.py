"""A training of Lightning's with Megatron-Core's optimizer, in the way of NeMo, on one rank."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.strategies import SingleDeviceStrategy
from megatron.core import num_microbatches_calculator, parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.utils.data import DataLoader

from dist_ckpt_strategies.recovery import CheckpointManager

MICRO_BATCH = 2
NUM_MICRO_BATCHES = 2
CONFIG: dict[str, Any] = {
    "num_layers": 1,
    "hidden_size": 4,
    "num_attention_heads": 1,
    "use_cpu_initialization": True,
    "gradient_accumulation_fusion": False,
}


class Layers(MegatronModule):  # type: ignore[misc]
    """Two, with dropout."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config=config)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layers(inputs)
        return found


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


class Model(LightningModule):  # type: ignore[misc]
    """Draws its micro-batches itself; keeps what it has seen."""

    def __init__(self, seen: list[Any]) -> None:
        super().__init__()
        self.seen = seen

    def configure_model(self) -> None:
        config = TransformerConfig(**CONFIG)
        self.chunk = DistributedDataParallel(
            config, DistributedDataParallelConfig(use_distributed_optimizer=True), Layers(config)
        )

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
            self.seen.append((self.global_step, float(loss.detach()).hex()))
        self.chunk.finish_grad_sync()
        return torch.stack(losses).mean()


class Batches:
    """A sampler of micro-batches that begins after those that were consumed, as NeMo's do."""

    def __init__(self, num_samples: int, consumed_samples: int) -> None:
        self.num_samples, self.consumed_samples = num_samples, consumed_samples

    def __len__(self) -> int:
        return self.num_samples // MICRO_BATCH

    def __iter__(self) -> Iterator[list[int]]:
        for start in range(self.consumed_samples, self.num_samples, MICRO_BATCH):
            yield list(range(start, start + MICRO_BATCH))


class Data(LightningDataModule):  # type: ignore[misc]
    """Says how many samples were consumed, as NeMo's, unless it has no state."""

    def __init__(self, num_samples: int, has_state: bool) -> None:
        super().__init__()
        self.num_samples, self.has_state = num_samples, has_state
        self.first = 0

    def train_dataloader(self) -> DataLoader[Any]:
        inputs = torch.randn(self.num_samples, 4, generator=torch.Generator().manual_seed(5))
        batches: Any = Batches(self.num_samples, self.first)
        return DataLoader(inputs, batch_sampler=batches)  # type: ignore[arg-type]

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
        if not dist.is_initialized():
            dist.init_process_group("gloo", rank=0, world_size=1, store=HashStore())
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
        num_microbatches_calculator.init_num_microbatches_calculator(0, None, 4, MICRO_BATCH, 1)

    def setup(self, trainer: Any) -> None:
        super().setup(trainer)
        self.megatron_parallel = [trainer.lightning_module.chunk]
        trainer.fit_loop._skip_backward = True


class Counter(Callback):  # type: ignore[misc]
    """Has a state that the ends of batches change."""

    def __init__(self) -> None:
        self.rates: list[float] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    def state_dict(self) -> dict[str, Any]:
        return {"rates": self.rates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rates = list(state["rates"])


class FailingManager(CheckpointManager):
    """Raises at points between the vote and the end of the batch; at each once.

    Args:
        faults: step and point: ``voted`` or ``updating``.
    """

    def __init__(self, faults: set[tuple[int, str]]) -> None:
        super().__init__(enable_checksum=True)
        self.faults = set(faults)

    def vote(self) -> None:
        super().vote()
        self._reach("voted")

    def begin_update(self) -> None:
        super().begin_update()
        self._reach("updating")

    def _reach(self, point: str) -> None:
        here = (self.global_step or 0, point)
        if here in self.faults:
            self.faults.remove(here)
            raise ValueError(f"on purpose: {here}")


def digest(trainer: Any) -> str:
    """Of tensors, objects but Lightning's totals of epochs, and the next random numbers."""
    found = hashlib.sha256()
    provider = trainer.state_provider
    for _, tensors in sorted(provider.parts().items()):
        for name, tensor in sorted(tensors.items()):
            found.update(name.encode() + tensor.detach().contiguous().numpy().tobytes())
    objects = provider.objects()
    of_step = [objects[name] for name in ("optimizer", "schedules", "callbacks", "datamodule")]
    found.update(repr(of_step).encode())
    trainer.wrapper.wrapper.checkpoint_manager.load_rng_states()
    found.update(torch.rand(8).numpy().tobytes())
    return found.hexdigest()
