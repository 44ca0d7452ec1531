"""Load one GPT-like state on every rank of a group, read once or by each, beside the floor.

    python benchmarks/two_stage.py --out two_stage.jsonl
    python benchmarks/two_stage.py --smoke

All ranks want the whole state, as data-parallel replicas do. Alternating contenders, medians; from
a memory file system, and from a disk whose files the page cache has forgotten. A load fills
tensors that are already there and have been used: a contender that returns new ones pays for the
copy. Every load is checked. The first round is not counted.

The floor of a round is the longer of two things: each rank reads its share of the bytes from a file
of its own, in one stream; each rank sends its share to all others, over two gloo groups.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script finds its neighbours only

import typer

from benchmarks.contenders.roster import GROUP_ENTRIES, GROUP_PACKAGES, READ_SHARES, SEND_SHARES
from benchmarks.measuring.command_line import Contest, Output, contest_command
from benchmarks.measuring.disks import file_system, workspace
from benchmarks.measuring.gpt_state import GptSize
from benchmarks.measuring.group_timings import build_group_table, summarise_group
from benchmarks.measuring.harness import Ranks, made_in
from benchmarks.measuring.rounds import load_rounds
from benchmarks.measuring.timings import Case

_WORKER = "benchmarks.ranks.two_stage"


def run_group(size: GptSize, num_ranks: int, contest: Contest, output: Output) -> None:
    """Time one size and one number of ranks in every place, and report each."""
    make = made_in(_WORKER, size, contest.names)
    with Ranks(num_ranks, make, timeout_s=contest.timeout_s) as ranks:
        nbytes = ranks.step("nbytes").values[0]
        for place in contest.places:
            case = Case(file_system(place), nbytes, size.num_arrays, num_ranks, num_ranks)
            with workspace(place) as directory:
                stored = _save_all(ranks, contest.names, directory)
                step = case.loads[-1]  # cold, where there is such a thing
                rounds = load_rounds(ranks, case, step, stored, contest.repetitions)
                samples = output.write_samples(case, rounds)
            summaries = summarise_group(samples)
            output.write_summaries(case, summaries, build_group_table(case, summaries))


def _save_all(ranks: Ranks, names: Sequence[str], directory: Path) -> dict[str, Path]:
    """Store the state once in each of the forms that are loaded; where each contender finds it."""
    stored = {name: directory / GROUP_ENTRIES[name].stored for name in names}
    for target in dict.fromkeys(stored.values()):
        target.mkdir()
        saver = next(name for name in names if stored[name] == target)
        ranks.step("save", saver, target)
        ranks.step("flush", target)
    return stored


@contest_command(GROUP_PACKAGES, (READ_SHARES, SEND_SHARES))
def main(
    contest: Contest,
    output: Output,
    *,
    ranks: Annotated[
        list[int] | None, typer.Option(min=2, help="Replicas.", show_default="2 and 4")
    ] = None,
) -> None:
    """Load one GPT-like state on every rank of a group with every contender in turn."""
    for size in contest.sizes:
        for num_ranks in ranks or (2, 4):
            run_group(size, num_ranks, contest, output)


if __name__ == "__main__":
    typer.run(main)
