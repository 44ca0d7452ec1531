"""Save and load one GPT-like state with every contender in turn, beside the physical floor.

    python benchmarks/save_load.py --out save_load.jsonl
    python benchmarks/save_load.py --smoke

Two ranks, alternating contenders, medians. A save is timed twice: as the contender does it, and
until its files are on the disk (where it leaves that to the kernel, an fsync of all its files is
added). A load fills tensors that are already there: a contender that returns new ones pays for
the copy. Every load is checked. The first round of each step is not counted.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script finds its neighbours only

import typer

from benchmarks.contenders.roster import RAW_FLUSHED, RAW_PLAIN, SAVE_LOAD_PACKAGES
from benchmarks.measuring.command_line import Contest, Output, contest_command
from benchmarks.measuring.disks import file_system
from benchmarks.measuring.gpt_state import GptSize
from benchmarks.measuring.harness import Ranks, made_in
from benchmarks.measuring.rounds import run_saves_and_loads
from benchmarks.measuring.timings import Case

_WORKER = "benchmarks.ranks.one_state"
_NUM_RANKS = 2


def run_size(size: GptSize, contest: Contest, output: Output) -> None:
    """Time one size in every place, and report each."""
    make = made_in(_WORKER, size, contest.names)
    with Ranks(_NUM_RANKS, make, timeout_s=contest.timeout_s) as ranks:
        nbytes = sum(ranks.step("nbytes").values)
        for place in contest.places:
            case = Case(file_system(place), nbytes, size.num_arrays, _NUM_RANKS)
            run_saves_and_loads(ranks, case, place, contest, output)


@contest_command(SAVE_LOAD_PACKAGES, (RAW_FLUSHED, RAW_PLAIN))
def main(contest: Contest, output: Output) -> None:
    """Save and load one GPT-like state with every contender in turn."""
    for size in contest.sizes:
        run_size(size, contest, output)


if __name__ == "__main__":
    typer.run(main)
