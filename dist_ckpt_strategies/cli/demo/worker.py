"""One rank of the demonstration: ``python -m dist_ckpt_strategies.cli.demo.worker RANK TASK``."""

from __future__ import annotations

import hashlib
import math
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
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
from dist_ckpt_strategies import LocalOptions
from dist_ckpt_strategies.cli.demo.cpu_stand_ins import cpu_stand_ins
from dist_ckpt_strategies.cli.demo.model import Trainer
from dist_ckpt_strategies.cli.demo.task import (
    FULLY_RESHARDABLE,
    LOCAL_REPLICATED,
    Loading,
    RankTask,
    Role,
    local_checkpoint,
)
from dist_ckpt_strategies.cli.ranks import rank_process, task_of, write_event
from dist_ckpt_strategies.strategies.two_stage import TwoStageDataParallelLoadShardedStrategy

_Slice = tuple[tuple[int, ...], tuple[int | slice, ...], torch.Tensor]
"""Shape of a global tensor, the region of a shard in it, and the shard's elements."""


class _Rank:
    """Carries out a task on one rank. Every method is collective over the world."""

    def __init__(self, global_rank: int, task: RankTask) -> None:
        self._task = task
        self._is_first = global_rank == 0

    def run(self) -> None:
        with self._phase("build the model"):
            trainer = Trainer(self._task.training, self._task.layout)
        if self._task.role is Role.TRAIN:
            self._train(trainer)
        else:
            self._resume(trainer)

    def _train(self, trainer: Trainer) -> None:
        num_before = self._task.training.num_before_save
        self._iterate(trainer, "train", 0, num_before)
        self._report_digests(trainer)
        with self._phase("save"):
            self._save(trainer, self._task.checkpoint, num_before, self._task.backend)
        if self._task.nodes is not None:
            directory = self._task.nodes / local_checkpoint(dist.get_rank())
            directory.mkdir(parents=True)
            with self._phase("save locally"):
                self._save(trainer, directory, num_before, LOCAL_REPLICATED)
        num_after = self._task.training.num_after_save
        self._iterate(trainer, "train on", num_before, num_before + num_after)

    def _save(
        self, trainer: Trainer, directory: Path, iteration: int, backend: tuple[str, int]
    ) -> None:
        state = {**trainer.sharded_state_dict(is_loading=False), "iteration": iteration}
        metadata = trainer.content_metadata
        dist_checkpointing.save(state, str(directory), backend, content_metadata=metadata)

    def _resume(self, trainer: Trainer) -> None:
        directory, two_stage = self._task.checkpoint, None
        if self._task.loading is Loading.TWO_STAGE:
            group = parallel_state.get_data_parallel_group()
            two_stage = TwoStageDataParallelLoadShardedStrategy(group)
        with self._phase("load"):
            if self._task.loading is Loading.LOCAL and self._task.nodes is not None:
                directory = self._task.nodes / local_checkpoint(dist.get_rank())
                dist_ckpt_strategies.prepare_local_load(directory)
            state = dist_checkpointing.load(
                trainer.sharded_state_dict(is_loading=True), str(directory), two_stage
            )
            trainer.load_state_dict(state)
        times = two_stage.summarize_load_times() if two_stage is not None else None
        if times is not None:
            self._report(
                "reading",
                read_nbytes=[share.read_nbytes for share in times.shares],
                filled_nbytes=[share.filled_nbytes for share in times.shares],
            )
        self._report_digests(trainer)
        first = int(state["iteration"])
        self._iterate(trainer, "resume", first, first + self._task.training.num_after_save)

    def _iterate(self, trainer: Trainer, phase: str, first: int, end: int) -> None:
        with self._phase(phase, end - first):
            for iteration in range(first, end):
                self._report("iteration", iteration=iteration, loss=trainer.step(iteration))

    def _report_digests(self, trainer: Trainer) -> None:
        """Report the digest of every weight and optimizer state, whole and in model space."""
        with self._phase("take digests"):
            state = trainer.sharded_state_dict(is_loading=False, sharding_type=FULLY_RESHARDABLE)
            self._report("digests", digests=gather_global_digests(state))

    @contextmanager
    def _phase(self, name: str, num_iterations: int | None = None) -> Iterator[None]:
        """Report a phase; it is over when the last rank has left it."""
        self._report("begun", name=name, num_iterations=num_iterations)
        began = time.monotonic()
        yield
        dist.barrier()
        self._report("ended", name=name, seconds=time.monotonic() - began)

    def _report(self, event: str, **fields: Any) -> None:
        if self._is_first:
            write_event(self._task.scratch, event, **fields)


