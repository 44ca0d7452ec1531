"""Save and load through torch.distributed.checkpoint: packs beside FileSystemWriter and streams.

    python benchmarks/dcp.py --out dcp.jsonl

Two ranks; DTensors cut into rows, as FSDP2 has them. All but ``one stream, not flushed`` flush
their files before a save returns. Only packs have digests, which they take and compare.
"""

import sys
from abc import abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script finds its neighbours only

from torch import distributed as dist
from torch.distributed import checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as Rows

from benchmarks.common import rounds
from benchmarks.common.command_line import Parser, open_output, run_cases
from benchmarks.page.subjects import FILE_SYSTEM_WRITER, PLAIN_STREAM
from dist_ckpt_strategies.cli.bench import BASELINE
from dist_ckpt_strategies.cli.bench_rank import (
    Candidate,
    GptSize,
    Sample,
    Shards,
    Stream,
    Tensors,
    build_shards,
)
from dist_ckpt_strategies.integrations.dcp import PackStorageReader, PackStorageWriter

NUM_RANKS = 2
dcp: Any = checkpoint


class _Dcp:
    """DCP's ``save`` and ``load`` with a storage."""

    def __init__(self, shards: Shards) -> None:
        mesh = init_device_mesh("cpu", (NUM_RANKS,))
        self._tensors = {shard.key: shard.tensor for shard in shards}
        self._state = {
            key: DTensor.from_local(tensor, mesh, [Rows(0)])
            for key, tensor in self._tensors.items()
        }

    def save(self, directory: Path) -> None:
        dcp.save(self._state, storage_writer=self.writer(directory))

    def load(self, directory: Path) -> Tensors:
        dcp.load(self._state, storage_reader=self.reader(directory))
        return self._tensors

    @abstractmethod
    def writer(self, directory: Path) -> Any: ...

    @abstractmethod
    def reader(self, directory: Path) -> Any: ...


class Packs(_Dcp):
    """This package's storage."""

    def writer(self, directory: Path) -> Any:
        return PackStorageWriter(directory)

    def reader(self, directory: Path) -> Any:
        return PackStorageReader(directory)


class FileSystem(_Dcp):
    """DCP's own storage."""

    def writer(self, directory: Path) -> Any:
        return dcp.FileSystemWriter(directory)

    def reader(self, directory: Path) -> Any:
        return dcp.FileSystemReader(directory)


MAKERS: Final[Mapping[str, Callable[[Shards], Candidate]]] = {
    PLAIN_STREAM: partial(Stream, flushes=False),
    BASELINE: Stream,
    "packs": Packs,
    FILE_SYSTEM_WRITER: FileSystem,
}


def measure(size: GptSize, place: Path, repetitions: int, names: list[str]) -> list[Sample]:
    """All steps in one place, on one of the ranks that hold equal parts. Collective."""
    shards = build_shards(size, dist.get_rank(), NUM_RANKS, "rows")
    entries = rounds.entries_of(shards, MAKERS, names)
    samples = list(rounds.save_rounds(entries, place, repetitions, size.nbytes))
    stored = {name: place / name for name in names if name != PLAIN_STREAM}
    for step in rounds.load_steps(place):
        samples += rounds.load_rounds(entries, stored, step, repetitions, size.nbytes)
    return samples


def main() -> None:
    """Save and load through torch.distributed.checkpoint."""
    parser = Parser(__doc__)
    parser.add_comparison(MAKERS, (BASELINE, PLAIN_STREAM), sizes_gb=(0.5,))
    options = parser.parse()
    with open_output(options.out, __file__) as output:
        run_cases(options, output, NUM_RANKS, measure)


if __name__ == "__main__":
    main()
