"""One rank of a training with injected faults: ``python -m benchmarks.recovery.rank TASK``.

What a training script has to do to survive them is ``train``, and the wrapper above it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.recovery.job import (
    NUM_SHARDS,
    PROGRESS_TIMEOUT_S,
    EventLog,
    InjectedFault,
    JobTask,
    Kind,
    Point,
)
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
from tests.support.sharded_training import ShardedTraining, make_groups

_ABORT_TIMEOUT_S = 30.0
_GROUP_TIMEOUT_S = 120.0


class InjectedError(Exception):
    """Raised on purpose."""


class Rank:
    """What a rank has beside its training."""

    def __init__(self, task: JobTask, global_rank: int) -> None:
        self.task = task
        self.global_rank = global_rank
        self.manager = CheckpointManager(enable_checksum=True, timeout_s=_GROUP_TIMEOUT_S)
        self.log = EventLog(task.events, global_rank)
        self.epoch = 0

    def stopped(self, state: HPState) -> HPState:
        """The block has been left, after a fault of any rank."""
        self.log.note("stopped", epoch=state.epoch)
        return state

    def reach(self, step: int, point: Point) -> None:
        """This rank has come to a point of a step: its faults there happen, each once in the job.

        Raises:
            InjectedError: that is its fault.
        """
        for fault in self.task.faults:
            is_here = (fault.step, fault.point) == (step, point)
            if is_here and self.global_rank in fault.global_ranks and self._is_first(fault):
                self.log.note("fault", number=fault.number, epoch=self.epoch)
                _happen(fault)

    def _is_first(self, fault: InjectedFault) -> bool:
        try:
            (self.task.fired / f"{fault.number}.{self.global_rank}").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


def _happen(fault: InjectedFault) -> None:
    match fault.kind:
        case Kind.EXCEPTION:
            raise InjectedError(f"fault {fault.number}: {fault.point}")
        case Kind.KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        case Kind.STOP:
            os.kill(os.getpid(), signal.SIGSTOP)
        case Kind.STUCK:
            time.sleep(1e6)


def main(path: Path) -> None:
    """Train to the end, whatever happens."""
    torch.set_num_threads(1)
    wait_rank()
    rank = Rank(JobTask.read(path), int(environment()["RANK"]))
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
    is_loaded = rank.manager.try_checkpointless_load(training) is not None
    source = "memory" if is_loaded else "nowhere"
    rank.log.note("loaded", epoch=rank.epoch, step=training.step, source=source)
    rank.manager.track(training, replica_group=groups.twins)
    while training.step < rank.task.num_steps:
        if call is not None:
            call.ping()
        _step(rank, training)
    rank.task.final(rank.global_rank).write_text(json.dumps(_digests(training)), encoding="utf-8")


def _step(rank: Rank, training: ShardedTraining) -> None:
    step, manager = training.step, rank.manager

    def reach(point: Point) -> None:
        rank.reach(step, point)

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