def gather_global_digests(sharded_state: Mapping[str, Any]) -> dict[str, str]:
    """On global rank 0 the digest of every whole tensor, by key; elsewhere nothing.

    Rank 0 receives the whole state at once; the demonstration's is small.

    Collective: world, with the same keys' shards anywhere among the ranks.

    Args:
        sharded_state: a Megatron sharded state dict; it is not changed.

    Raises:
        ValueError: the shards of a tensor do not cover it exactly once.
    """
    local = _main_shards(sharded_state)
    if dist.get_rank() != 0:
        dist.gather_object(local)
        return {}
    gathered: list[dict[str, list[_Slice]]] = [{} for _ in range(dist.get_world_size())]
    dist.gather_object(local, gathered)
    shards: dict[str, list[_Slice]] = {}
    for of_rank in gathered:
        for key, some in of_rank.items():
            shards.setdefault(key, []).extend(some)
    return {key: digest_tensor(_whole(key, some)) for key, some in sorted(shards.items())}


def _main_shards(sharded_state: Mapping[str, Any]) -> dict[str, list[_Slice]]:
    """This rank's main replicas, by key."""
    # apply_factories replaces entries of the dicts it walks through.
    state = _copied_dicts(sharded_state)
    apply_factories(state)
    found: dict[str, list[_Slice]] = {}
    for shard in nested_values(state):
        if isinstance(shard, ShardedTensor) and is_main_replica(shard.replica_id):
            # A clone, because pickling a view would send the whole buffer that it looks into.
            data = shard.data.detach().clone()
            one = (tuple(shard.global_shape), shard.global_slice(), data)
            found.setdefault(shard.key, []).append(one)
    return found


def _copied_dicts(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copied_dicts(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_copied_dicts(item) for item in value]
    return value


def _whole(key: str, shards: list[_Slice]) -> torch.Tensor:
    shape = shards[0][0]
    whole = torch.zeros(shape, dtype=shards[0][2].dtype)
    times_written = torch.zeros(shape, dtype=torch.uint8)
    for _, region, data in shards:
        whole[region] = data
        times_written[region] += 1
    if not bool((times_written == 1).all()):
        covered = int((times_written == 1).sum())
        raise ValueError(f"{key}: {covered} of {math.prod(shape)} elements are held exactly once")
    return whole


def digest_tensor(tensor: torch.Tensor) -> str:
    """The digest of a tensor's dtype, shape and bytes, in hexadecimal."""
    head = f"{tensor.dtype} {tuple(tensor.shape)} ".encode()
    body = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    digest = hashlib.blake2b(head, digest_size=16)
    digest.update(body.data)
    return digest.hexdigest()


def carry_out(global_rank: int, task: RankTask) -> None:
    """Carry out a task on one rank, over the world's process group. Collective: world."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    cliques = LocalOptions(replication_jump=1, replication_factor=2)
    dist_ckpt_strategies.register(local=cliques)
    with cpu_stand_ins():
        parallel_state.initialize_model_parallel(task.layout.tp, task.layout.pp)
        _Rank(global_rank, task).run()


def main(arguments: list[str]) -> None:
    """Run one rank.

    Args:
        arguments: the global rank, and the task.
    """
    global_rank, task = task_of(arguments)
    with rank_process(task.scratch, global_rank, task.layout.num_ranks, task.timeout_s):
        carry_out(global_rank, task)


if __name__ == "__main__":
    main(sys.argv[1:])
