"""The training of the seams as a loop of one's own."""

from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

import dist_ckpt_strategies as package  # imports a name on first use: some take long
from dist_ckpt_strategies import local
from dist_ckpt_strategies.errors import CheckpointNotFoundError
from dist_ckpt_strategies.inprocess import HPCallWrapper
from dist_ckpt_strategies.recovery import TorchStateProvider
from tests.seams.rank import SAVE_EVERY, Seams, batch, make_model, run


class Plain:
    """Recovery from memory, if the cell has it; else from the manager, or the nodes' disks."""

    def __init__(self, seams: Seams) -> None:
        self.seams = seams
        torch.manual_seed(1)
        self.model = make_model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.state = TorchStateProvider(self.model, self.optimizer)
        torch.manual_seed(100 + seams.rank)
        self.tiers = seams.tiers() if seams.saves == "manager" else None
        self.disk = seams.local() if seams.saves == "local" else None

    @property
    def number(self) -> int:
        return self.state.step

    def load(self) -> None:
        """From memory, else from what was saved last, else none."""
        memory, tier, found = self.seams.memory, "begin", None
        if self.tiers is not None:
            loaded = self.tiers.load_latest(self.sharded(), memory and self.state)
            if loaded is not None:
                tier, found = str(loaded.tier), loaded.state
        elif memory is not None and memory.try_checkpointless_load(self.state) is not None:
            tier = "memory"
        elif self.disk is not None:
            with suppress(CheckpointNotFoundError):
                loaded = package.load_latest(self.disk, [], lambda _: None)
                tier, found = "local", loaded.state.state_dict
        if tier not in {"begin", "memory"}:
            self.take(found)
        self.seams.note(tier, self.state.step)
        if memory is not None:
            memory.track(self.state)

    def take(self, found: Any) -> None:
        with torch.no_grad():
            for part, tensors in self.state.parts().items():
                for name, tensor in tensors.items():
                    tensor.copy_(found["parts"][part][name])
        self.state.load_objects(found["objects"])
        self.state.set_step(found["step"])
        torch.set_rng_state(found["random"])

    def local(self) -> dict[str, Any]:
        parts = {
            part: {name: tensor.detach() for name, tensor in tensors.items()}
            for part, tensors in self.state.parts().items()
        }
        common = {"objects": self.state.objects(), "step": self.state.step}
        return {"parts": parts, "random": torch.get_rng_state(), **common}

    def sharded(self) -> dict[str, Any]:
        from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor  # noqa: PLC0415

        state, rank = self.local(), self.seams.rank
        state["random"] = ShardedObject("random", state["random"], (2,), (rank,))
        for part, tensors in state["parts"].items():
            for name, tensor in tensors.items():
                key = f"{part}/{name}"
                tensors[name] = ShardedTensor.from_rank_offsets(key, tensor, replica_id=rank)
        return state

    def step(self) -> None:
        seams, state, memory = self.seams, self.state, self.seams.memory
        number = state.step
        if memory is not None:
            memory.begin_step()
        seams.reach(number, "begin")
        inputs, targets = batch(number, seams.rank)
        self.optimizer.zero_grad()
        loss = (self.model(inputs) - targets).square().mean()
        loss.backward()
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad)
        seams.note("loss", number, float(loss.detach()).hex())
        seams.reach(number, "gradients")
        if memory is not None:
            memory.vote()
            with memory.updating():
                state.apply_update()
            memory.end_step()
        else:
            state.apply_update()
            state.set_step(number + 1)

    def save(self) -> None:
        step = self.state.step
        if self.tiers is not None:
            self.tiers.save(step, self.sharded)
            self.seams.note_saved(self.tiers)
        elif self.disk is not None and step % SAVE_EVERY == 0:
            self.disk.save(local.BasicTensorAwareStateDict(self.local()), step)
            self.seams.note("saved", step)


def train(seams: Seams, call: HPCallWrapper | None = None) -> None:
    seams.join()
    run(seams, Plain(seams))
