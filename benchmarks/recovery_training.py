"""The training that ``recovery_faults.py`` breaks: ``python -m benchmarks.recovery_training TASK``.

What a training script has to do to survive faults is ``train`` and ``step``, and the wrapper.
"""

import json
import logging
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

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
from tests.support.sharded_training import ShardedTraining, make_groups, state_digest

NUM_RANKS, NUM_SHARDS = 4, 2
_PROGRESS_TIMEOUT_S = 5.0
"""A wrapped block without a step for this long counts as stuck."""

_ABORT_TIMEOUT_S = 30.0
_GROUP_TIMEOUT_S = 120.0


class Point(StrEnum):
    """Where in a step a rank fails."""

    FORWARD = "forward"
    BACKWARD = "backward"
    BEFORE_COMMIT = "before the commit"
    AFTER_COMMIT = "after the commit"
    UPDATED = "shard updated"
    GATHERED = "weights gathered"


class Kind(StrEnum):
    """What happens to the rank: STUCK waits for ever in the block, while the process lives."""

    EXCEPTION = "exception"
    KILL = "SIGKILL"
    STOP = "SIGSTOP"
    STUCK = "stuck"


@dataclass(frozen=True, slots=True)
class InjectedFault:
    """What happens to a rank at a point of a step; once in the job, which knows it by number."""

    number: int
    step: int
    point: Point
    kind: Kind
    global_rank: int


@dataclass(frozen=True, slots=True)
class JobTask:
    """One run of all ranks; ``scratch`` is a directory for what they write."""

    scratch: Path
    num_steps: int
    faults: tuple[InjectedFault, ...] = ()


class Rank:
    """What a rank has beside its training."""

    def __init__(self, task: JobTask, global_rank: int) -> None:
        self.task = task
        self.global_rank = global_rank
        self.manager = CheckpointManager(enable_checksum=True, timeout_s=_GROUP_TIMEOUT_S)
        self.attempt = 0
        path = task.scratch / f"events.{global_rank}.{os.getpid()}"
        self._log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)

    def note(self, event: str, **fields: Any) -> None:
        """Add a line that outlives the process, with the clock that all processes share."""
        line = {"event": event, "at": time.monotonic(), "rank": self.global_rank, **fields}
        os.write(self._log, json.dumps(line | {"attempt": self.attempt}).encode() + b"\n")

    def stopped(self, state: HPState) -> HPState:
        """The block has been left, after a fault of any rank."""
        self.note("stopped")
        return state

    def reach(self, step: int, point: Point) -> None:
        """This rank is at a point of a step: its faults there happen, each once in the job."""
        here = (step, point, self.global_rank)
        for fault in self.task.faults:
            fired = self.task.scratch / f"fired.{fault.number}"
            if (fault.step, fault.point, fault.global_rank) == here and not fired.exists():
                fired.touch()
                self.note("fault", number=fault.number)
                _happen(fault)


def _happen(fault: InjectedFault) -> None:
    match fault.kind:
        case Kind.EXCEPTION:
            raise RuntimeError(f"fault {fault.number}: {fault.point}")
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
    rank = Rank(pickle.loads(path.read_bytes()), int(environment()["RANK"]))  # noqa: S301 - our own
    wrapper = HPWrapper(
        abort=CheckpointlessAbortManager.get_default_checkpointless_abort(),
        health_check=CudaHealthCheck(),
        finalize=rank.stopped,
        checkpoint_manager=rank.manager,
        abort_timeout=_ABORT_TIMEOUT_S,
        progress_timeout_s=_PROGRESS_TIMEOUT_S,
    )
    wrapper(train)(rank)


def train(rank: Rank, call: HPCallWrapper | None = None) -> None:
    """The block: from the groups to the last step."""
    rank.attempt = int(environment()["TORCHELASTIC_RESTART_COUNT"])
    dist.init_process_group("interruptible_gloo", timeout=timedelta(seconds=_GROUP_TIMEOUT_S))
    groups = make_groups(NUM_SHARDS)
    training = ShardedTraining(groups)
    is_loaded = rank.manager.try_checkpointless_load(training) is not None
    rank.note("loaded", from_memory=is_loaded)
    rank.manager.track(training, replica_group=groups.twins)
    first = training.model.blocks.layers[0]
    first.register_forward_hook(lambda *_: rank.reach(training.step, Point.FORWARD))
    first.register_full_backward_pre_hook(lambda *_: rank.reach(training.step, Point.BACKWARD))
    while (number := training.step) < rank.task.num_steps:
        if call is not None:
            call.ping()
        rank.note("step", step=number, digest=state_digest(training))
        step(
            training,
            rank.manager,
            lambda point: rank.reach(number, point),
            lambda loss: rank.note("loss", step=number, digest=loss.hex()),
        )
    rank.note("step", step=training.step, digest=state_digest(training))


def step(
    training: ShardedTraining,
    manager: CheckpointManager,
    reach: Callable[[Point], None] = lambda _: None,
    on_loss: Callable[[float], None] = lambda _: None,
) -> None:
    """One step of a training that can be recovered. Collective."""
    manager.begin_step()
    on_loss(training.forward_backward())
    training.reduce_gradients()
    reach(Point.BEFORE_COMMIT)
    manager.vote()
    reach(Point.AFTER_COMMIT)
    with manager.updating():
        training.apply_update()
    reach(Point.UPDATED)
    training.gather_weights()
    reach(Point.GATHERED)
    manager.end_step()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    main(Path(sys.argv[1]))
