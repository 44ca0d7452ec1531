"""A GPT of Megatron-Core with dropout and tied embeddings, in a parallel layout, with faults."""

import hashlib
import json
import os
import signal
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from dist_ckpt_strategies.cli.demo.main import ModelSize, ParallelLayout
from dist_ckpt_strategies.cli.demo.rank import build_model, build_optimizer, forward_step
from dist_ckpt_strategies.recovery import CheckpointManager, MegatronStateProvider
from tests.support.tensors import bits

NUM_STEPS = 7
LENGTH, VOCABULARY, MICRO_BATCH = 12, 64, 2
SIZE = ModelSize(
    num_layers=2,
    hidden=16,
    num_heads=2,
    num_query_groups=2,
    ffn_hidden=64,
    vocab=VOCABULARY,
    sequence_length=LENGTH,
    ties_embeddings=True,
)
FAULTS = (
    (1, "gradients", 3, "exception"),
    (2, "voted", 1, "kill"),
    (4, "updated", 2, "kill"),
    (5, "finished", 0, "kill"),
    (6, "gathered", 3, "exception"),
)
"""In which step, at which point of it, which rank, and what happens to it."""


@dataclass(frozen=True)
class Task:
    directory: Path
    tp: int
    pp: int
    faults: tuple[tuple[int, str, int, str], ...] = FAULTS

    def reach(self, step: int, point: str, rank: int) -> None:
        for fault in self.faults:
            if fault[:3] == (step, point, rank) and self._is_first(fault):
                if fault[3] == "exception":
                    raise ValueError("on purpose")
                os.kill(os.getpid(), signal.SIGKILL)

    def _is_first(self, fault: tuple[int, str, int, str]) -> bool:
        mark = self.directory / ".".join(map(str, fault))
        found = mark.exists()
        mark.touch()
        return not found

    def note(self, rank: int, step: int, loss: float) -> None:
        """The loss of a step, of each time that it is run."""
        with (self.directory / f"losses{rank}").open("a") as file:
            file.write(f"{step} {loss.hex()}\n")

    def losses(self) -> dict[tuple[int, int], set[str]]:
        found: dict[tuple[int, int], set[str]] = defaultdict(set)
        for path in self.directory.glob("losses*"):
            for line in path.read_text().splitlines():
                step, loss = line.split()
                found[int(path.name.removeprefix("losses")), int(step)].add(loss)
        return found


def train(task: Task, manager: CheckpointManager) -> dict[str, str]:
    """The block: from the groups to the last step; digests of all that a rank has then."""
    dist.init_process_group("interruptible_gloo", timeout=timedelta(seconds=60))
    rank = dist.get_rank()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=task.tp,
        pipeline_model_parallel_size=task.pp,
        num_distributed_optimizer_instances=2,
        create_gloo_process_groups=False,
    )
    model, optimizer = build(task)
    scheduler = schedule_of(optimizer)
    state = MegatronStateProvider([model], optimizer, scheduler, increment=1)
    source = manager.try_checkpointless_load(state)
    if source is None:  # it begins, or was interrupted before all ranks had begun
        assert not any(step for _, step in task.losses()), manager.last_failure
    manager.track(state, replica_group=parallel_state.get_data_parallel_group())
    while state.step < NUM_STEPS:
        step = state.step
        manager.begin_step()
        task.note(rank, step, gradients(model, optimizer, step, task.pp))
        task.reach(step, "gradients", rank)
        assert state.finish_gradients()
        task.reach(step, "finished", rank)
        manager.vote()
        task.reach(step, "voted", rank)
        with manager.updating():
            state.apply_update()
        task.reach(step, "updated", rank)
        state.gather_weights()
        task.reach(step, "gathered", rank)
        manager.end_step()
    return digests(state)


def build(task: Task) -> tuple[Any, Any]:
    """The model in Megatron's DDP, and its distributed optimizer in two instances."""
    gpt = build_model(SIZE, ParallelLayout(tp=task.tp, pp=task.pp))
    for module in gpt.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.1
    return build_optimizer(gpt, num_instances=2, lr=0.01, min_lr=0.001, clip_grad=1.0)


def schedule_of(optimizer: Any) -> Any:
    """As a checkpoint's load leaves it."""
    schedule = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=0.01,
        min_lr=0.001,
        lr_warmup_steps=2,
        lr_decay_steps=100,
        lr_decay_style="cosine",
        start_wd=0.01,
        end_wd=0.01,
        wd_incr_steps=NUM_STEPS,
        wd_incr_style="constant",
    )
    schedule.step(increment=3)
    return schedule


def gradients(model: Any, optimizer: Any, step: int, num_micro_batches: int) -> float:
    """Megatron's schedule over the batch of a step; the loss, 0 where another stage has it."""
    model.zero_grad_buffer()
    optimizer.zero_grad()
    losses = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=_micro_batches(step, num_micro_batches),
        model=[model],
        num_microbatches=num_micro_batches,
        seq_length=LENGTH,
        micro_batch_size=MICRO_BATCH,
        forward_only=False,
    )
    return float(sum(loss["loss"] for loss in losses))


def _micro_batches(step: int, number: int) -> Iterator[torch.Tensor]:
    """The same for all ranks of a replica, for every caller and every call."""
    generator = torch.Generator().manual_seed(1000 * step + parallel_state.get_data_parallel_rank())
    for _ in range(number):
        yield torch.randint(VOCABULARY, (MICRO_BATCH, LENGTH + 1), generator=generator)


def digests(state: MegatronStateProvider) -> dict[str, str]:
    """Of every tensor, of the objects, and of the random numbers that come next."""
    found = {
        f"{part}/{name}": hashlib.sha256(bits(tensor)).hexdigest()
        for part, tensors in state.parts().items()
        for name, tensor in tensors.items()
    }
    found["objects"] = json.dumps(state.objects(), sort_keys=True)
    found["random numbers"] = str(torch.rand(8).tolist())
    with get_cuda_rng_tracker().fork():
        found["tracked random numbers"] = str(torch.rand(8).tolist())
    return found
