"""Save and load one GPT-like state with every candidate in turn, beside one stream per rank.

    python benchmarks/save_load.py --out save_load.jsonl

Two ranks. All but ``one stream, not flushed`` flush their files before a save returns.
"""

import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script finds its neighbours only

from torch import distributed as dist

from benchmarks.common import rounds
from benchmarks.common.command_line import Parser, open_output, run_cases
from benchmarks.page.subjects import PLAIN_STREAM
from dist_ckpt_strategies.cli import bench_rank
from dist_ckpt_strategies.cli.bench import BASELINE
from dist_ckpt_strategies.cli.bench_rank import (
    Candidate,
    GptSize,
    Sample,
    Shards,
    Stream,
    build_shards,
)

NUM_RANKS = 2
MAKERS: Final[Mapping[str, Callable[[Shards], Candidate]]] = {
    PLAIN_STREAM: partial(Stream, flushes=False),
    **bench_rank.MAKERS,
}


def measure(size: GptSize, place: Path, repetitions: int, names: list[str]) -> list[Sample]:
    """All steps in one place, on one of the ranks that hold equal parts. Collective."""
    shards = build_shards(size, dist.get_rank(), NUM_RANKS)
    entries = rounds.entries_of(shards, MAKERS, names)
    samples = list(rounds.save_rounds(entries, place, repetitions, size.nbytes))
    stored = {name: place / name for name in names if name != PLAIN_STREAM}
    for step in rounds.load_steps(place):
        samples += rounds.load_rounds(entries, stored, step, repetitions, size.nbytes)
    return samples


def main() -> None:
    """Save and load one GPT-like state with every candidate in turn."""
    parser = Parser(__doc__)
    parser.add_comparison(MAKERS, (BASELINE, PLAIN_STREAM))
    options = parser.parse()
    with open_output(options.out, __file__) as output:
        run_cases(options, output, NUM_RANKS, measure)


if __name__ == "__main__":
    main()
