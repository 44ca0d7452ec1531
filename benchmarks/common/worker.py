"""What a rank does: it saves, and loads into tensors that are there already."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from benchmarks.candidates.one_state import Candidate, Make
from benchmarks.common.disks import flush_share
from benchmarks.common.processes import RankContext, quiet_imports
from benchmarks.common.states import Shard

with quiet_imports():
    from dist_ckpt_strategies.cli.bench_rank import Target


@dataclass(frozen=True, slots=True)
class Entry:
    """A candidate, and what its loads fill."""

    candidate: Candidate
    target: Target


class Worker:
    """One rank: every candidate over the same shards."""

    def __init__(self, context: RankContext, nbytes: int, entries: Mapping[str, Entry]) -> None:
        self._context = context
        self._nbytes = nbytes
        self._entries = entries

    @classmethod
    def over(
        cls,
        context: RankContext,
        shards: tuple[Shard, ...],
        makers: Mapping[str, Make],
        names: Sequence[str],
    ) -> Self:
        """One rank whose candidates, made by the makers, all have the same shards. Collective."""
        target = Target({shard.key: shard.tensor for shard in shards})
        entries = {name: Entry(makers[name](shards), target) for name in names}
        return cls(context, sum(shard.tensor.nbytes for shard in shards), entries)

    def nbytes(self) -> int:
        """Of this rank's shards."""
        return self._nbytes

    def save(self, name: str, directory: Path) -> None:
        """Let the candidate save. Timed."""
        self._entries[name].candidate.save(directory)

    def flush(self, directory: Path) -> None:
        """Flush this rank's share of the files in ``directory``. Timed."""
        flush_share(directory, self._context.global_rank, self._context.num_ranks)

    def clear(self, name: str) -> None:
        """Overwrite what the candidate is about to load."""
        self._entries[name].target.clear()

    def load(self, name: str, directory: Path) -> None:
        """Let the candidate load, and see to it that the data is in its target. Timed."""
        entry = self._entries[name]
        entry.target.accept(entry.candidate.load(directory))

    def check(self, name: str) -> None:
        """Compare what the candidate has loaded with what was saved.

        Raises:
            ValueError: a tensor differs.
        """
        self._entries[name].target.check(name)
