"""Save and load one GPT-like state with every candidate in turn, beside one stream per rank.

    python benchmarks/save_load.py --out save_load.jsonl
    python benchmarks/save_load.py --smoke

Two ranks, alternating candidates, medians. All but ``raw write`` flush their files before a save
returns. A load fills tensors that are already there: a candidate that returns new ones pays for
the copy. Every load is checked. The first round of each step is not counted.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script finds its neighbours only

from torch import distributed as dist

from benchmarks.common.candidates import MAKERS, RAW_FLUSHED, RAW_PLAIN
from benchmarks.common.command_line import Parser, open_output, run_cases
from benchmarks.common.disks import is_in_memory
from benchmarks.common.rounds import (
    LOAD_COLD,
    LOAD_WARM,
    Sample,
    entries_of,
    load_rounds,
    save_rounds,
)
from benchmarks.common.states import GptSize, build_shards

NUM_RANKS = 2


def measure(size: GptSize, place: Path, repetitions: int, names: list[str]) -> list[Sample]:
    """All steps in one place, on one of the ranks that hold equal parts. Collective."""
    shards = build_shards(size, dist.get_rank(), NUM_RANKS)
    entries = entries_of(shards, MAKERS, names)
    samples = list(save_rounds(entries, place, repetitions, size.nbytes))
    stored = {name: place / name for name in names if name != RAW_PLAIN}
    for step in [LOAD_WARM] if is_in_memory(place) else [LOAD_WARM, LOAD_COLD]:
        samples += load_rounds(entries, stored, step, repetitions, size.nbytes)
    return samples


def main() -> None:
    """Save and load one GPT-like state with every candidate in turn."""
    parser = Parser(__doc__)
    parser.add_comparison(MAKERS)
    options = parser.parse()
    wanted = {*options.candidate, RAW_FLUSHED, RAW_PLAIN}
    names = [name for name in MAKERS if name in wanted]
    with open_output(options.out, __file__) as output:
        run_cases(options, output, NUM_RANKS, measure, names)


if __name__ == "__main__":
    main()
