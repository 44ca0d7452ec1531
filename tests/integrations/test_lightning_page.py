"""The scripts on the page of the integrations run, with real Lightning."""

import json
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("lightning.pytorch")

from dist_ckpt_strategies.cli.app import app
from tests.support.pages import ROOT, python_blocks
from tests.support.processes import finished

pytestmark = pytest.mark.slow

CHECKPOINTS, RECOVERY = python_blocks(ROOT / "docs" / "integrations.md")

TRAINING = """
from lightning.pytorch import LightningModule, seed_everything
from torch.utils.data import DataLoader, TensorDataset

class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.BatchNorm1d(2))
    def training_step(self, batch, number):
        return self.layer(batch[0]).square().mean()
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.1)

def make_loader():
    return DataLoader(TensorDataset(torch.arange(48.0).reshape(12, 4)), batch_size=2)
"""

SAVE_AND_RESUME = """
def trained(ckpt_path=None):
    seed_everything(1)
    model = Model()
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = make_trainer(accelerator="cpu", devices=2, max_steps=6, **quiet)
    trainer.fit(model, make_loader(), ckpt_path=ckpt_path)
    moments = trainer.optimizers[0].state_dict()["state"]
    return {"step": trainer.global_step, "weights": model.state_dict(), "moments": moments}

if __name__ == "__main__":
    found = trained(), trained("checkpoints/epoch=0-step=3.ckpt")
    torch.save(found, f"result{dist.get_rank()}.pt")
"""

RECOVERED = """
if __name__ == "__main__":
    import torch.distributed as dist
    train(Model, make_loader())
    print("done")
"""


def run(*command: str, cwd: Path) -> str:
    variables = {"CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}
    return finished(sys.executable, "-W", "ignore", *command, cwd=cwd, variables=variables).stdout


def test_a_trainer_resumes_from_a_checkpoint_of_packs(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(CHECKPOINTS + TRAINING + SAVE_AND_RESUME)

    run(str(script), cwd=tmp_path)

    for rank in range(2):
        straight, resumed = torch.load(tmp_path / f"result{rank}.pt", weights_only=True)
        assert straight["step"] == 6
        torch.testing.assert_close(resumed, straight, rtol=0, atol=0)
    saved = str(tmp_path / "checkpoints" / "epoch=0-step=3.ckpt")
    assert CliRunner().invoke(app, ["verify", saved]).exit_code == 0
    listed = json.loads(CliRunner().invoke(app, ["inspect", saved, "--json"]).stdout)
    assert listed["marker"]["sharded_backend"] == "safetensors"
    assert {writer for array in listed["arrays"] for writer in array["writers"]} == {0, 1}


def test_the_script_of_recovery_trains_to_its_end(tmp_path: Path) -> None:
    assert "trainer = Trainer(\n" in RECOVERY
    short = RECOVERY.replace("Trainer(\n", "Trainer(accelerator='cpu', devices=2, max_steps=4,\n")
    script = tmp_path / "train.py"
    script.write_text(f"import torch\n{TRAINING}{short}{RECOVERED}")

    launched = ("-m", "dist_ckpt_strategies.cli", "run", "--nproc", "2", str(script))
    assert run(*launched, cwd=tmp_path).count("done") == 2
