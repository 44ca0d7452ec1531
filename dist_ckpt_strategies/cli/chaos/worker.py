"""One rank of a run with faults: ``python -m dist_ckpt_strategies.cli.chaos.worker TASK``.

What a training script has to do to survive them is ``train``, and the wrapper above it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
import time
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist

from dist_ckpt_strategies.cli.chaos.faults import FaultInjector, InjectedFault, Point
from dist_ckpt_strategies.cli.chaos.task import (
    NUM_SHARDS,
    PROGRESS_TIMEOUT_S,
    ChaosTask,
    EventLog,
)
from dist_ckpt_strategies.cli.chaos.training import ShardedTraining, make_groups
from dist_ckpt_strategies.config import environment
from dist_ckpt_strategies.inprocess import (
    CheckpointlessAbortManager,
    CudaHealthCheck,
    HPCallWrapper,
    HPState,
    HPWrapper,
)
from dist_ckpt_strategies.inprocess.train_utils import wait_rank
from dist_ckpt_strategies.recovery import CheckpointManager

_ABORT_TIMEOUT_S = 30.0
_GROUP_TIMEOUT_S = 120.0


class Rank:
    """What a rank has beside its training."""

    def __init__(self, task: ChaosTask, global_rank: int) -> None:
        self.task = task
        self.global_rank = global_rank
        self.manager = CheckpointManager(enable_checksum=True, timeout_s=_GROUP_TIMEOUT_S)
        self.log = EventLog(task.events, global_rank)
        self.injector = FaultInjector(task.faults, global_rank, task.fired, self._note)
        self.epoch = 0

    def stopped(self, state: HPState) -> HPState:
        """The block has been left, after a fault of any rank."""
        self.log.note("stopped", epoch=state.epoch)
        return state

    def _note(self, fault: InjectedFault) -> None:
        time.sleep(self.task.pause_s)
        self.log.note("fault", number=fault.number, epoch=self.epoch)


def main(path: Path) -> None:
    """Train to the end, whatever happens."""
    torch.set_num_threads(1)
    task = ChaosTask.read(path)
    if task.save_every:
        _checkpoint()
    wait_rank()
    rank = Rank(task, int(environment()["RANK"]))
    wrapper = HPWrapper(
        abort=CheckpointlessAbortManager.get_default_checkpointless_abort(),
        health_check=CudaHealthCheck(),
        finalize=rank.stopped,
        checkpoint_manager=rank.manager,
        abort_timeout=_ABORT_TIMEOUT_S,
        progress_timeout_s=PROGRESS_TIMEOUT_S,
    )
    wrapper(train)(rank)


def train(rank: Rank, call: HPCallWrapper | None = None) -> None:
    """The block: from the groups to the last step."""
    rank.epoch = int(environment()["TORCHELASTIC_RESTART_COUNT"])
    dist.init_process_group("interruptible_gloo", timeout=timedelta(seconds=_GROUP_TIMEOUT_S))
    groups = make_groups(NUM_SHARDS)
    training = ShardedTraining(groups, seed=rank.task.seed)
    if rank.manager.try_checkpointless_load(training) is not None:
        source = "memory"
    else:
        source = _from_disk(rank, training)
    rank.log.note("loaded", epoch=rank.epoch, step=training.step, source=source)
    rank.manager.track(training, replica_group=groups.twins)
    while training.step < rank.task.num_steps:
        if call is not None:
            call.ping()
        if rank.task.save_every and training.step % rank.task.save_every == 0:
            _checkpoint().save(training, rank.task.checkpoints)
        _step(rank, training)
    rank.task.final(rank.global_rank).write_text(json.dumps(_digests(training)), encoding="utf-8")


def _from_disk(rank: Rank, training: ShardedTraining) -> str:
    """Load the newest checkpoint, where there is one; in words, where the state is from."""
    if not rank.task.save_every:
        return "nowhere"
    checkpoint = _checkpoint()
    step = checkpoint.load_newest(training, rank.task.checkpoints)
    return "nowhere" if step is None else "disk"


def _checkpoint() -> ModuleType:
    """What saves and loads; its import takes seconds, and only some runs need it."""
    return import_module("dist_ckpt_strategies.cli.chaos.checkpoint")


def _step(rank: Rank, training: ShardedTraining) -> None:
    step, manager = training.step, rank.manager

    def reach(point: Point) -> None:
        rank.injector.reach(step, point)

    rank.log.note("step", step=step, epoch=rank.epoch)
    manager.begin_step()
    loss = training.forward_backward(
        in_forward=lambda: reach(Point.FORWARD), in_backward=lambda: reach(Point.BACKWARD)
    )
    rank.log.note("loss", step=step, loss=loss.hex())
    training.reduce_gradients()
    reach(Point.REDUCED)
    reach(Point.BEFORE_VOTE)
    manager.vote()
    reach(Point.AFTER_VOTE)
    with manager.updating():
        training.apply_update()
    reach(Point.UPDATED)
    training.gather_weights()
    reach(Point.GATHERED)
    manager.end_step()


def _digests(training: ShardedTraining) -> dict[str, str]:
    """Of every tensor, of the objects, and of the random numbers that come next."""
    found = {
        f"{part}/{name}": _digest(tensor)
        for part, tensors in training.parts().items()
        for name, tensor in tensors.items()
    }
    found["objects"] = repr(training.objects())
    found["random numbers"] = _digest(torch.rand(16))
    return found


def _digest(tensor: torch.Tensor) -> str:
    content = tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(content).hexdigest()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    main(Path(sys.argv[1]))
