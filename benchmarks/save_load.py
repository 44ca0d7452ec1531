"""Save and load one GPT-like state with every candidate in turn, beside one stream per rank.

    python benchmarks/save_load.py --out save_load.jsonl
    python benchmarks/save_load.py --smoke

Two ranks, alternating candidates, medians. A save is timed twice: as the candidate does it, and
until its files are on the disk (where it leaves that to the kernel, an fsync of all its files is
added). A load fills tensors that are already there: a candidate that returns new ones pays for
the copy. Every load is checked. The first round of each step is not counted.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script finds its neighbours only

import typer

from benchmarks.candidates.one_state import MAKERS, RAW_FLUSHED, RAW_PLAIN
from benchmarks.common.command_line import Comparison, Output, comparison_command
from benchmarks.common.disks import file_system
from benchmarks.common.processes import RankContext, Ranks, join_gloo
from benchmarks.common.rounds import Case, run_saves_and_loads
from benchmarks.common.states import GptSize, build_shards
from benchmarks.common.worker import Worker

_NUM_RANKS = 2


def make_worker(size: GptSize, names: Sequence[str], context: RankContext) -> Worker:
    """One of the ranks that hold the state in equal parts. Collective."""
    join_gloo(context)
    shards = build_shards(size, context.global_rank, context.num_ranks)
    return Worker.over(context, shards, MAKERS, names)


@comparison_command(list(MAKERS), (RAW_FLUSHED, RAW_PLAIN))
def main(comparison: Comparison, output: Output) -> None:
    """Save and load one GPT-like state with every candidate in turn."""
    for size in comparison.sizes:
        args = ("benchmarks.save_load", size, comparison.names)
        with Ranks(_NUM_RANKS, *args, timeout_s=comparison.timeout_s) as ranks:
            nbytes = sum(ranks.step("nbytes").values)
            for place in comparison.places:
                case = Case(file_system(place), nbytes, size.num_arrays, _NUM_RANKS)
                run_saves_and_loads(ranks, case, place, comparison, output)


if __name__ == "__main__":
    typer.run(main)
