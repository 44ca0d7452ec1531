"""What a rank does that saves in one layout or loads in another, and how much it reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.contenders.one_state import Contender, Make, Raw, torch_dist, zarr, zarr_2
from benchmarks.contenders.roster import READ_SHARES
from benchmarks.measuring.gpt_state import Division, GptSize, Shard, build_slices
from benchmarks.measuring.harness import RankContext, join_gloo
from benchmarks.ranks.one_state import Entrant, Worker

_IO = Path("/proc/self/io")


@dataclass(frozen=True, slots=True)
class ReadCounts:
    """Bytes that a process has read.

    Attributes:
        calls_nbytes: through calls such as ``read``, from wherever; not through mapped memory.
        device_nbytes: fetched from a device for it, what was read ahead among them.
    """

    calls_nbytes: int
    device_nbytes: int

    def since(self, before: ReadCounts) -> ReadCounts:
        """What has been read between then and this."""
        return ReadCounts(
            self.calls_nbytes - before.calls_nbytes, self.device_nbytes - before.device_nbytes
        )


def read_counts() -> ReadCounts:
    """What this process has read so far; see proc(5)."""
    lines = _IO.read_text(encoding="ascii").splitlines()
    found = {name: int(value) for name, _, value in (line.partition(": ") for line in lines)}
    return ReadCounts(found["rchar"], found["read_bytes"])


class CountingWorker(Worker):
    """One rank: its loads are counted in bytes too."""

    def __init__(self, context: RankContext, nbytes: int, entrants: Mapping[str, Entrant]) -> None:
        super().__init__(context, nbytes, entrants)
        self._last = ReadCounts(0, 0)

    def load(self, name: str, directory: Path) -> None:
        """As Worker; ``counts`` then says what was read. Timed."""
        before = read_counts()
        super().load(name, directory)
        self._last = read_counts().since(before)

    def counts(self) -> ReadCounts:
        """What this rank's last load has read."""
        return self._last


def _raw(shards: tuple[Shard, ...]) -> Contender:
    return Raw(shards, flushes=True)


_MAKERS: Final[Mapping[str, Make]] = {
    READ_SHARES: _raw,
    "zarr 2": zarr_2,
    "zarr 1": zarr,
    "torch_dist": torch_dist,
}


def make_worker(
    size: GptSize, division: Division, names: Sequence[str], context: RankContext
) -> CountingWorker:
    """One of the ranks among which the state is divided. Collective."""
    join_gloo(context)
    shards = build_slices(size, context.global_rank, division)
    return CountingWorker.over(context, shards, lambda name: _MAKERS[name](shards), names)
