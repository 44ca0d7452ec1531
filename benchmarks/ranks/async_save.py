"""What a rank does that saves behind training: it copies and goes on, or trains meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.contenders.behind_training import ASYNC_MAKERS
from benchmarks.contenders.one_state import Megatron
from benchmarks.measuring.gpt_state import GptSize, build_shards
from benchmarks.measuring.harness import RankContext, join_gloo
from benchmarks.measuring.training_steps import Schedule, Steps, run_beside
from benchmarks.ranks.one_state import Target


class AsyncWorker:
    """One rank: every contender over the same shards."""

    def __init__(self, context: RankContext, size: GptSize, names: Sequence[str]) -> None:
        join_gloo(context)
        shards = build_shards(size, context.global_rank, context.num_ranks)
        self._nbytes = sum(shard.tensor.nbytes for shard in shards)
        self._target = Target({shard.key: shard.tensor for shard in shards})
        self._contenders = {name: ASYNC_MAKERS[name](shards) for name in names}

    def nbytes(self) -> int:
        """Of this rank's shards."""
        return self._nbytes

    def begin(self, name: str, directory: Path) -> None:
        """The part that training waits for. Timed."""
        self._contenders[name].begin(directory)

    def finish(self, name: str) -> None:
        """Wait until all is written and the checkpoint is there. Timed."""
        self._contenders[name].finish()

    def check(self, name: str, directory: Path) -> None:
        """Load what a contender has saved, where it saves, and compare.

        Raises:
            ValueError: a tensor differs.
        """
        contender = self._contenders[name]
        if isinstance(contender, Megatron):
            self._target.clear()
            self._target.accept(contender.load(directory))
            self._target.check(name)

    def train(self, name: str, directory: Path, schedule: Schedule) -> Steps:
        """Steps of training before, during and after a save."""
        one = self._contenders[name]
        return run_beside(schedule, lambda: one.begin(directory), one.is_done, one.finish)


def make_worker(size: GptSize, names: Sequence[str], context: RankContext) -> AsyncWorker:
    """One of the ranks, in its process. Collective."""
    return AsyncWorker(context, size, names)
