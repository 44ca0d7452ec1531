"""Save and load while bytes, arrays or ranks grow: what does each of them cost?

    python benchmarks/scaling.py --out scaling.jsonl
    python benchmarks/scaling.py --smoke
    python benchmarks/scaling.py --sweep arrays

Arrays of equal size, divided by rows. One thing grows, the others stay at 256 MB, 300 arrays and
two ranks. Everything else is as in save_load.py: alternating candidates, medians, every load
checked, the first round not counted.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script finds its neighbours only

import typer

from benchmarks.candidates.one_state import MAKERS, RAW_FLUSHED, RAW_PLAIN
from benchmarks.common.command_line import Comparison, Output, among, comparison_command
from benchmarks.common.disks import file_system
from benchmarks.common.processes import RankContext, Ranks, join_gloo
from benchmarks.common.rounds import Case, run_saves_and_loads
from benchmarks.common.states import Extent, build_equal_shards
from benchmarks.common.worker import Worker

_MB = 10**6
_NAMES = (RAW_FLUSHED, RAW_PLAIN, "zarr 1", "zarr 2", "torch_dist")


@dataclass(frozen=True, slots=True)
class ScalingCase(Case):
    """One extent on one file system; ``sweep`` says what grows."""

    sweep: str = ""


SWEEPS: Mapping[str, tuple[Extent, ...]] = MappingProxyType(
    {
        "bytes": tuple(Extent(mb * _MB, 300, 2) for mb in (64, 128, 256, 512, 1024)),
        "arrays": tuple(Extent(256 * _MB, count, 2) for count in (30, 300, 3000)),
        "ranks": tuple(Extent(256 * _MB, 300, count) for count in (1, 2, 4)),
    }
)
_SMOKE = {"bytes": (Extent(_MB, 6, 2),), "ranks": (Extent(_MB, 6, 1),)}


def make_worker(extent: Extent, names: Sequence[str], context: RankContext) -> Worker:
    """One of the ranks that hold the arrays in equal parts. Collective."""
    join_gloo(context)
    return Worker.over(context, build_equal_shards(extent, context.global_rank), MAKERS, names)


def _run_extent(sweep: str, extent: Extent, comparison: Comparison, output: Output) -> None:
    num_ranks, timeout_s = extent.num_ranks, comparison.timeout_s
    module = "benchmarks.scaling"
    with Ranks(num_ranks, module, extent, comparison.names, timeout_s=timeout_s) as ranks:
        nbytes = sum(ranks.step("nbytes").values)
        for place in comparison.places:
            case = ScalingCase(
                file_system(place), nbytes, extent.num_arrays, num_ranks, sweep=sweep
            )
            run_saves_and_loads(ranks, case, place, comparison, output)


@comparison_command(_NAMES, (RAW_FLUSHED, RAW_PLAIN), sizes_gb=(), in_memory=False, repetitions=5)
def main(
    comparison: Comparison,
    output: Output,
    *,
    sweep: Annotated[
        list[str] | None,
        typer.Option(help="bytes, arrays or ranks.", show_default="all", callback=among(SWEEPS)),
    ] = None,
) -> None:
    """Save and load while bytes, arrays or ranks grow."""
    for name, extents in (_SMOKE if comparison.is_smoke else SWEEPS).items():
        for extent in extents if not sweep or name in sweep else ():
            _run_extent(name, extent, comparison, output)


if __name__ == "__main__":
    typer.run(main)
