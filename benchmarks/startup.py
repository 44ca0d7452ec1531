"""How long the package takes to import, and the command to answer, each in a new process.

    python benchmarks/startup.py --out startup.jsonl
    python benchmarks/startup.py --smoke

Wall-clock time from the start of the process to its end, Python's own start included, which is
measured beside it. Rounds take turns, the first does not count: files are in the page cache. The
checkpoints have one small array to a key, saved by one rank, as many files as arrays.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script finds its neighbours only

import typer
from rich.table import Table

from benchmarks.measuring.command_line import (
    NOWHERE,
    Directory,
    Out,
    Repetitions,
    Smoke,
    open_output,
)
from benchmarks.measuring.disks import workspace
from benchmarks.measuring.quiet import quiet_imports
from benchmarks.measuring.records import ROOT

TARGETS_S: Mapping[str, float] = {
    "import dist_ckpt_strategies": 0.3,
    "dist-ckpt --help": 0.5,
    "dist-ckpt inspect, format 1": 2.0,
    "dist-ckpt inspect, format 2": 2.0,
}
"""Longest time that each may take, in seconds; the last two with 10,000 arrays."""

_NUM_ARRAYS = 10_000
_NUM_SMOKE_ARRAYS = 20
_COMMAND = (sys.executable, "-m", "dist_ckpt_strategies.cli")


@dataclass(frozen=True, slots=True)
class Start:
    """A command that is timed.

    Attributes:
        name: in tables.
        command: what is run.
    """

    name: str
    command: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StartSummary:
    """What the runs of a command amount to, in seconds.

    Attributes:
        name: of the command.
        median: of all rounds.
        least: of all rounds.
        most: of all rounds.
        target: longest median that is wanted; None where nothing is.
    """

    name: str
    median: float
    least: float
    most: float
    target: float | None


def starts(directory: Path) -> list[Start]:
    """All commands, Python's own start first."""
    inspected = [
        Start(f"dist-ckpt inspect, format {version}", (*_COMMAND, "inspect", str(place)))
        for version, place in places(directory)
    ]
    return [
        Start("python", (sys.executable, "-c", "pass")),
        Start("import dist_ckpt_strategies", (sys.executable, "-c", "import dist_ckpt_strategies")),
        Start("dist-ckpt --help", (*_COMMAND, "--help")),
        *inspected,
    ]


def places(directory: Path) -> list[tuple[int, Path]]:
    """Where the checkpoint of each format lies."""
    return [(version, directory / f"format{version}") for version in (1, 2)]


def write_checkpoints(directory: Path, num_arrays: int) -> None:
    """Save as many arrays in each format."""
    with quiet_imports():
        import torch  # noqa: PLC0415 - only this process needs it
        from megatron.core.dist_checkpointing import ShardedTensor  # noqa: PLC0415

        import dist_ckpt_strategies  # noqa: PLC0415

    state = {
        name: ShardedTensor.from_rank_offsets(name, torch.full((4, 8), float(number)))
        for number in range(num_arrays)
        for name in [f"decoder.layers.{number // 20}.part{number % 20:02}.weight"]
    }
    for version, place in places(directory):
        place.mkdir()
        dist_ckpt_strategies.save(state, place, ("zarr", version))


def timed_s(start: Start) -> float:
    """How long a command takes, in seconds.

    Raises:
        CalledProcessError: it failed.
    """
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    began = time.perf_counter()
    subprocess.run(
        start.command,
        env=os.environ | {"PYTHONPATH": paths},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        timeout=300,
        check=True,
    )
    return time.perf_counter() - began


def rounds(chosen: list[Start], repetitions: int) -> Iterator[tuple[str, float]]:
    """The time of every command in every round but the first."""
    for number in range(repetitions + 1):
        for start in chosen:
            seconds = timed_s(start)
            if number:
                yield start.name, seconds


def summary_of(name: str, seconds: list[float]) -> StartSummary:
    """What the rounds of a command amount to."""
    median = statistics.median(seconds)
    return StartSummary(name, median, min(seconds), max(seconds), TARGETS_S.get(name))


def build_table(found: list[StartSummary], num_arrays: int) -> Table:
    """One row for each command."""
    table = Table(title=f"Start-up; checkpoints of {num_arrays:,} arrays")
    for column in ("command", "median s", "least", "most", "wanted"):
        table.add_column(column, justify="left" if column == "command" else "right")
    for one in found:
        wanted = "" if one.target is None else f"{one.target:.1f}"
        row = (f"{seconds:.3f}" for seconds in (one.median, one.least, one.most))
        table.add_row(one.name, *row, wanted)
    return table


def main(
    *,
    directory: Directory = None,
    repetitions: Repetitions = 7,
    out: Out = NOWHERE,
    smoke: Smoke = False,
) -> None:
    """Time the start of the package and of its command."""
    num_arrays = _NUM_SMOKE_ARRAYS if smoke else _NUM_ARRAYS
    with open_output(out, "startup.py") as output, workspace(directory) as place:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            pool.submit(write_checkpoints, place, num_arrays).result()
        seconds: dict[str, list[float]] = {}
        for name, found in rounds(starts(place), 1 if smoke else repetitions):
            output.lines.write("sample", {"name": name, "seconds": found})
            seconds.setdefault(name, []).append(found)
        summaries = [summary_of(name, found) for name, found in seconds.items()]
        case = {"num_arrays": num_arrays}
        output.write_summaries(case, summaries, build_table(summaries, num_arrays))


if __name__ == "__main__":
    typer.run(main)
