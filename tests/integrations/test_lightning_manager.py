"""A training with real Lightning and a manager of its checkpoints: preempted, and continued."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning.pytorch")

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy

from dist_ckpt_strategies import ManagerOptions, SavePolicy, TieredCheckpointManager
from dist_ckpt_strategies.integrations.lightning import TieredCheckpointCallback
from tests.integrations import lightning_job
from tests.support.ranks import RankDiedError, run_processes

NUM_STEPS = 9
"""Epochs of four batches."""


class Model(lightning_job.Model):
    """One rank gets a signal in a step."""

    preempted_in: int | None = None

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.global_rank == 1 and self.global_step == self.preempted_in:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().training_step(batch, batch_idx)


def trains(rank: int, root: str, preempted_in: int | None) -> Any:
    """Body of a rank: what is in its way is all in the callback."""
    for name in ("RANK", "LOCAL_RANK", "GROUP_RANK"):
        os.environ[name] = str(rank)
    os.environ |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}
    torch.manual_seed(rank)
    policy = SavePolicy(every_steps=2, keep_last=2)
    manager = TieredCheckpointManager(root, policy=policy, options=ManagerOptions(timeout_s=60))
    callback = TieredCheckpointCallback(manager)
    model: Any = Model(Path(root).with_name(f"losses{rank}"))
    model.losses.unlink(missing_ok=True)
    model.preempted_in = preempted_in
    model.layers[2].p = 0.0  # random numbers are not in these checkpoints
    trainer: Any = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(find_unused_parameters=True),
        callbacks=[callback],
        max_steps=NUM_STEPS,
        max_epochs=-1,
        **lightning_job.QUIET,
    )
    trainer.fit(model, lightning_job.loader(shuffle=True, num_samples=32))
    found = callback.loaded
    state = lightning_job.digest(model, trainer), trainer.global_step, trainer.current_epoch
    return found and found.iteration, model.losses.read_text().splitlines(), state


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
        assert one[2] == whole[2]
    assert TieredCheckpointManager(tmp_path / "run").all_steps() == [6, 8]
