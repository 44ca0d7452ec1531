"""A small model of Lightning's and its training, which notes what it does in files."""

import hashlib
import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from dist_ckpt_strategies.inprocess import HPCallWrapper
from dist_ckpt_strategies.integrations.lightning import (
    CheckpointlessCallback,
    CheckpointlessCompatibleConnector,
    HPFaultInjectionCallback,
    PlannedFault,
)

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Model(LightningModule):  # type: ignore[misc]
    """Two layers with dropout; notes in a file where attempts begin, and the loss of a batch."""

    def __init__(self, lines: Path, dropout: float = 0.2, preempted_in: int | None = None) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(8, 16), nn.ReLU(), nn.Dropout(dropout), nn.LayerNorm(16), nn.Linear(16, 1)
        )
        self.lines, self.preempted_in = lines, preempted_in
        self.register_buffer("num_forwards", torch.zeros((), dtype=torch.int64))
        self.num_forwards: torch.Tensor

    def on_train_start(self) -> None:
        if hasattr(self.trainer, "wrapper"):
            report = self.trainer.wrapper.wrapper.checkpoint_manager.last_report
            self._write("start", report and report.step)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.global_rank == 1 and self.global_step == self.preempted_in:
            os.kill(os.getpid(), signal.SIGTERM)
        inputs, wanted = batch
        self.num_forwards += 1
        loss = functional.mse_loss(self.layers(inputs), wanted)
        self._write("loss", float(loss.detach()).hex())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", functional.mse_loss(self.layers(batch[0]), batch[1]), sync_dist=True)
        torch.rand(3)

    def _write(self, kind: str, value: Any) -> None:
        with self.lines.open("a") as file:
            file.write(json.dumps([kind, self.global_rank, self.global_step, value]) + "\n")

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def notes(directory: Path, kind: str) -> set[tuple[Any, ...]]:
    """Rank, step and value of all notes of a kind."""
    texts = [path.read_text() for path in directory.glob("lines*")]
    found = [json.loads(line) for text in texts for line in text.splitlines()]
    return {tuple(rest) for one, *rest in found if one == kind}


def loader(num_samples: int, *, shuffle: bool = False) -> DataLoader[Any]:
    inputs = torch.randn(num_samples, 8, generator=torch.Generator().manual_seed(5))
    return DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), 4, shuffle=shuffle)


def fit(
    model: Model,
    scratch: Path,
    *data: DataLoader[Any],
    faults: Sequence[PlannedFault] = (),
    callbacks: Sequence[Any] = (),
    call: HPCallWrapper | None = None,
    loads: bool = True,  # whether recovery loads the state; else one of the callbacks does
    **options: Any,
) -> tuple[str, int, int]:
    """Train, without recovery if there is no ``call``; the state's digest, the step, the epoch."""
    flags = CheckpointlessCallback(
        enable_inprocess=True,
        enable_checkpointless=True,
        enable_checksum=True,
        clean_lightning_module=True,
    )
    recovery = [] if call is None else [HPFaultInjectionCallback(faults, scratch), flags]
    callbacks = [*recovery, *callbacks]
    trainer: Any = Trainer(default_root_dir=scratch, callbacks=callbacks, **QUIET, **options)
    if call is not None:
        trainer.wrapper = call
        if loads:
            trainer._checkpoint_connector = CheckpointlessCompatibleConnector(trainer)
    trainer.fit(model, *data)
    return digest(model, trainer), trainer.global_step, trainer.current_epoch


def digest(model: LightningModule, trainer: Any) -> str:
    """Of weights, buffers, moments, rates, and in a wrapper the random numbers of its last vote."""
    (optimizer,) = trainer.optimizers
    found = hashlib.sha256(repr([group["lr"] for group in optimizer.param_groups]).encode())
    moments = [value for _, state in optimizer.state.items() for _, value in sorted(state.items())]
    tensors = [*model.state_dict().values(), *moments]
    if hasattr(trainer, "wrapper"):
        trainer.wrapper.wrapper.checkpoint_manager.load_rng_states()
        tensors.append(torch.rand(8))
    for tensor in tensors:
        found.update(tensor.detach().contiguous().numpy().tobytes())
    return found.hexdigest()
