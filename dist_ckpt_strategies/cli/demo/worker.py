"""One rank of the demonstration: ``python -m dist_ckpt_strategies.cli.demo.worker RANK TASK``."""

from __future__ import annotations

import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state

import dist_ckpt_strategies
from dist_ckpt_strategies import LocalOptions
from dist_ckpt_strategies.cli.demo.cpu_stand_ins import cpu_stand_ins
from dist_ckpt_strategies.cli.demo.digest import digest_tensor
from dist_ckpt_strategies.cli.demo.events import (
    EVENTS_NAME,
    GOLDEN,
    LOAD,
    RESUME,
    SAVE,
    SAVE_LOCALLY,
    TRAIN,
    TRAIN_ON,
    DigestsTaken,
    EventWriter,
    GoldenCompared,
    IterationDone,
    PhaseBegun,
    PhaseEnded,
    ReadingShared,
)
from dist_ckpt_strategies.cli.demo.model import Trainer, build_model
from dist_ckpt_strategies.cli.demo.ranks import end_with_parent, write_failure
from dist_ckpt_strategies.cli.demo.state import gather_global_digests
from dist_ckpt_strategies.cli.demo.task import (
    FULLY_RESHARDABLE,
    LOCAL_REPLICATED,
    Loading,
    ModelSize,
    RankTask,
    Role,
    local_checkpoint,
)
from dist_ckpt_strategies.storage.objects.pickled import read_pickle
from dist_ckpt_strategies.strategies.two_stage import TwoStageDataParallelLoadShardedStrategy

_GOLDEN_SIZE = ModelSize(
    num_layers=4,
    hidden=64,
    num_heads=4,
    num_query_groups=4,
    ffn_hidden=256,
    vocab=128,
    sequence_length=32,
)


