"""Save every rank's state to its node with a copy at a peer, and get it back, beside the floor.

    python benchmarks/local_replicated.py --out local_replicated.jsonl
    python benchmarks/local_replicated.py --smoke

Four ranks, each a node of its own with a directory of its own; cliques of two. Alternating
contenders, medians; on a disk and on a memory file system. Each round: save, the blocking part of
an asynchronous save, load, and load after rank 1's directory is gone. Every load is checked. The
first round is not counted.

The floors: of the blocking part, one copy of the rank's bytes into memory that is in use; of a
save, the exchange of the bytes between the two of a clique over gloo, then two plain files written
and flushed; of a load, reading a file into memory in use; of a recovery, for rank 1 sending the
bytes instead. ``floor, new memory`` loads into new memory, which a process that has just started
has to. The last column gives the ratio to the floor of a save whatever the step: exchange
and write.

``nvrx`` is nvidia-resiliency-ext, with a few stand-ins for CUDA; it does not flush its files.
``nvrx, flushed`` is the same with its files flushed at the end of a save, as the others do.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script finds its neighbours only

import typer
from rich.table import Table

from benchmarks.contenders.roster import LOCAL_FLOOR, LOCAL_MANAGER, LOCAL_PACKAGES, NVRX
from benchmarks.measuring.command_line import Contest, Output, contest_command
from benchmarks.measuring.disks import file_system, touch_memory, workspace
from benchmarks.measuring.harness import Ranks, alternate, made_in, paired_ratio

_WORKER = "benchmarks.ranks.local_replicated"
MIB = 1 << 20
NUM_RANKS = 4

SAVE, BLOCKING, LOAD, RECOVERY = "save", "blocking part", "load", "recovery"
STEPS = (SAVE, BLOCKING, LOAD, RECOVERY)
TARGETS = {SAVE: 1.5, BLOCKING: 1.3, RECOVERY: 1.5}
"""Ratios to the floor that are aimed at; to NVRx it is 0.5 for a save and a recovery."""


@dataclass(frozen=True, slots=True)
class LocalCase:
    """One size on one file system."""

    file_system: str
    rank_nbytes: int
    num_ranks: int = NUM_RANKS
    num_copies: int = 2

    def __str__(self) -> str:
        """For the title of a table."""
        return f"{self.num_ranks} ranks x {self.rank_nbytes / MIB:g} MiB, {self.file_system}"


@dataclass(frozen=True, slots=True)
class LocalSample:
    """One timing: first rank's start to last rank's end."""

    step: str
    contender: str
    repetition: int
    seconds: float


@dataclass(frozen=True, slots=True)
class LocalSummary:
    """What the samples of one step of one contender amount to: median, and median ratios."""

    step: str
    contender: str
    num_samples: int
    seconds: float
    floor_ratio: float
    nvrx_ratio: float | None
    exchange_ratio: float


def run_rounds(
    ranks: Ranks, case: LocalCase, names: Sequence[str], directory: Path, repetitions: int
) -> Iterator[LocalSample]:
    """All steps of every contender in turn."""
    for repetition, name in alternate(names, repetitions + 1):
        for step in STEPS:
            touch_memory(2 * case.rank_nbytes * case.num_ranks)
            if step == RECOVERY:
                ranks.step("lose", name, directory)
            seconds = ranks.step(step.replace(" ", "_"), name, directory, repetition).seconds
            ranks.step("settle", name, step)
            if repetition > 0:
                yield LocalSample(step, name, repetition, seconds)
        ranks.step("remove", name, directory)


def summarise_local(samples: Sequence[LocalSample]) -> list[LocalSummary]:
    """One summary for each step of each contender."""
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for sample in sorted(samples, key=lambda s: s.repetition):
        found[sample.step, sample.contender].append(sample.seconds)
    return [
        LocalSummary(
            step,
            name,
            len(seconds),
            median(seconds),
            paired_ratio(seconds, found[step, LOCAL_FLOOR]),
            paired_ratio(seconds, found[step, NVRX]) if (step, NVRX) in found else None,
            paired_ratio(seconds, found[SAVE, LOCAL_FLOOR]),
        )
        for (step, name), seconds in sorted(found.items(), key=lambda one: STEPS.index(one[0][0]))
    ]


def build_local_table(case: LocalCase, summaries: Sequence[LocalSummary]) -> Table:
    """The case as a table."""
    table = Table(title=f"{case}: median seconds, median ratios (targets)")
    for name in ("step", "contender"):
        table.add_column(name, no_wrap=True)
    for name in ("seconds", "of the floor", "of nvrx", "of exchange + write"):
        table.add_column(name, justify="right")
    for one in summaries:
        target = TARGETS.get(one.step) if one.contender == LOCAL_MANAGER else None
        aim = f" (<= {target:g})" if target else ""
        ratio = "" if one.nvrx_ratio is None else f"{one.nvrx_ratio:.2f}"
        floor, exchange = f"{one.floor_ratio:.2f}{aim}", f"{one.exchange_ratio:.2f}"
        table.add_row(one.step, one.contender, f"{one.seconds:.3f}", floor, ratio, exchange)
    return table


def run_place(ranks: Ranks, case: LocalCase, place: Path, contest: Contest, output: Output) -> None:
    """Time everything in one place, and report it."""
    with workspace(place) as directory:
        rounds = run_rounds(ranks, case, contest.names, directory, contest.repetitions)
        samples = output.write_samples(case, rounds)
    summaries = summarise_local(samples)
    output.write_summaries(case, summaries, build_local_table(case, summaries))


@contest_command(LOCAL_PACKAGES, (LOCAL_FLOOR,), sizes_gb=())
def main(
    contest: Contest,
    output: Output,
    *,
    mib: Annotated[int, typer.Option(min=1, help="MiB of each rank's state.")] = 256,
) -> None:
    """Save, load and recover local checkpoints with every contender in turn."""
    nbytes = (1 if contest.is_smoke else mib) * MIB
    make = made_in(_WORKER, nbytes, contest.names)
    with Ranks(NUM_RANKS, make, timeout_s=contest.timeout_s) as ranks:
        for place in contest.places:
            run_place(ranks, LocalCase(file_system(place), nbytes), place, contest, output)


if __name__ == "__main__":
    typer.run(main)
