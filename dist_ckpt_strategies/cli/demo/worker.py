"""One rank of the demonstration: it trains, saves or loads, and takes the state's digests."""

from __future__ import annotations

import hashlib
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedTensor,
    apply_factories,
    is_main_replica,
)

import dist_ckpt_strategies
from dist_ckpt_strategies.cli.demo.cpu_stand_ins import cpu_stand_ins
from dist_ckpt_strategies.cli.demo.model import Trainer
from dist_ckpt_strategies.cli.demo.task import FULLY_RESHARDABLE, Outcome, RankTask
from dist_ckpt_strategies.strategies.two_stage import TwoStageDataParallelLoadShardedStrategy


def carry_out(task: RankTask, _comm: object, report: Callable[..., None]) -> Outcome:
    """Carry out a task on one rank, over the world's process group. Collective: world."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist_ckpt_strategies.register()
    with cpu_stand_ins():
        parallel_state.initialize_model_parallel(task.layout.tp, task.layout.pp)
        report("build the model")
        rank = _Rank(task, report)
        (rank.resume if task.resumes else rank.train)()
    return rank.outcome


class _Rank:
    """One rank. Every method is collective over the world."""

    def __init__(self, task: RankTask, report: Callable[..., None]) -> None:
        self._task = task
        self._report = report
        self._trainer = Trainer(task.training, task.layout)
        self.outcome = Outcome()

    def train(self) -> None:
        """Train, save and train on."""
        num_before = self._task.training.num_before_save
        self._iterate("train", 0, num_before)
        self._take_digests()
        with self._step("save"):
            state = self._trainer.sharded_state_dict(is_loading=False)
            dist_checkpointing.save(
                {**state, "iteration": num_before},
                str(self._task.checkpoint),
                ("zarr", 1),
                content_metadata=self._trainer.content_metadata,
            )
        self._iterate("train on", num_before, self._task.training.num_after_save)

    def resume(self) -> None:
        """Load and train on."""
        two_stage = None
        if self._task.two_stage:
            group = parallel_state.get_data_parallel_group()
            two_stage = TwoStageDataParallelLoadShardedStrategy(group)
        with self._step("load"):
            wanted = self._trainer.sharded_state_dict(is_loading=True)
            state = dist_checkpointing.load(wanted, str(self._task.checkpoint), two_stage)
            self._trainer.load_state_dict(state)
        self._take_digests()
        self._iterate("resume", int(state["iteration"]), self._task.training.num_after_save)

    def _iterate(self, step: str, first: int, count: int) -> None:
        self.outcome.iterations[step] = range(first, first + count)
        with self._step(step):
            for iteration in range(first, first + count):
                loss = self._trainer.step(iteration)
                self.outcome.losses[iteration] = loss
                self._report(f"iteration {iteration}, loss {loss:.3f}")

    def _take_digests(self) -> None:
        """Of every weight and optimizer state, whole and in model space."""
        self._report("take digests")
        state = self._trainer.sharded_state_dict(is_loading=False, sharding_type=FULLY_RESHARDABLE)
        self.outcome.digests = _gather_digests(state)

    @contextmanager
    def _step(self, name: str) -> Iterator[None]:
        """Report a step; it is over when the last rank has left it."""
        self._report(name)
        began = time.monotonic()
        yield
        dist.barrier()
        self.outcome.seconds[name] = time.monotonic() - began
        self._report(name, seconds=self.outcome.seconds[name])


def _gather_digests(sharded_state: Mapping[str, Any]) -> dict[str, str]:
    """On rank 0 the digest of every whole tensor, by key; elsewhere nothing.

    Rank 0 receives the whole state at once; the demonstration's is small. Collective: world.

    Raises:
        ValueError: the shards of a tensor do not cover it exactly once.
    """
    # apply_factories replaces entries of the dicts it walks through.
    state = _copied_dicts(sharded_state)
    apply_factories(state)
    # Clones, because pickling a view would send the whole buffer that it looks into.
    own = [
        (shard.key, tuple(shard.global_shape), shard.global_slice(), shard.data.detach().clone())
        for shard in nested_values(state)
        if isinstance(shard, ShardedTensor) and is_main_replica(shard.replica_id)
    ]
    gathered: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(own, gathered)
    wholes: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for key, shape, region, data in (shard for of_rank in gathered or () for shard in of_rank):
        if key not in wholes:
            counts = torch.zeros(shape, dtype=torch.uint8)
            wholes[key] = torch.zeros(shape, dtype=data.dtype), counts
        whole, times_written = wholes[key]
        whole[region] = data
        times_written[region] += 1
    for key, (whole, times_written) in wholes.items():
        covered = int((times_written == 1).sum())
        if covered != math.prod(whole.shape):
            raise ValueError(f"{key}: {covered} of {whole.numel()} elements are held exactly once")
    return {key: digest_tensor(whole) for key, (whole, _) in sorted(wholes.items())}


def _copied_dicts(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copied_dicts(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_copied_dicts(item) for item in value]
    return value


def digest_tensor(tensor: torch.Tensor) -> str:
    """The digest of a tensor's dtype, shape and bytes, in hexadecimal."""
    head = f"{tensor.dtype} {tuple(tensor.shape)} ".encode()
    body = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    digest = hashlib.blake2b(head, digest_size=16)
    digest.update(body.data)
    return digest.hexdigest()
