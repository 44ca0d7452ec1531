"""The training of the seams as Lightning's: a trainer in each attempt."""

import os
import time
from datetime import timedelta
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader, Dataset

from dist_ckpt_strategies.inprocess import HPCallWrapper
from dist_ckpt_strategies.integrations.lightning import (
    CheckpointlessCallback,
    CheckpointlessCompatibleConnector,
    TieredCheckpointCallback,
)
from tests.integrations.lightning_training import QUIET
from tests.seams.rank import (
    LIMIT_S,
    NUM_STEPS,
    PACE_S,
    SHARED,
    Seams,
    batch,
    digest,
    make_model,
    moments_of,
)

AnyDataset: Any = Dataset
AnyModule: Any = LightningModule
AnyCallback: Any = Callback


class Batches(AnyDataset):  # type: ignore[misc]
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __len__(self) -> int:
        return NUM_STEPS // 2  # two epochs

    def __getitem__(self, number: int) -> Any:
        return batch(number, self.rank)


class Model(AnyModule):  # type: ignore[misc]
    """Without dropout: checkpoints of Lightning's have no random numbers."""

    def __init__(self, seams: Seams) -> None:
        super().__init__()
        self.layers, self.seams = make_model(0.0), seams

    def training_step(self, data: Any, number: int) -> torch.Tensor:
        inputs, targets = data
        loss: torch.Tensor = (self.layers(inputs) - targets).square().mean()
        self.seams.note("loss", self.global_step, float(loss.detach()).hex())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Notes(AnyCallback):  # type: ignore[misc]
    def __init__(self, seams: Seams, tiers: TieredCheckpointCallback | None) -> None:
        self.seams, self.tiers = seams, tiers

    def on_train_start(self, trainer: Any, *_: Any) -> None:
        self.seams.note("load", trainer.global_step)

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        self.seams.reach(trainer.global_step, "begin")

    def on_after_backward(self, trainer: Any, *_: Any) -> None:
        self.seams.reach(trainer.global_step, "gradients")

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.seams.note_saved(self.tiers and self.tiers.manager)
        self.seams.reach(trainer.global_step - 1, "end")
        time.sleep(PACE_S)


def train(seams: Seams, call: HPCallWrapper | None = None) -> None:
    torch.manual_seed(1)
    tiers = None if seams.saves == "none" else TieredCheckpointCallback(seams.tiers())
    callbacks: list[Any] = [Notes(seams, tiers)]
    if call is not None:
        keeps = seams.memory is not None
        callbacks.append(CheckpointlessCallback(enable_inprocess=True, enable_checkpointless=keeps))
    callbacks += [tiers] if tiers else []
    trainer: Any = Trainer(
        default_root_dir=SHARED,
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
        max_steps=NUM_STEPS,
        max_epochs=-1,
        use_distributed_sampler=False,
        callbacks=callbacks,
        strategy=DDPStrategy(
            process_group_backend="interruptible_gloo" if call else "gloo",
            find_unused_parameters=True,
            timeout=timedelta(seconds=LIMIT_S),
        ),
        **QUIET,
    )
    if call is not None:
        trainer.wrapper = call
        if tiers is None and seams.memory is not None:
            trainer._checkpoint_connector = CheckpointlessCompatibleConnector(trainer)
    model = Model(seams)
    trainer.fit(model, DataLoader(Batches(seams.rank), batch_size=None))
    (optimizer,) = trainer.optimizers
    seams.note("final", trainer.global_step, digest(*model.parameters(), *moments_of(optimizer)))
