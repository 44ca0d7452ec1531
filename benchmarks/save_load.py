"""Save and load one GPT-like state with every contender in turn, beside the physical floor.

    python benchmarks/save_load.py --out save_load.jsonl
    python benchmarks/save_load.py --smoke

Two ranks, alternating contenders, medians. A save is timed twice: as the contender does it, and
until its files are on the disk (where it leaves that to the kernel, an fsync of all its files is
added). A load fills tensors that are already there: a contender that returns new ones pays for
the copy. Every load is checked. The first round of each step is not counted.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

# Run as a script, Python looks for modules beside this file only; the package is one level up.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import typer

from benchmarks.contenders.roster import ENTRIES, RAW_FLUSHED, RAW_PLAIN, missing_package
from benchmarks.measuring.command_line import (
    Contest,
    Directories,
    Names,
    Out,
    Output,
    Repetitions,
    Sizes,
    Smoke,
    TimeoutS,
    chosen_names,
    chosen_places,
    chosen_sizes,
    open_output,
)
from benchmarks.measuring.disks import file_system, retire, touch_memory, workspace
from benchmarks.measuring.gpt_state import GptSize
from benchmarks.measuring.harness import RankContext, Ranks, alternate
from benchmarks.measuring.rounds import load_rounds
from benchmarks.measuring.timings import Case, Sample, Step, build_table, summarise

_NUM_RANKS = 2


def make_worker(size: GptSize, names: Sequence[str], context: RankContext) -> object:
    """The worker of one rank; in the rank's process, the only one that needs Megatron-Core."""
    return importlib.import_module("benchmarks.ranks.one_state").build_worker(size, names, context)


def run_size(size: GptSize, contest: Contest, output: Output) -> None:
    """Time one size in every place, and report each."""
    make = partial(make_worker, size, contest.names)
    with Ranks(_NUM_RANKS, make, timeout_s=contest.timeout_s) as ranks:
        nbytes = sum(ranks.step("nbytes").values)
        for place in contest.places:
            case = Case(file_system(place), nbytes, size.num_arrays, _NUM_RANKS)
            with workspace(place) as directory:
                samples = output.write_samples(case, run_case(ranks, case, directory, contest))
            summaries = summarise(samples)
            output.write_summaries(case, summaries, build_table(case, summaries))


def run_case(ranks: Ranks, case: Case, directory: Path, contest: Contest) -> Iterator[Sample]:
    """Time every step of a case in an empty directory.

    The loads read what the last round of saves has left.
    """
    for repetition, name in alternate(contest.names, contest.repetitions + 1):
        seconds, durable = _time_save(ranks, case, directory, name)
        if repetition > 0:
            yield Sample(Step.SAVE, name, repetition, seconds, durable)
    stored = {name: directory / name for name in contest.names if ENTRIES[name].loads}
    for step in case.loads:
        yield from load_rounds(ranks, case, step, stored, contest.repetitions)


def _time_save(ranks: Ranks, case: Case, directory: Path, name: str) -> tuple[float, float | None]:
    """Seconds of one save, and seconds until its files are on the disk."""
    target = directory / name
    if target.exists():
        retire(target, directory / "attic")
    target.mkdir()
    touch_memory(case.held_nbytes)
    seconds = ranks.step("save", name, target).seconds
    flushing = ranks.step("flush", target).seconds
    if ENTRIES[name].flushes:
        return seconds, seconds
    return seconds, None if name == RAW_PLAIN else seconds + flushing


def main(  # noqa: PLR0913 - one parameter for each option
    *,
    size: Sizes = None,
    directory: Directories = None,
    contender: Names = None,
    repetitions: Repetitions = 7,
    out: Out = Path("/dev/null"),
    smoke: Smoke = False,
    timeout_s: TimeoutS = 300.0,
) -> None:
    """Save and load one GPT-like state with every contender in turn."""
    with open_output(out, "save_load.py") as output:
        lacks = {name: missing_package(entry.package) for name, entry in ENTRIES.items()}
        contest = Contest(
            chosen_sizes(size, smoke=smoke),
            chosen_places(directory),
            chosen_names(contender, lacks, (RAW_FLUSHED, RAW_PLAIN), output),
            1 if smoke else repetitions,
            timeout_s,
        )
        for one in contest.sizes:
            run_size(one, contest, output)


if __name__ == "__main__":
    typer.run(main)
