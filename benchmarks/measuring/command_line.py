"""What the command lines of the benchmarks have in common: options, and where results go."""

from __future__ import annotations

import signal
import sys
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.measuring.gpt_state import GB, GptSize, gpt_size
from benchmarks.measuring.records import JsonLines, run_facts

_Written = TypeVar("_Written")
_TABLE_WIDTH = 100
_SMOKE = GptSize(num_layers=2, hidden=32, vocabulary=64)

Sizes = Annotated[
    list[float] | None, typer.Option(help="GB of the whole state. [default: 0.5 and 1]")
]
Directories = Annotated[
    list[Path] | None,
    typer.Option(help="Where to write. [default: the temporary directory and /dev/shm]"),
]
Names = Annotated[list[str] | None, typer.Option(help="Only these, beside the floors.")]
Repetitions = Annotated[int, typer.Option(min=1, help="Rounds that count.")]
Out = Annotated[Path, typer.Option(help="JSON lines go here.")]
Smoke = Annotated[bool, typer.Option("--smoke/--no-smoke", help="Toy size: does it all run?")]
TimeoutS = Annotated[float, typer.Option(help="Longest wait for one step.")]


@dataclass(frozen=True, slots=True)
class Contest:
    """What is compared, and how often.

    Attributes:
        sizes: of the state, one after the other.
        places: where each is stored, one after the other.
        names: contenders, floors among them.
        repetitions: rounds that count.
        timeout_s: longest wait for one step.
    """

    sizes: tuple[GptSize, ...]
    places: tuple[Path, ...]
    names: tuple[str, ...]
    repetitions: int
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Output:
    """Where the results go."""

    lines: JsonLines
    console: Console

    def write_samples(self, case: object, samples: Iterable[_Written]) -> list[_Written]:
        """Write each as it comes, and return them all."""
        written = []
        for sample in samples:
            self.lines.write("sample", sample, case=case)
            written.append(sample)
        return written

    def skip(self, contender: str, reason: str) -> None:
        """Say who or what is left out, and why."""
        self.lines.write("skipped", {"contender": contender, "reason": reason})
        self.console.print(f"{contender}: skipped, {reason}")

    def write_summaries(self, case: object, summaries: Sequence[Any], table: Table) -> None:
        """Write what the samples amount to, and show it."""
        for summary in summaries:
            self.lines.write("summary", summary, case=case)
        self.console.print(table)


@contextmanager
def open_output(out: Path, script: str) -> Iterator[Output]:
    """Write what is run, and then results; until SIGTERM, which leaves nothing behind either."""
    signal.signal(signal.SIGTERM, _stop)
    console = Console()
    console.width = max(console.width, _TABLE_WIDTH)
    with out.open("w") as file:
        output = Output(JsonLines(file), console)
        output.lines.write("run", run_facts(["python", f"benchmarks/{script}", *sys.argv[1:]]))
        yield output


def chosen_sizes(wanted: Sequence[float] | None, *, smoke: bool) -> tuple[GptSize, ...]:
    """The wanted sizes, or those that are measured by default."""
    return (_SMOKE,) if smoke else tuple(gpt_size(int(gb * GB)) for gb in wanted or (0.5, 1.0))


def chosen_places(wanted: Sequence[Path] | None) -> tuple[Path, ...]:
    """The wanted directories, or a disk and a memory file system."""
    return tuple(wanted or (Path(tempfile.gettempdir()), Path("/dev/shm")))  # noqa: S108 - a tmpfs


def chosen_names(
    wanted: Sequence[str] | None,
    lacks: Mapping[str, str | None],
    always: Collection[str],
    output: Output,
) -> tuple[str, ...]:
    """The wanted contenders, or all, without those that lack something here.

    Args:
        wanted: by the caller.
        lacks: of each contender what it lacks, None where it is nothing; in the order of the table.
        always: contenders that take part without being asked for.
        output: is told who is left out, and why.

    Raises:
        typer.BadParameter: there is no contender of that name.
    """
    unknown = sorted(set(wanted or ()) - set(lacks))
    if unknown:
        raise typer.BadParameter(f"contender {unknown[0]!r}: expected one of {list(lacks)}")
    names = [name for name in lacks if not wanted or name in {*wanted, *always}]
    for name in names:
        if (reason := lacks[name]) is not None:
            output.skip(name, reason)
    return tuple(name for name in names if lacks[name] is None)


def _stop(signal_number: int, _frame: object) -> NoReturn:
    """Leave through every ``finally``, so that nothing stays behind."""
    raise SystemExit(128 + signal_number)
