"""One rank of a Lightning training with faults: ``lightning_job.py TASK``."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from dist_ckpt_strategies.inprocess import (
    CheckpointlessAbortManager,
    CheckpointlessFinalizeCleanup,
    CudaHealthCheck,
    HPCallWrapper,
    HPWrapper,
)
from dist_ckpt_strategies.inprocess.train_utils import wait_rank
from dist_ckpt_strategies.integrations.lightning import (
    CheckpointlessCallback,
    CheckpointlessCompatibleConnector,
    FaultKind,
    FaultPoint,
    HPFaultInjectionCallback,
    PlannedFault,
)
from dist_ckpt_strategies.recovery import CheckpointManager

_GROUP_TIMEOUT_S = 60
_NUM_SAMPLES = 80
_BATCH = 4
QUIET: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Model(LightningModule):  # type: ignore[misc]
    """Two layers with dropout; writes down the loss of every batch."""

    def __init__(self, losses: Path) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.LayerNorm(16), nn.Linear(16, 1)
        )
        self.losses = losses
        self.register_buffer("num_forwards", torch.zeros((), dtype=torch.int64))
        self.num_forwards: torch.Tensor

    def on_train_start(self) -> None:
        if not hasattr(self.trainer, "wrapper"):
            return
        report = self.trainer.wrapper.wrapper.checkpoint_manager.last_report
        line = ["start", self.global_rank, self.global_step, report and report.step]
        self._write(line)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        inputs, wanted = batch
        self.num_forwards += 1
        loss = functional.mse_loss(self.layers(inputs), wanted)
        self._write(["loss", self.global_rank, self.global_step, float(loss.detach()).hex()])
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", functional.mse_loss(self.layers(batch[0]), batch[1]), sync_dist=True)
        torch.rand(3)

    def _write(self, line: list[Any]) -> None:
        with self.losses.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def loader(*, shuffle: bool, num_samples: int = _NUM_SAMPLES) -> DataLoader[Any]:
    rng = torch.Generator().manual_seed(5)
    inputs = torch.randn(num_samples, 8, generator=rng)
    return DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), _BATCH, shuffle=shuffle)


def main(task: Path) -> None:
    torch.set_num_threads(1)
    fields = json.loads(task.read_text())
    wait_rank()
    manager = CheckpointManager(timeout_s=_GROUP_TIMEOUT_S)
    wrapper = HPWrapper(
        abort=CheckpointlessAbortManager.get_default_checkpointless_abort(),
        finalize=CheckpointlessFinalizeCleanup(),
        health_check=CudaHealthCheck(),
        checkpoint_manager=manager,
        abort_timeout=20.0,
        progress_timeout_s=fields["progress_timeout_s"],
        max_attempts=len(fields["faults"]) + 2,
    )
    wrapper(train)(task.parent, fields, manager)


def train(
    scratch: Path,
    fields: dict[str, Any],
    manager: CheckpointManager,
    call: HPCallWrapper | None = None,
) -> None:
    """The block: from the trainer to the last step."""
    rank = int(os.environ["RANK"])
    torch.manual_seed(7 + rank)
    faults = [
        PlannedFault(one["rank"], one["step"], FaultPoint(one["point"]), FaultKind(one["kind"]))
        for one in fields["faults"]
    ]
    trainer: Any = Trainer(
        accelerator="cpu",
        devices=4,
        strategy=DDPStrategy(
            process_group_backend="interruptible_gloo",
            find_unused_parameters=True,  # the same buckets in the first step of every attempt
            timeout=timedelta(seconds=_GROUP_TIMEOUT_S),
        ),
        callbacks=[
            HPFaultInjectionCallback(faults, scratch),
            CheckpointlessCallback(
                enable_inprocess=True,
                enable_checkpointless=True,
                enable_checksum=True,
                clean_lightning_module=True,
            ),
        ],
        **fields["trainer"],
        gradient_clip_val=0.5,
        default_root_dir=scratch,
        **QUIET,
    )
    trainer._checkpoint_connector = CheckpointlessCompatibleConnector(trainer)
    trainer.wrapper = call
    model = Model(scratch / f"lines{rank}-{os.getpid()}.jsonl")
    trainer.fit(model, loader(shuffle=True), loader(shuffle=False))
    result = {
        "state": digest(model, trainer),
        "step": trainer.global_step,
        "epoch": trainer.current_epoch,
    }
    (scratch / f"final{rank}.json").write_text(json.dumps(result))


def digest(model: Model, trainer: Any) -> str:
    """Of weights, buffers, moments, rates, and in a wrapper the random numbers of its last vote."""
    found = hashlib.sha256()
    for tensor in model.state_dict().values():
        found.update(tensor.contiguous().numpy().tobytes())
    for state in trainer.optimizers[0].state.values():
        for _, value in sorted(state.items()):
            found.update(value.contiguous().numpy().tobytes())
    found.update(repr([group["lr"] for group in trainer.optimizers[0].param_groups]).encode())
    if hasattr(trainer, "wrapper"):
        trainer.wrapper.wrapper.checkpoint_manager.load_rng_states()
        found.update(torch.rand(8).numpy().tobytes())
    return found.hexdigest()


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    main(Path(sys.argv[1]))
