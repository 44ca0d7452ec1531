"""What recovery costs in every step without a fault: the vote, and the mirror of random states.

    python benchmarks/recovery_overhead.py --out recovery_overhead.jsonl
    python benchmarks/recovery_overhead.py --smoke

Four gloo ranks, two replicas of two shards, train a small GPT; rounds of steps without recovery
("plain"), with it, and with checksums too, in turn. The difference per step is what recovery
costs. The model is small so that the steps do not hide it; its share is given for a step of 0.5 s.
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script finds its neighbours only

import typer
from rich.table import Table

from benchmarks.measuring.command_line import NOWHERE, Out, Output, Smoke, TimeoutS, open_output
from benchmarks.measuring.harness import Ranks, alternate, made_in

_WORKER = "benchmarks.ranks.recovery_overhead"
NUM_RANKS = 4
PLAIN, RECOVERY, CHECKSUMS = "plain", "recovery", "recovery and checksums"
NAMES = (PLAIN, RECOVERY, CHECKSUMS)
REFERENCE_STEP_S = 0.5


@dataclass(frozen=True, slots=True)
class Round:
    """Some steps of one contender.

    Attributes:
        contender: which.
        repetition: number of the round.
        num_steps: in it.
        ms_per_step: of the slowest rank.
    """

    contender: str
    repetition: int
    num_steps: int
    ms_per_step: float


@dataclass(frozen=True, slots=True)
class Overhead:
    """What a contender costs beyond ``plain``.

    Attributes:
        contender: which.
        ms_per_step: median over the rounds of its milliseconds less those of plain.
        share: of a step of 0.5 s.
        mirrored_nbytes: of random states that each rank sends its replicas in each step.
        vote_nbytes: that each rank votes with.
    """

    contender: str
    ms_per_step: float
    share: float
    mirrored_nbytes: int
    vote_nbytes: int


def run_rounds(num_rounds: int, num_steps: int, timeout_s: float) -> tuple[list[Round], Any]:
    """All rounds that count, and the bytes of each meeting."""
    rounds = []
    with Ranks(NUM_RANKS, made_in(_WORKER), timeout_s=timeout_s) as ranks:
        for repetition, name in alternate(NAMES, num_rounds + 1):
            timed = ranks.step("train", name, num_steps)
            if repetition > 0:
                ms = 1000 * max(timed.values) / num_steps
                rounds.append(Round(name, repetition, num_steps, ms))
        sizes = ranks.step("nbytes").values[0]
    return rounds, sizes


def summarise(rounds: list[Round], sizes: Any) -> list[Overhead]:
    """What each contender costs, by the differences within a round."""
    plain = {one.repetition: one.ms_per_step for one in rounds if one.contender == PLAIN}
    found = []
    for name in NAMES[1:]:
        ms = statistics.median(
            one.ms_per_step - plain[one.repetition] for one in rounds if one.contender == name
        )
        found.append(Overhead(name, ms, ms / 1000 / REFERENCE_STEP_S, *sizes))
    return found


def build_table(found: list[Overhead]) -> Table:
    """The overheads as a table."""
    table = Table(title="What recovery costs in every step, 4 gloo ranks")
    table.add_column("contender")
    for name in ("ms per step", "of 0.5 s", "bytes mirrored", "bytes voted"):
        table.add_column(name, justify="right")
    for one in found:
        sizes = (str(one.mirrored_nbytes), str(one.vote_nbytes))
        table.add_row(one.contender, f"{one.ms_per_step:.2f}", f"{one.share:.2%}", *sizes)
    return table


def report(rounds: list[Round], found: list[Overhead], output: Output) -> None:
    """Write all that was measured, and show what it amounts to."""
    for one in rounds:
        output.lines.write("round", one)
    for overhead in found:
        output.lines.write("summary", overhead)
    output.console.print(build_table(found))


def main(
    *,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds that count.")] = 15,
    steps: Annotated[int, typer.Option(min=1, help="Steps in each.")] = 60,
    out: Out = NOWHERE,
    smoke: Smoke = False,
    timeout_s: TimeoutS = 120.0,
) -> None:
    """Measure what recovery costs in every step without a fault."""
    if smoke:
        rounds, steps = 1, 3
    with open_output(out, "recovery_overhead.py") as output:
        found, sizes = run_rounds(rounds, steps, timeout_s)
        report(found, summarise(found, sizes), output)


if __name__ == "__main__":
    typer.run(main)
