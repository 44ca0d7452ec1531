"""How much of the package runs in one save and one load, and how often ranks meet in collectives.

    python benchmarks/walk.py
    python benchmarks/walk.py --show

Two ranks, eight regular shards each, the second save and the second load of a strategy. Counted
with ``sys.setprofile`` on all threads: distinct functions of the package that run (comprehensions
and lambdas count with the function they stand in), the files that they are in, and collectives of
torch.distributed on rank 0.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script finds its neighbours only

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.measuring.command_line import (
    NOWHERE,
    Directory,
    Out,
    Smoke,
    TimeoutS,
    open_output,
)
from benchmarks.measuring.harness import Ranks, made_in

STRATEGIES = (("zarr", 1), ("zarr", 2))
AIMS = {"save": (110, 20, 6), "load": (90, 16, 3)}
"""Functions, files and collectives at most."""

_NUM_RANKS = 2


def counts_of(recorded: dict[str, Any]) -> tuple[int, int, int]:
    """Functions, files and collectives."""
    collectives = sum(recorded["collectives"].values())
    return len(recorded["functions"]), len(recorded["files"]), collectives


def main(
    directory: Directory = None,
    out: Out = NOWHERE,
    smoke: Smoke = False,  # noqa: FBT002 - there is one size only
    timeout_s: TimeoutS = 120.0,
    *,
    show: Annotated[bool, typer.Option("--show", help="List the functions.")] = False,
) -> None:
    """Count the functions, files and collectives of a save and a load."""
    del smoke
    table = Table("strategy", "call", "functions", "files", "collectives", "aim")
    make = made_in("benchmarks.ranks.walk")
    with (
        open_output(out, "walk.py") as output,
        Ranks(_NUM_RANKS, make, timeout_s=timeout_s) as all_,
    ):
        for strategy in STRATEGIES:
            with tempfile.TemporaryDirectory(dir=directory) as scratch:
                found = all_.step("walk", strategy, Path(scratch)).values[0]
            for call, recorded in found.items():
                functions, files, collectives = counts_of(recorded)
                fields = {"strategy": list(strategy), "call": call, **recorded}
                output.lines.write("walk", fields)
                counted = (str(functions), str(files), str(collectives))
                table.add_row(f"{strategy}", call, *counted, " ".join(map(str, AIMS[call])))
                if show:
                    Console().print(f"{strategy} {call}", *recorded["functions"], sep="\n")
                    Console().print(recorded["collectives"])
        output.console.print(table)


if __name__ == "__main__":
    typer.run(main)
