"""Save and load one GPT-like state with every contender in turn, beside the physical floor.

    python benchmarks/save_load.py --out save_load.jsonl
    python benchmarks/save_load.py --smoke

Two ranks, alternating contenders, medians. A save is timed twice: as the contender does it, and
until its files are on the disk (where it leaves that to the kernel, an fsync of all its files is
added). A load fills tensors that are already there: a contender that returns new ones pays for
the copy. Every load is checked. The first round of each step is not counted.
"""

from __future__ import annotations

import importlib
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, NoReturn

# Run as a script, Python looks for modules beside this file only; the package is one level up.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import typer
from rich.console import Console

from benchmarks.disks import (
    drop_cache,
    file_system,
    fill_cache,
    retire,
    touch_memory,
    workspace,
)
from benchmarks.gpt_state import GB, GptSize, gpt_size
from benchmarks.harness import RankContext, Ranks, alternate
from benchmarks.records import JsonLines, run_facts
from benchmarks.roster import ENTRIES, RAW_FLUSHED, RAW_PLAIN
from benchmarks.timings import Case, Sample, Step, build_table, summarise

_NUM_RANKS = 2
_TABLE_WIDTH = 100
_SMOKE = GptSize(num_layers=2, hidden=32, vocabulary=64)


def make_worker(size: GptSize, names: Sequence[str], context: RankContext) -> object:
    """The worker of one rank; in the rank's process, the only one that needs Megatron-Core."""
    return importlib.import_module("benchmarks.worker").Worker(size, names, context)


@dataclass(frozen=True, slots=True)
class Contest:
    """Who runs, and how often.

    Attributes:
        names: contenders, floors among them.
        repetitions: rounds that count.
        timeout_s: longest wait for one step.
    """

    names: tuple[str, ...]
    repetitions: int
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Output:
    """Where the results go."""

    lines: JsonLines
    console: Console


def run_size(size: GptSize, places: Sequence[Path], contest: Contest, output: Output) -> None:
    """Time one size in every place, and report each."""
    make = partial(make_worker, size, contest.names)
    with Ranks(_NUM_RANKS, make, timeout_s=contest.timeout_s) as ranks:
        nbytes = sum(ranks.step("nbytes").values)
        for place in places:
            case = Case(file_system(place), nbytes, size.num_arrays, _NUM_RANKS)
            samples = []
            with workspace(place) as directory:
                for sample in _run_case(ranks, case, directory, contest):
                    output.lines.write("sample", sample, case=case)
                    samples.append(sample)
            summaries = summarise(samples)
            for summary in summaries:
                output.lines.write("summary", summary, case=case)
            output.console.print(build_table(case, summaries))


def _run_case(ranks: Ranks, case: Case, directory: Path, contest: Contest) -> Iterator[Sample]:
    """Time every step; the loads read what the last round of saves has left."""
    for repetition, name in alternate(contest.names, contest.repetitions + 1):
        seconds, durable = _time_save(ranks, case, directory, name)
        if repetition > 0:
            yield Sample(Step.SAVE, name, repetition, seconds, durable)
    loading = [name for name in contest.names if ENTRIES[name].loads]
    for step in case.loads:
        for repetition, name in alternate(loading, contest.repetitions + 1):
            seconds = _time_load(ranks, case, directory / name, step, name)
            if repetition > 0:
                yield Sample(step, name, repetition, seconds, None)


def _time_save(ranks: Ranks, case: Case, directory: Path, name: str) -> tuple[float, float | None]:
    """Seconds of one save, and seconds until its files are on the disk."""
    target = directory / name
    if target.exists():
        retire(target, directory / "attic")
    target.mkdir()
    touch_memory(case.nbytes)
    seconds = ranks.step("save", name, target).seconds
    flushing = ranks.step("flush", target).seconds
    if ENTRIES[name].flushes:
        return seconds, seconds
    return seconds, None if name == RAW_PLAIN else seconds + flushing


def _time_load(ranks: Ranks, case: Case, target: Path, step: Step, name: str) -> float:
    ranks.step("clear")
    touch_memory(case.nbytes)
    if step is Step.LOAD_COLD:
        drop_cache(target)
    else:
        fill_cache(target)
    seconds = ranks.step("load", name, target).seconds
    ranks.step("check", name)
    return seconds


def _chosen(wanted: Sequence[str], output: Output) -> tuple[str, ...]:
    """The wanted contenders that are installed, and the floors, in the order of the table."""
    unknown = sorted(set(wanted) - set(ENTRIES))
    if unknown:
        raise typer.BadParameter(f"contender {unknown[0]!r}: expected one of {list(ENTRIES)}")
    names = [n for n in ENTRIES if not wanted or n in {*wanted, RAW_FLUSHED, RAW_PLAIN}]
    for name in names:
        if not ENTRIES[name].is_installed:
            note = f"{ENTRIES[name].package} is not installed"
            output.lines.write("skipped", {"contender": name, "reason": note})
            output.console.print(f"{name}: skipped, {note}")
    return tuple(name for name in names if ENTRIES[name].is_installed)


def _stop(signal_number: int, _frame: object) -> NoReturn:
    """Leave through every ``finally``, so that nothing stays behind."""
    raise SystemExit(128 + signal_number)


def main(  # noqa: PLR0913 - one parameter for each option
    *,
    size: Annotated[
        list[float] | None, typer.Option(help="GB over all ranks. [default: 0.5 and 1]")
    ] = None,
    directory: Annotated[
        list[Path] | None,
        typer.Option(help="Where to write. [default: the temporary directory and /dev/shm]"),
    ] = None,
    contender: Annotated[
        list[str] | None, typer.Option(help="Only these, beside the floors.")
    ] = None,
    repetitions: Annotated[int, typer.Option(min=1, help="Rounds that count.")] = 7,
    out: Annotated[Path, typer.Option(help="JSON lines go here.")] = Path("/dev/null"),
    smoke: Annotated[
        bool, typer.Option("--smoke/--no-smoke", help="Toy size: does it all run?")
    ] = False,
    timeout_s: Annotated[float, typer.Option(help="Longest wait for one step.")] = 300.0,
) -> None:
    """Save and load one GPT-like state with every contender in turn."""
    signal.signal(signal.SIGTERM, _stop)
    places = directory or [Path(tempfile.gettempdir()), Path("/dev/shm")]  # noqa: S108 - a tmpfs
    with ExitStack() as stack:
        console = Console()
        console.width = max(console.width, _TABLE_WIDTH)
        output = Output(JsonLines(stack.enter_context(out.open("w"))), console)
        output.lines.write("run", run_facts(["python", "benchmarks/save_load.py", *sys.argv[1:]]))
        names = _chosen(contender or [], output)
        contest = Contest(names, 1 if smoke else repetitions, timeout_s)
        sizes = [_SMOKE] if smoke else [gpt_size(int(gb * GB)) for gb in size or [0.5, 1.0]]
        for one in sizes:
            run_size(one, places, contest, output)


if __name__ == "__main__":
    typer.run(main)
