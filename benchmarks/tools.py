"""Verify and convert a checkpoint, beside reading and copying its files; and how much memory.

    python benchmarks/tools.py --out tools.jsonl
    python benchmarks/tools.py --smoke

One GPT-like state, saved by two ranks in format 1 and in format 2. Every run has a process of its
own, or two that share the work and the threads. The peak of resident memory, of both together, is
taken at the end; the time is that of the tool, without the start of Python. Warm: the page cache
holds the source; cold: it holds nothing of it. Contenders take turns; medians.

The floors have as many threads as the tools: ``raw read`` reads the same files, ``raw copy`` also
writes and flushes each as it is. A conversion is durable when it returns.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script finds its neighbours only

import typer

from benchmarks.contenders.roster import (
    COPY_FILES,
    READ_FILES,
    TO_TORCH_DIST,
    TO_ZARR_2,
    TO_ZARR_2_BY_TWO,
    TOOL_PACKAGES,
    VERIFY,
    VERIFY_BY_TWO,
)
from benchmarks.measuring.command_line import Contest, Output, contest_command
from benchmarks.measuring.disks import (
    drop_cache,
    file_system,
    files_below,
    fill_cache,
    retire,
    touch_memory,
    workspace,
)
from benchmarks.measuring.gpt_state import GB, GptSize
from benchmarks.measuring.harness import MakeWorker, Ranks, alternate, made_in
from benchmarks.measuring.measures import (
    SECONDS,
    Column,
    Measure,
    MeasureSummary,
    build_measure_table,
    seconds_column,
    summarise_measures,
)
from benchmarks.measuring.timings import Case, Step

MIB = 1 << 20
SPEED, PEAK, BEFORE = "nbytes_per_second", "peak_nbytes", "before_nbytes"
SOURCES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "zarr 1": (TO_ZARR_2, TO_ZARR_2_BY_TWO),
        "zarr 2": (VERIFY, VERIFY_BY_TWO, TO_TORCH_DIST),
    }
)
"""Formats, and the tools that take them."""

NUM_RANKS: Mapping[str, int] = MappingProxyType({VERIFY_BY_TWO: 2, TO_ZARR_2_BY_TWO: 2})
"""Processes of a tool; one where it is not named. Memory is that of all of them."""

_NUM_RANKS = 2
_SAVER, _WORKER = "benchmarks.ranks.one_state", "benchmarks.ranks.tools"
_CACHE = MappingProxyType({Step.LOAD_WARM: "warm", Step.LOAD_COLD: "cold"})


@dataclass(frozen=True, slots=True)
class ToolCase(Case):
    """One checkpoint on one file system.

    Attributes:
        source: its format.
        file_nbytes: of all its files.
        num_threads: of tools and floors.
        max_memory_nbytes: for elements, in a conversion.
    """

    source: str = ""
    file_nbytes: int = 0
    num_threads: int = 1
    max_memory_nbytes: int = 0

    def __str__(self) -> str:
        """For the title of a table."""
        return (
            f"from {self.source}, {self.file_nbytes / GB:.2g} GB, {self.num_arrays} arrays, "
            f"{self.file_system}, {self.num_threads} threads"
        )


def run_place(
    size: GptSize, place: Path, max_memory_nbytes: int, contest: Contest, output: Output
) -> None:
    """Time every tool in one place, and report it."""
    num_threads = max(2, len(os.sched_getaffinity(0)))
    make = made_in(_WORKER, num_threads, max_memory_nbytes)
    with workspace(place) as directory:
        nbytes = _save_all(size, directory, contest)
        for source, tools in SOURCES.items():
            names = [name for name in contest.names if name in {*tools, READ_FILES, COPY_FILES}]
            if not set(names) & set(tools):
                continue
            root = directory / source
            file_nbytes = sum(path.stat().st_size for path in files_below(root))
            case = ToolCase(
                file_system(place), nbytes, size.num_arrays, 1,
                source=source, file_nbytes=file_nbytes,
                num_threads=num_threads, max_memory_nbytes=max_memory_nbytes,
            )  # fmt: skip
            measures = output.write_samples(case, _rounds(make, case, root, names, contest))
            summaries = summarise_measures(measures, names, (READ_FILES, COPY_FILES))
            table = build_measure_table(f"{case}: medians", summaries, _COLUMNS)
            output.write_summaries(case, summaries, table)


def _save_all(size: GptSize, directory: Path, contest: Contest) -> int:
    """Store the state in each format; how many bytes it has."""
    make = made_in(_SAVER, size, list(SOURCES))
    with Ranks(_NUM_RANKS, make, timeout_s=contest.timeout_s, preload=(_WORKER,)) as ranks:
        for source in SOURCES:
            target = directory / source
            target.mkdir()
            ranks.step("save", source, target)
            ranks.step("flush", target)
        return sum(ranks.step("nbytes").values)


def _rounds(
    make: MakeWorker, case: ToolCase, root: Path, names: Sequence[str], contest: Contest
) -> Iterator[Measure]:
    for step in case.loads:
        for repetition, name in alternate(names, contest.repetitions):
            target = root.with_name(f"from {root.name}")
            target.mkdir()
            num_ranks = NUM_RANKS.get(name, 1)
            with Ranks(num_ranks, make, timeout_s=contest.timeout_s, preload=(_WORKER,)) as ranks:
                touch_memory(2 * case.max_memory_nbytes)
                if step is Step.LOAD_COLD:
                    drop_cache(root)
                else:
                    fill_cache(root)
                seconds = ranks.step("run", name, root, target).seconds
                memories = ranks.step("memory").values
            retire(target, root.with_name("attic"))
            values = {
                SECONDS: seconds,
                SPEED: case.file_nbytes / seconds,
                PEAK: sum(memory.peak_nbytes for memory in memories),
                BEFORE: sum(memory.before_nbytes for memory in memories),
            }
            yield Measure(_CACHE[step], name, repetition, values)


def _speed_column(floor: str) -> Column:
    """The speed as a part of the floor's."""

    def cell(summary: MeasureSummary) -> str:
        return f"{100 / summary.ratios[floor]:.0f} %" if floor in summary.ratios else "-"

    return Column(f"of {floor}", cell)


_COLUMNS = (
    seconds_column(),
    Column("GB/s", lambda summary: f"{summary.medians[SPEED] / GB:.2f}"),
    _speed_column(READ_FILES),
    _speed_column(COPY_FILES),
    Column("MiB before", lambda summary: f"{summary.medians[BEFORE] / MIB:.0f}"),
    Column("peak, MiB", lambda summary: f"{summary.maxima[PEAK] / MIB:.0f}"),
)


@contest_command(
    TOOL_PACKAGES, (READ_FILES, COPY_FILES), sizes_gb=(4.0,), repetitions=5, timeout_s=600.0
)
def main(
    contest: Contest,
    output: Output,
    *,
    memory: Annotated[int, typer.Option(min=1, help="MiB that a conversion is given.")] = 256,
) -> None:
    """Verify and convert one GPT-like checkpoint with every tool in turn."""
    for size in contest.sizes:
        for place in contest.places:
            run_place(size, place, memory * MIB, contest, output)


if __name__ == "__main__":
    typer.run(main)
