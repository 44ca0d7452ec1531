"""Save and load while bytes, arrays or ranks grow: what does each of them cost?

    python benchmarks/scaling.py --out scaling.jsonl
    python benchmarks/scaling.py --smoke
    python benchmarks/scaling.py --sweep arrays

Arrays of equal size, divided by rows. One thing grows, the others stay at 256 MB, 300 arrays and
two ranks. Everything else is as in save_load.py: alternating contenders, medians, every load
checked, the first round not counted.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script finds its neighbours only

import typer

from benchmarks.contenders.roster import RAW_FLUSHED, RAW_PLAIN, SAVE_LOAD_PACKAGES
from benchmarks.measuring.command_line import Contest, Output, Where, among, contest_command
from benchmarks.measuring.disks import file_system
from benchmarks.measuring.equal_arrays import Extent
from benchmarks.measuring.harness import Ranks, made_in
from benchmarks.measuring.rounds import run_saves_and_loads
from benchmarks.measuring.timings import Case

_MB = 10**6
_WORKER = "benchmarks.ranks.scaling"
_PACKAGES = {
    name: SAVE_LOAD_PACKAGES[name]
    for name in (RAW_FLUSHED, RAW_PLAIN, "zarr 1", "zarr 2", "torch_dist")
}


@dataclass(frozen=True, slots=True)
class ScalingCase(Case):
    """One extent on one file system.

    Attributes:
        sweep: what grows.
    """

    sweep: str = ""

    def __str__(self) -> str:
        """For the title of a table."""
        return f"more {self.sweep}: {Case.__str__(self)}"


SWEEPS: Mapping[str, tuple[Extent, ...]] = MappingProxyType(
    {
        "bytes": tuple(Extent(mb * _MB, 300, 2) for mb in (64, 128, 256, 512, 1024)),
        "arrays": tuple(Extent(256 * _MB, count, 2) for count in (30, 300, 3000)),
        "ranks": tuple(Extent(256 * _MB, 300, count) for count in (1, 2, 4)),
    }
)
_SMOKE: Mapping[str, tuple[Extent, ...]] = MappingProxyType(
    {"bytes": (Extent(_MB, 6, 2),), "ranks": (Extent(_MB, 6, 1),)}
)


def run_extent(sweep: str, extent: Extent, contest: Contest, output: Output) -> None:
    """Time one extent in every place, and report each."""
    make = made_in(_WORKER, extent, contest.names)
    timeout_s = contest.timeout_s
    with Ranks(extent.num_ranks, make, timeout_s=timeout_s, preload=(_WORKER,)) as ranks:
        nbytes = sum(ranks.step("nbytes").values)
        for place in contest.places:
            case = ScalingCase(
                file_system(place), nbytes, extent.num_arrays, extent.num_ranks, sweep=sweep
            )
            run_saves_and_loads(ranks, case, place, contest, output)


def _chosen(wanted: Sequence[str] | None, *, smoke: bool) -> Iterator[tuple[str, Extent]]:
    sweeps = _SMOKE if smoke else SWEEPS
    for sweep, extents in sweeps.items():
        if not wanted or sweep in wanted:
            for extent in extents:
                yield sweep, extent


@contest_command(_PACKAGES, (RAW_FLUSHED, RAW_PLAIN), sizes_gb=(), where=Where.DISK, repetitions=5)
def main(
    contest: Contest,
    output: Output,
    *,
    sweep: Annotated[
        list[str] | None,
        typer.Option(help="bytes, arrays or ranks.", show_default="all", callback=among(SWEEPS)),
    ] = None,
) -> None:
    """Save and load while bytes, arrays or ranks grow."""
    for one, extent in _chosen(sweep, smoke=contest.is_smoke):
        run_extent(one, extent, contest, output)


if __name__ == "__main__":
    typer.run(main)
