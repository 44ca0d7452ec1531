"""Save and load while bytes, arrays or ranks grow: what does each of them cost?

    python benchmarks/scaling.py --out scaling.jsonl
    python benchmarks/scaling.py --smoke
    python benchmarks/scaling.py --sweep arrays

Arrays of equal size, divided by rows. One thing grows, the others stay at 256 MB, 300 arrays and
two ranks. Everything else is as in save_load.py: alternating contenders, medians, every load
checked, the first round not counted.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Annotated

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
    Smoke,
    TimeoutS,
    chosen_names,
    open_output,
)
from benchmarks.measuring.disks import file_system, workspace
from benchmarks.measuring.harness import RankContext, Ranks
from benchmarks.measuring.timings import Case, build_table, summarise
from benchmarks.save_load import run_case

_MB = 10**6
_WORKER = "benchmarks.ranks.scaling"
_CONTENDERS = (RAW_FLUSHED, RAW_PLAIN, "zarr 1", "zarr 2", "torch_dist")


@dataclass(frozen=True, slots=True)
class Extent:
    """How much there is of everything.

    Attributes:
        nbytes: of all arrays together, about.
        num_arrays: of equal size.
        num_ranks: each of which has an equal part of every array.
    """

    nbytes: int
    num_arrays: int
    num_ranks: int


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


def make_worker(extent: Extent, names: Sequence[str], context: RankContext) -> object:
    """The worker of one rank, made in its process."""
    module = importlib.import_module(_WORKER)
    return module.build_scaling_worker(extent, names, context)


def run_extent(sweep: str, extent: Extent, contest: Contest, output: Output) -> None:
    """Time one extent in every place, and report each."""
    make = partial(make_worker, extent, contest.names)
    timeout_s = contest.timeout_s
    with Ranks(extent.num_ranks, make, timeout_s=timeout_s, preload=(_WORKER,)) as ranks:
        nbytes = sum(ranks.step("nbytes").values)
        for place in contest.places:
            case = ScalingCase(
                file_system(place), nbytes, extent.num_arrays, extent.num_ranks, sweep=sweep
            )
            with workspace(place) as directory:
                samples = output.write_samples(case, run_case(ranks, case, directory, contest))
            summaries = summarise(samples)
            output.write_summaries(case, summaries, build_table(case, summaries))


def _chosen(wanted: Sequence[str] | None, *, smoke: bool) -> Iterator[tuple[str, Extent]]:
    sweeps = _SMOKE if smoke else SWEEPS
    for sweep, extents in sweeps.items():
        if not wanted or sweep in wanted:
            for extent in extents:
                yield sweep, extent


def main(  # noqa: PLR0913 - one parameter for each option
    *,
    sweep: Annotated[
        list[str] | None, typer.Option(help="bytes, arrays or ranks. [default: all]")
    ] = None,
    directory: Directories = None,
    contender: Names = None,
    repetitions: Repetitions = 5,
    out: Out = Path("/dev/null"),
    smoke: Smoke = False,
    timeout_s: TimeoutS = 300.0,
) -> None:
    """Save and load while bytes, arrays or ranks grow."""
    if unknown := sorted(set(sweep or ()) - set(SWEEPS)):
        raise typer.BadParameter(f"sweep {unknown[0]!r}: expected one of {list(SWEEPS)}")
    with open_output(out, "scaling.py") as output:
        lacks = {name: missing_package(ENTRIES[name].package) for name in _CONTENDERS}
        contest = Contest(
            (),
            tuple(directory or (Path(tempfile.gettempdir()),)),
            chosen_names(contender, lacks, (RAW_FLUSHED, RAW_PLAIN), output),
            1 if smoke else repetitions,
            timeout_s,
        )
        for one, extent in _chosen(sweep, smoke=smoke):
            run_extent(one, extent, contest, output)


if __name__ == "__main__":
    typer.run(main)
