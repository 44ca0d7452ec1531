"""Load one GPT-like state in another layout than it was saved in, beside a plain read.

    python benchmarks/reshard.py --out reshard.jsonl

Loads are warm and cold. Baseline: each rank reads its own bytes, and no others, from a file of its
own in one stream.

Bytes read are those of all ranks in ``/proc/self/io``, over the bytes of the tensors that are
loaded: through calls (mapped memory does not count there), and from the device (only a cold load
has any; what the kernel reads ahead counts).
"""

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script finds its neighbours only

from torch import distributed as dist

from benchmarks.common import rounds
from benchmarks.common.command_line import Parser, open_output, run_cases
from benchmarks.page.subjects import READ_SHARES
from dist_ckpt_strategies.cli import bench_rank
from dist_ckpt_strategies.cli.bench_rank import GptSize, Sample, Split, Tensors, build_shards

MAKERS: Final = {READ_SHARES: bench_rank.Stream} | {
    name: bench_rank.MAKERS[name] for name in ("packs", "zarr 1", "torch_dist")
}
MOVES: Final[Mapping[str, tuple[tuple[Split, int], tuple[Split, int]]]] = {
    "TP2 to TP4": (("TP", 2), ("TP", 4)),
    "TP4 to TP1": (("TP", 4), ("TP", 1)),
    "TP1 to TP8": (("TP", 1), ("TP", 8)),
    "2 rows to 4 rows": (("rows", 2), ("rows", 4)),
    "2 rows to 2 columns": (("rows", 2), ("columns", 2)),
    "4 rows to 4 columns": (("rows", 4), ("columns", 4)),
}
"""How the state is divided when it is saved, and when it is loaded.

As many ranks as the larger number; those beyond the parts hold, and load, replicas.
"""
_IO = Path("/proc/self/io")


class _Counting:
    """A candidate, and the bytes that its last load has read on this rank."""

    def __init__(self, candidate: bench_rank.Candidate) -> None:
        self.save = candidate.save
        self._load = candidate.load
        self.counts = (0, 0)

    def load(self, directory: Path) -> Tensors:
        calls, device = _read_counts()
        loaded = self._load(directory)
        now_calls, now_device = _read_counts()
        self.counts = (now_calls - calls, now_device - device)
        return loaded


def _read_counts() -> tuple[int, int]:
    """Bytes that this process has read through calls, and from the device; see proc(5)."""
    lines = _IO.read_text(encoding="ascii").splitlines()
    found = {name: int(value) for name, _, value in (line.partition(": ") for line in lines)}
    return found["rchar"], found["read_bytes"]


def measure(
    size: GptSize, place: Path, repetitions: int, names: list[str], move: str
) -> list[Sample]:
    """The loads after one change of layout, on one of the ranks. Collective."""
    rank = dist.get_rank()
    (saved_split, num_saved), (loaded_split, num_loaded) = MOVES[move]
    shards = build_shards(size, rank % num_loaded, num_loaded, loaded_split)
    num_copies = dist.get_world_size() // num_loaded
    entries = rounds.entries_of(shards, MAKERS, names)
    saved_shards = build_shards(size, rank % num_saved, num_saved, saved_split)
    stored = {name: place / name for name in names}
    for name, target in stored.items():
        rounds.on_first_rank(target.mkdir)
        MAKERS[name](shards if name == READ_SHARES else saved_shards).save(target)
        rounds.flush(target)
    del saved_shards
    counting = {name: _Counting(entry.candidate) for name, entry in entries.items()}
    entries = {name: replace(entry, candidate=counting[name]) for name, entry in entries.items()}
    samples = []
    for step in rounds.load_steps(place):
        for sample in rounds.load_rounds(entries, stored, step, repetitions, size.nbytes):
            calls, device = map(
                sum, zip(*rounds.gathered(counting[sample.candidate].counts), strict=True)
            )
            read = {
                "read_by_calls": calls / num_copies / size.nbytes,
                "read_from_device": device / num_copies / size.nbytes,
            }
            samples.append(replace(sample, values={**sample.values, **read}))
    return samples


def main() -> None:
    """Load one GPT-like state in another layout with every candidate in turn."""
    parser = Parser(__doc__)
    parser.add_comparison(MAKERS, (READ_SHARES,))
    parser.add_repeated("move", list(MOVES), "only these", choices=list(MOVES))
    options = parser.parse()
    with open_output(options.out, __file__) as output:
        for move in options.move:
            (_, num_saved), (_, num_loaded) = MOVES[move]
            num_ranks = max(num_saved, num_loaded)
            run_cases(options, output, num_ranks, measure, move, move=move)


if __name__ == "__main__":
    main()
