"""What a rank does whose saves or loads are recorded."""

from __future__ import annotations

import time
from pathlib import Path

from benchmarks.contenders.one_state import MAKERS
from benchmarks.contenders.replicas import GROUP_MAKERS
from benchmarks.measuring.disks import flush_share
from benchmarks.measuring.gpt_state import GptSize, build_shards
from benchmarks.measuring.harness import RankContext, join_gloo
from benchmarks.measuring.spans import Call, Recorder, Recording
from benchmarks.ranks.one_state import Entrant, Target


class TimelineWorker:
    """One rank: it saves its part of a state, or loads all of it as the other ranks do."""

    def __init__(self, context: RankContext, size: GptSize, call: Call) -> None:
        join_gloo(context)
        self._context = context
        self._call = call
        part, num_parts = (0, 1) if call.is_load else (context.global_rank, context.num_ranks)
        makers = GROUP_MAKERS if call.is_load else MAKERS
        shards = build_shards(size, part, num_parts)
        target = Target({shard.key: shard.tensor for shard in shards})
        self._nbytes = sum(shard.tensor.nbytes for shard in shards)
        self._entrant = Entrant(makers[call.contender](shards), target)

    def nbytes(self) -> int:
        """Of this rank's shards."""
        return self._nbytes

    def save(self, directory: Path) -> None:
        """Save, without recording it. Collective."""
        self._entrant.contender.save(directory)

    def flush(self, directory: Path) -> None:
        """Flush this rank's share of the files in ``directory``."""
        flush_share(directory, self._context.global_rank, self._context.num_ranks)

    def clear(self) -> None:
        """Overwrite what is about to be loaded."""
        self._entrant.target.clear()

    def record(self, directory: Path) -> Recording:
        """Save or load, and tell what was done when. Collective."""
        recorder = Recorder(is_load=self._call.is_load)
        with recorder.recording():
            began = time.perf_counter()
            if self._call.is_load:
                self._entrant.target.accept(self._entrant.contender.load(directory))
            else:
                self._entrant.contender.save(directory)
            ended = time.perf_counter()
        return Recording(began, ended, tuple(recorder.spans()))

    def check(self) -> None:
        """Compare the tensors with what was saved.

        Raises:
            ValueError: one differs.
        """
        self._entrant.target.check(self._call.name)


def make_worker(size: GptSize, call: Call, context: RankContext) -> TimelineWorker:
    """One of the ranks, in its process. Collective."""
    return TimelineWorker(context, size, call)
