"""The training of the seams over torch.distributed.checkpoint."""

from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from dist_ckpt_strategies.inprocess import HPCallWrapper
from dist_ckpt_strategies.integrations import dcp as packs
from tests.seams.rank import SAVE_EVERY, SHARED, Seams, batch, make_model, run


class Sharded:
    """FSDP's shards, which no other rank holds; without a manager DCP's own calls save them."""

    def __init__(self, seams: Seams) -> None:
        self.seams, self.number = seams, 0
        torch.manual_seed(1)
        self.model = make_model()
        fully_shard(self.model, mesh=init_device_mesh("cpu", (2,)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        torch.manual_seed(100 + seams.rank)
        self.random = f"random {seams.rank}"
        self.tiers = None if seams.saves == "none" else seams.tiers()

    def states(self) -> dict[str, Any]:
        weights, moments = get_state_dict(self.model, self.optimizer)
        return {"model": weights, "optimizer": moments, self.random: torch.get_rng_state()}

    def load(self) -> None:
        target = self.states()
        self.layout = packs.shard_layout(target)
        if self.tiers is None:
            if done := sorted(SHARED.glob("steps/*/metadata.json")):
                packs.load(target, done[-1].parent)
                self.number = int(done[-1].parent.name)
        elif loaded := self.tiers.load_latest(self.layout.shards(target)):
            self.layout.restore(target, loaded.state)
            self.number = loaded.iteration
        self.seams.note("load", self.number)
        if self.number:
            both = {"model_state_dict": target["model"], "optim_state_dict": target["optimizer"]}
            set_state_dict(self.model, self.optimizer, **both)
            torch.set_rng_state(target[self.random])

    def step(self) -> None:
        self.seams.reach(self.number, "begin")
        inputs, targets = batch(self.number, self.seams.rank)
        loss = (self.model(inputs) - targets).square().mean()
        loss.backward()
        self.seams.note("loss", self.number, float(loss.detach()).hex())
        self.seams.reach(self.number, "gradients")
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.number += 1

    def save(self) -> None:
        if self.tiers is not None:
            self.tiers.save(self.number, lambda: self.layout.shards(self.states()))
            self.seams.note_saved(self.tiers)
        elif self.number % SAVE_EVERY == 0:
            packs.save(self.states(), SHARED / "steps" / f"{self.number:07d}")
            self.seams.note("saved", self.number)


def train(seams: Seams, call: HPCallWrapper | None = None) -> None:
    seams.join()
    run(seams, Sharded(seams))
