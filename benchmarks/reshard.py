"""Load one GPT-like state in another layout than it was saved in, beside a plain read.

    python benchmarks/reshard.py --out reshard.jsonl
    python benchmarks/reshard.py --smoke

Some ranks save and end; others load, warm and cold, into tensors that are there already.
Alternating candidates, medians; every load is checked; the first round is not counted. Baseline:
each rank reads its own bytes, and no others, from a file of its own in one stream.

Bytes read are those of all ranks in ``/proc/self/io``, over the bytes of the tensors that are
loaded: through calls (mapped memory does not count there), and from the device (only a cold load
has any; what the kernel reads ahead counts).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script finds its neighbours only

import typer

from benchmarks.candidates.one_state import Make, raw_flushed, torch_dist, zarr, zarr_2
from benchmarks.common.command_line import Comparison, Output, among, comparison_command
from benchmarks.common.disks import file_system, workspace
from benchmarks.common.processes import RankContext, Ranks, join_gloo
from benchmarks.common.rounds import SECONDS, Case, Sample, load_rounds
from benchmarks.common.states import Division, GptSize, Split, build_slices
from benchmarks.common.worker import Entry, Worker

READ_SHARES = "raw read"
MAKERS: Mapping[str, Make] = MappingProxyType(
    {READ_SHARES: raw_flushed, "zarr 2": zarr_2, "zarr 1": zarr, "torch_dist": torch_dist}
)
MOVES: Mapping[str, tuple[Division, Division]] = MappingProxyType(
    {
        "TP2 to TP4": (Division(Split.TENSOR_PARALLEL, 2), Division(Split.TENSOR_PARALLEL, 4)),
        "2 rows to 2 columns": (Division(Split.ROWS, 2), Division(Split.COLUMNS, 2)),
        "4 rows to 4 columns": (Division(Split.ROWS, 4), Division(Split.COLUMNS, 4)),
    }
)
"""How the state is divided when it is saved, and when it is loaded."""

_IO = Path("/proc/self/io")


@dataclass(frozen=True, slots=True)
class ReshardCase(Case):
    """One size and one move on one file system."""

    move: str = ""


class CountingWorker(Worker):
    """One rank: the bytes that its loads read are counted too."""

    def __init__(self, context: RankContext, nbytes: int, entries: Mapping[str, Entry]) -> None:
        super().__init__(context, nbytes, entries)
        self._last = (0, 0)

    def load(self, name: str, directory: Path) -> None:
        """As Worker; ``counts`` then says what was read. Timed."""
        calls, device = read_counts()
        super().load(name, directory)
        now_calls, now_device = read_counts()
        self._last = now_calls - calls, now_device - device

    def counts(self) -> tuple[int, int]:
        """What this rank's last load has read; see ``read_counts``."""
        return self._last


def read_counts() -> tuple[int, int]:
    """Bytes that this process has read through calls, and those fetched from a device for it.

    What is read through mapped memory is not in the first; see proc(5).
    """
    lines = _IO.read_text(encoding="ascii").splitlines()
    found = {name: int(value) for name, _, value in (line.partition(": ") for line in lines)}
    return found["rchar"], found["read_bytes"]


def make_worker(
    size: GptSize, division: Division, names: Sequence[str], context: RankContext
) -> CountingWorker:
    """One of the ranks among which the state is divided. Collective."""
    join_gloo(context)
    shards = build_slices(size, context.global_rank, division)
    return CountingWorker.over(context, shards, MAKERS, names)


def _run_move(
    size: GptSize, move: str, place: Path, comparison: Comparison, output: Output
) -> None:
    saved, loaded = MOVES[move]
    with workspace(place) as directory:
        stored = {name: directory / name for name in comparison.names}
        names = [name for name in comparison.names if name != READ_SHARES]
        with _ranks(size, saved, names, comparison) as ranks:
            for name in names:
                _save(ranks, name, stored[name])
        with _ranks(size, loaded, comparison.names, comparison) as ranks:
            nbytes = sum(ranks.step("nbytes").values)
            _save(ranks, READ_SHARES, stored[READ_SHARES])
            num_ranks = loaded.num_parts
            case = ReshardCase(file_system(place), nbytes, size.num_arrays, num_ranks, 1, move)
            output.write_samples(case, _loads(ranks, case, stored, comparison.repetitions))


def _ranks(
    size: GptSize, division: Division, names: Sequence[str], comparison: Comparison
) -> Ranks:
    args = ("benchmarks.reshard", size, division, names)
    return Ranks(division.num_parts, *args, timeout_s=comparison.timeout_s)


def _save(ranks: Ranks, name: str, target: Path) -> None:
    target.mkdir()
    ranks.step("save", name, target)
    ranks.step("flush", target)


def _loads(
    ranks: Ranks, case: Case, stored: Mapping[str, Path], repetitions: int
) -> Iterator[Sample]:
    """Time every kind of load there is here, and count what each has read."""
    for step in case.loads:
        for sample in load_rounds(ranks, case, step, stored, repetitions):
            calls, device = zip(*ranks.step("counts").values, strict=True)
            values = {
                SECONDS: sample.values[SECONDS],
                "read_by_calls": sum(calls) / case.nbytes,
                "read_from_device": sum(device) / case.nbytes,
            }
            yield Sample(step, sample.candidate, sample.repetition, values)


@comparison_command(list(MAKERS), (READ_SHARES,))
def main(
    comparison: Comparison,
    output: Output,
    *,
    move: Annotated[
        list[str] | None,
        typer.Option(help="Only these changes of layout; see MOVES.", callback=among(MOVES)),
    ] = None,
) -> None:
    """Load one GPT-like state in another layout with every candidate in turn."""
    for size in comparison.sizes:
        for name in move or MOVES:
            for place in comparison.places:
                _run_move(size, name, place, comparison, output)


if __name__ == "__main__":
    typer.run(main)
