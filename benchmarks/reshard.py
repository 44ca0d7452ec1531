"""Load one GPT-like state in another layout than it was saved in, beside a plain read.

    python benchmarks/reshard.py --out reshard.jsonl
    python benchmarks/reshard.py --smoke

Some ranks save and end; others load, warm and cold, into tensors that are there already.
Alternating contenders, medians; every load is checked; the first round is not counted. The floor:
each rank reads its own bytes, and no others, from a file of its own in one stream.

Bytes read are those of all ranks in ``/proc/self/io``, over the bytes of the tensors that are
loaded: through calls (mapped memory does not count there), and from the device (only a cold load
has any; what the kernel reads ahead counts).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script finds its neighbours only

import typer

from benchmarks.contenders.roster import READ_SHARES, RESHARD_PACKAGES
from benchmarks.measuring.command_line import Contest, Output, among, contest_command
from benchmarks.measuring.disks import file_system, workspace
from benchmarks.measuring.gpt_state import Division, GptSize, Split
from benchmarks.measuring.harness import MakeWorker, Ranks, made_in
from benchmarks.measuring.measures import (
    SECONDS,
    Column,
    Measure,
    MeasureSummary,
    build_measure_table,
    ratio_column,
    seconds_column,
    summarise_measures,
)
from benchmarks.measuring.rounds import load_rounds
from benchmarks.measuring.timings import Case

CALLS, DEVICE = "read_by_calls", "read_from_device"
_PEER = "torch_dist"
_WORKER = "benchmarks.ranks.reshard"


@dataclass(frozen=True, slots=True)
class Move:
    """From one layout to another."""

    name: str
    saved: Division
    loaded: Division


MOVES: Mapping[str, Move] = MappingProxyType(
    {
        move.name: move
        for move in (
            Move(
                "TP2 to TP4",
                Division(Split.TENSOR_PARALLEL, 2),
                Division(Split.TENSOR_PARALLEL, 4),
            ),
            Move("2 rows to 2 columns", Division(Split.ROWS, 2), Division(Split.COLUMNS, 2)),
            Move("4 rows to 4 columns", Division(Split.ROWS, 4), Division(Split.COLUMNS, 4)),
        )
    }
)


@dataclass(frozen=True, slots=True)
class ReshardCase(Case):
    """One size and one move on one file system.

    Attributes:
        move: name of the change of layout.
    """

    move: str = ""

    def __str__(self) -> str:
        """For the title of a table."""
        return f"{self.move}, {Case.__str__(self)}"


def run_move(size: GptSize, move: Move, place: Path, contest: Contest, output: Output) -> None:
    """Time one size and one change of layout in one place, and report it."""
    with workspace(place) as directory:
        stored = {name: directory / name for name in contest.names}
        _save_all(size, move, stored, contest)
        make = made_in(_WORKER, size, move.loaded, contest.names)
        with _ranks(move.loaded.num_parts, make, contest) as ranks:
            nbytes = sum(ranks.step("nbytes").values)
            _save(ranks, READ_SHARES, stored[READ_SHARES])
            num_ranks = move.loaded.num_parts
            case = ReshardCase(file_system(place), nbytes, size.num_arrays, num_ranks, 1, move.name)
            measures = output.write_samples(case, _loads(ranks, case, stored, contest.repetitions))
    summaries = summarise_measures(measures, contest.names, (READ_SHARES, _PEER))
    output.write_summaries(case, summaries, build_measure_table(_title(case), summaries, _COLUMNS))


def _save_all(size: GptSize, move: Move, stored: Mapping[str, Path], contest: Contest) -> None:
    """Have ranks of the old layout store the state in every form but the floor's."""
    names = [name for name in contest.names if name != READ_SHARES]
    make = made_in(_WORKER, size, move.saved, names)
    with _ranks(move.saved.num_parts, make, contest) as ranks:
        for name in names:
            _save(ranks, name, stored[name])


def _ranks(num_ranks: int, make: MakeWorker, contest: Contest) -> Ranks:
    return Ranks(num_ranks, make, timeout_s=contest.timeout_s, preload=(_WORKER,))


def _save(ranks: Ranks, name: str, target: Path) -> None:
    target.mkdir()
    ranks.step("save", name, target)
    ranks.step("flush", target)


def _loads(
    ranks: Ranks, case: Case, stored: Mapping[str, Path], repetitions: int
) -> Iterator[Measure]:
    """Time every kind of load there is here, and count what each has read."""
    for step in case.loads:
        for sample in load_rounds(ranks, case, step, stored, repetitions):
            counts = ranks.step("counts").values
            values = {
                SECONDS: sample.seconds,
                CALLS: sum(one.calls_nbytes for one in counts) / case.nbytes,
                DEVICE: sum(one.device_nbytes for one in counts) / case.nbytes,
            }
            yield Measure(step.value, sample.contender, sample.repetition, values)


def _title(case: ReshardCase) -> str:
    return f"{case}; bytes read over needed"


def _read_column(title: str, name: str) -> Column:
    def cell(summary: MeasureSummary) -> str:
        return f"{summary.medians[name]:.2f}"

    return Column(title, cell)


_COLUMNS = (
    seconds_column(),
    ratio_column(READ_SHARES),
    ratio_column(_PEER),
    _read_column("read by calls", CALLS),
    _read_column("from the device", DEVICE),
)


@contest_command(RESHARD_PACKAGES, (READ_SHARES,))
def main(
    contest: Contest,
    output: Output,
    *,
    move: Annotated[
        list[str] | None,
        typer.Option(help="Only these changes of layout; see MOVES.", callback=among(MOVES)),
    ] = None,
) -> None:
    """Load one GPT-like state in another layout with every contender in turn."""
    for size in contest.sizes:
        for name in move or MOVES:
            for place in contest.places:
                run_move(size, MOVES[name], place, contest, output)


if __name__ == "__main__":
    typer.run(main)
