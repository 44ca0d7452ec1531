"""The training of the seams as a loop of one's own, and over torch.distributed.checkpoint."""

import time
from contextlib import nullcontext, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from dist_ckpt_strategies import load_latest
from dist_ckpt_strategies.errors import CheckpointNotFoundError
from dist_ckpt_strategies.inprocess import HPCallWrapper
from dist_ckpt_strategies.integrations import dcp as packs
from dist_ckpt_strategies.local import BasicTensorAwareStateDict
from dist_ckpt_strategies.recovery import TorchStateProvider
from tests.seams.rank import (
    NUM_STEPS,
    PACE_S,
    SAVE_EVERY,
    SHARED,
    Seams,
    batch,
    digest,
    make_model,
    moments_of,
)


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
                tier, found = "local", load_latest(self.disk, [], lambda _: None).state.state_dict
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
            self.disk.save(BasicTensorAwareStateDict(self.local()), step)
            self.seams.note("saved", step)


def plain(seams: Seams, call: HPCallWrapper | None = None) -> None:
    seams.join()
    _run(seams, Plain(seams))


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


def dcp(seams: Seams, call: HPCallWrapper | None = None) -> None:
    seams.join()
    _run(seams, Sharded(seams))


def _run(seams: Seams, training: Any) -> None:
    with training.tiers or nullcontext():
        training.load()
        while training.number < NUM_STEPS:
            training.step()
            training.save()
            seams.reach(training.number - 1, "end")
            time.sleep(PACE_S)
    tensors = [*training.model.parameters(), *moments_of(training.optimizer), torch.get_rng_state()]
    seams.note("final", NUM_STEPS, digest(*tensors))