class _Rank:
    """Carries out a task on one rank. Every method is collective over the world."""

    def __init__(self, global_rank: int, task: RankTask) -> None:
        self._task = task
        self._events = EventWriter(task.scratch / EVENTS_NAME if global_rank == 0 else None)

    def run(self) -> None:
        """Do what the task says. Collective: world."""
        with self._phase("build the model"):
            trainer = Trainer(self._task.training, self._task.layout)
        if self._task.role is Role.TRAIN:
            self._train(trainer)
        else:
            self._resume(trainer)
        if self._task.golden is not None:
            self._compare_golden(self._task.golden)

    def _train(self, trainer: Trainer) -> None:
        num_before = self._task.training.num_before_save
        self._iterate(trainer, TRAIN, 0, num_before)
        self._report_digests(trainer)
        with self._phase(SAVE):
            state = trainer.sharded_state_dict(is_loading=False)
            dist_checkpointing.save(
                {**state, "iteration": num_before},
                str(self._task.checkpoint),
                self._task.backend,
                content_metadata=trainer.content_metadata,
            )
        if self._task.nodes is not None:
            self._save_locally(trainer, self._task.nodes, num_before)
        num_after = self._task.training.num_after_save
        self._iterate(trainer, TRAIN_ON, num_before, num_before + num_after)

    def _save_locally(self, trainer: Trainer, nodes: Path, iteration: int) -> None:
        directory = nodes / local_checkpoint(dist.get_rank())
        directory.mkdir(parents=True)
        with self._phase(SAVE_LOCALLY):
            state = trainer.sharded_state_dict(is_loading=False)
            dist_checkpointing.save(
                {**state, "iteration": iteration},
                str(directory),
                LOCAL_REPLICATED,
                content_metadata=trainer.content_metadata,
            )

    def _resume(self, trainer: Trainer) -> None:
        shared = None
        directory = self._task.checkpoint
        if self._task.loading is Loading.TWO_STAGE:
            group = parallel_state.get_data_parallel_group()
            shared = TwoStageDataParallelLoadShardedStrategy(group)
        with self._phase(LOAD):
            if self._task.loading is Loading.LOCAL and self._task.nodes is not None:
                directory = self._task.nodes / local_checkpoint(dist.get_rank())
                dist_ckpt_strategies.prepare_local_load(directory)
            state = dist_checkpointing.load(
                trainer.sharded_state_dict(is_loading=True), str(directory), shared
            )
            trainer.load_state_dict(state)
        self._report_reading(shared)
        self._report_digests(trainer)
        first = int(state["iteration"])
        self._iterate(trainer, RESUME, first, first + self._task.training.num_after_save)

    def _report_reading(self, shared: TwoStageDataParallelLoadShardedStrategy | None) -> None:
        """Report who read how much, where the ranks shared the reading."""
        summary = shared.summarize_load_times() if shared is not None else None
        if summary is not None:
            read = tuple(share.read_nbytes for share in summary.shares)
            filled = tuple(share.filled_nbytes for share in summary.shares)
            self._events.write(ReadingShared(read, filled))

    def _iterate(self, trainer: Trainer, phase: str, first: int, end: int) -> None:
        with self._phase(phase, end - first):
            for iteration in range(first, end):
                self._events.write(IterationDone(iteration, trainer.step(iteration)))

    def _report_digests(self, trainer: Trainer) -> None:
        """Report the digest of every weight and optimizer state, whole and in model space."""
        with self._phase("take digests"):
            state = trainer.sharded_state_dict(is_loading=False, sharding_type=FULLY_RESHARDABLE)
            self._events.write(DigestsTaken(gather_global_digests(state)))

    def _compare_golden(self, golden: Path) -> None:
        """Load the golden checkpoint into a model in this layout, compare with what is expected."""
        with self._phase(GOLDEN):
            model = build_model(_GOLDEN_SIZE, self._task.layout).module
            state = dist_checkpointing.load(
                {"model": model.sharded_state_dict()}, str(golden / "ckpt")
            )
            model.load_state_dict(state["model"], strict=True)
            found = gather_global_digests(model.sharded_state_dict())
            if dist.get_rank() == 0:
                expected = read_pickle(golden / "expected.pt", "expected.pt", ())
                wanted = {key: digest_tensor(tensor) for key, tensor in expected.items()}
                keys = sorted(found.keys() | wanted.keys())
                differing = tuple(key for key in keys if found.get(key) != wanted.get(key))
                self._events.write(GoldenCompared(len(keys), differing))

    @contextmanager
    def _phase(self, name: str, num_iterations: int | None = None) -> Iterator[None]:
        """Report a phase; it is over when the last rank has left it. Collective: world."""
        self._events.write(PhaseBegun(name, num_iterations))
        began = time.monotonic()
        yield
        dist.barrier()
        self._events.write(PhaseEnded(name, time.monotonic() - began))


def carry_out(global_rank: int, task: RankTask) -> None:
    """Carry out a task on one rank, over the world's process group. Collective: world."""
    torch.set_num_threads(1)
    cliques = LocalOptions(replication_jump=1, replication_factor=2)
    dist_ckpt_strategies.register(local=cliques)
    with cpu_stand_ins():
        parallel_state.initialize_model_parallel(task.layout.tp, task.layout.pp)
        _Rank(global_rank, task).run()


def _run_rank(global_rank: int, task: RankTask) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{task.scratch / 'rendezvous'}",
        rank=global_rank,
        world_size=task.layout.num_ranks,
        timeout=timedelta(seconds=task.timeout_s),
    )
    carry_out(global_rank, task)
    dist.destroy_process_group()


def main(arguments: list[str]) -> None:
    """Run one rank.

    Args:
        arguments: the global rank, and the task as JSON.
    """
    global_rank, task = int(arguments[0]), RankTask.from_json(arguments[1])
    threading.Thread(target=end_with_parent, daemon=True).start()
    warnings.simplefilter("ignore")
    try:
        _run_rank(global_rank, task)
    except BaseException as error:
        write_failure(task.scratch, global_rank, error)
        raise


if __name__ == "__main__":
    main(sys.argv[1:])
