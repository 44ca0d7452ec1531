"""A training with real Lightning and a manager of its checkpoints: preempted, and continued."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning.pytorch")

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dist_ckpt_strategies import ManagerOptions, SavePolicy, TieredCheckpointManager
from dist_ckpt_strategies.integrations.lightning import TieredCheckpointCallback
from tests.support.ranks import RankDiedError, run_processes

NUM_STEPS = 9
"""Epochs of four batches."""


class Model(LightningModule):  # type: ignore[misc]
    """Writes down its losses; one rank gets a signal in a step."""

    def __init__(self, preempted_in: int | None) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 1))
        self.register_buffer("num_forwards", torch.zeros((), dtype=torch.int64))
        self.num_forwards: torch.Tensor
        self.losses: list[tuple[int, float]] = []
        self.preempted_in = preempted_in

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.global_rank == 1 and self.global_step == self.preempted_in:
            os.kill(os.getpid(), signal.SIGTERM)
        self.num_forwards += 1
        wanted = batch[0].sum(1, keepdim=True)
        loss: torch.Tensor = (self.layers(batch[0]) - wanted).square().mean()
        self.losses.append((self.global_step, float(loss.detach())))
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def trains(rank: int, root: str, preempted_in: int | None) -> Any:
    """Body of a rank: what is in its way is all in the callback."""
    for name in ("RANK", "LOCAL_RANK", "GROUP_RANK"):
        os.environ[name] = str(rank)
    os.environ |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}
    torch.manual_seed(rank)
    policy = SavePolicy(every_steps=2, keep_last=2)
    manager = TieredCheckpointManager(root, policy=policy, options=ManagerOptions(timeout_s=60))
    callback = TieredCheckpointCallback(manager)
    data = torch.randn(16, 4, generator=torch.Generator().manual_seed(5))
    model = Model(preempted_in)
    trainer: Any = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(find_unused_parameters=True),
        callbacks=[callback],
        max_steps=NUM_STEPS,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(TensorDataset(data), 2, shuffle=True))
    found = callback.loaded
    moments = [list(one.values()) for one in trainer.optimizers[0].state.values()]
    rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
    state = [model.state_dict(), moments, rates, trainer.global_step, trainer.current_epoch]
    return found and found.iteration, model.losses, state


@pytest.mark.multiprocess
@pytest.mark.timeout(240)
def test_a_preempted_training_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    first = run_processes(2, trains, str(tmp_path / "run"), 4)
    saved = TieredCheckpointManager(tmp_path / "run").all_steps()
    second = run_processes(2, trains, str(tmp_path / "run"), None)
    undisturbed = run_processes(2, trains, str(tmp_path / "undisturbed"), None)

    assert [isinstance(one, RankDiedError) and one.exit_code for one in first] == [143, 143]
    assert saved[-1] == 5  # in the second epoch
    for one, whole in zip(second, undisturbed, strict=True):
        assert (one[0], whole[0]) == (5, None)
        assert one[1] == whole[1][5:]
        assert torch.equal(torch.tensor(_flat(one[2])), torch.tensor(_flat(whole[2])))
    assert TieredCheckpointManager(tmp_path / "run").all_steps() == [6, 8]


def _flat(value: Any) -> list[float]:
    if isinstance(value, dict | list):
        values = value.values() if isinstance(value, dict) else value
        return [number for one in values for number in _flat(one)]
    return torch.as_tensor(value).double().flatten().tolist()
