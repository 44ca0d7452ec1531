"""One rank of the benchmark of recovery's cost."""

from __future__ import annotations

import pickle
import time

from benchmarks.measuring.harness import RankContext, join_gloo
from dist_ckpt_strategies.recovery import CheckpointManager
from dist_ckpt_strategies.recovery.random_states import (
    capture_random_states,
)
from tests.support.sharded_training import ShardedTraining, make_groups

_NUM_SHARDS = 2
_VOTE_NBYTES = 4


class Worker:
    """Trains the same model, with recovery and without."""

    def __init__(self, context: RankContext) -> None:
        """Join the others. Collective."""
        join_gloo(context)
        self._groups = make_groups(_NUM_SHARDS)
        self._training = ShardedTraining(self._groups)

    def train(self, contender: str, num_steps: int) -> float:
        """Seconds of some steps. Collective."""
        if contender == "plain":
            return self._plain(num_steps)
        manager = CheckpointManager(enable_checksum="checksums" in contender)
        manager.track(self._training, replica_group=self._groups.twins)
        self._recoverable_step(manager)
        began = time.perf_counter()
        for _ in range(num_steps):
            self._recoverable_step(manager)
        return time.perf_counter() - began

    def nbytes(self) -> tuple[int, int]:
        """Bytes that this rank mirrors, and votes with, in each step."""
        return len(pickle.dumps(capture_random_states())), _VOTE_NBYTES

    def _plain(self, num_steps: int) -> float:
        training = self._training
        began = time.perf_counter()
        for _ in range(num_steps):
            training.forward_backward()
            training.reduce_gradients()
            training.apply_update()
            training.gather_weights()
            training.set_step(training.step + 1)
        return time.perf_counter() - began

    def _recoverable_step(self, manager: CheckpointManager) -> None:
        training = self._training
        manager.begin_step()
        training.forward_backward()
        training.reduce_gradients()
        manager.vote()
        with manager.updating():
            training.apply_update()
        training.gather_weights()
        manager.end_step()


def make_worker(context: RankContext) -> Worker:
    """One of the ranks, in its process. Collective."""
    return Worker(context)
