"""What the command lines of the benchmarks have in common: options, and where results go."""

from __future__ import annotations

import inspect
import signal
import sys
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.contenders.roster import missing_package
from benchmarks.measuring.gpt_state import GB, GptSize, gpt_size
from benchmarks.measuring.records import JsonLines, run_facts

_Written = TypeVar("_Written")
_TABLE_WIDTH = 100
_SMOKE = GptSize(num_layers=2, hidden=32, vocabulary=64)

Directory = Annotated[
    Path | None, typer.Option(help="Where to write.", show_default="the temporary directory")
]
Repetitions = Annotated[int, typer.Option(min=1, help="Rounds that count.")]
Seed = Annotated[int, typer.Option(help="Of the cases; not of when exactly a kill comes.")]
Out = Annotated[Path, typer.Option(help="JSON lines go here.")]
Smoke = Annotated[bool, typer.Option("--smoke/--no-smoke", help="Toy size: does it all run?")]
TimeoutS = Annotated[float, typer.Option(help="Longest wait for one step.")]

NOWHERE = Path("/dev/null")
"""Where results go that nobody wants."""


class Where(Enum):
    """Where a benchmark writes if it is not told."""

    DISK = "the temporary directory"
    DISK_AND_MEMORY = "the temporary directory and /dev/shm"


@dataclass(frozen=True, slots=True)
class Contest:
    """What is compared, and how often.

    Attributes:
        sizes: of the state, one after the other; none where a benchmark has sizes of its own.
        places: where each is stored, one after the other.
        names: contenders, floors among them.
        repetitions: rounds that count.
        timeout_s: longest wait for one step.
        is_smoke: toy size is asked for; sizes and repetitions are those of one.
    """

    sizes: tuple[GptSize, ...]
    places: tuple[Path, ...]
    names: tuple[str, ...]
    repetitions: int
    timeout_s: float
    is_smoke: bool


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


Command = Callable[..., None]


def contest_command(
    packages: Mapping[str, str | None],
    floors: Collection[str],
    *,
    sizes_gb: Sequence[float] = (0.5, 1.0),
    where: Where = Where.DISK_AND_MEMORY,
    repetitions: int = 7,
    timeout_s: float = 300.0,
) -> Callable[[Command], Command]:
    """Makes a command of a function that takes a contest, its output, and options of its own.

    The command has the function's own options and those that all contests have.

    Args:
        packages: for each contender the package that it needs, None where it is always there; in
            the order of the table. Without any there is no such option.
        floors: contenders that take part without being asked for.
        sizes_gb: sizes of the state in GB, if it is not told. Without any there is no such option.
        where: it writes, if it is not told.
        repetitions: rounds that count, if it is not told.
        timeout_s: longest wait for one step, if it is not told.
    """
    sizes = Annotated[list[float], typer.Option(help="GB of the whole state.")]
    places = Annotated[
        list[Path] | None, typer.Option(help="Where to write.", show_default=where.value)
    ]
    names = Annotated[
        list[str] | None,
        typer.Option(help="Only these, beside the floors.", callback=among(packages)),
    ]
    shared = {
        **({"size": (sizes, list(sizes_gb))} if sizes_gb else {}),
        "directory": (places, None),
        **({"contender": (names, None)} if packages else {}),
        "repetitions": (Repetitions, repetitions),
        "out": (Out, NOWHERE),
        "smoke": (Smoke, False),
        "timeout_s": (TimeoutS, timeout_s),
    }

    def command_of(run: Command) -> Command:
        script = Path(inspect.getfile(run)).name

        def command(**options: Any) -> None:
            given = {name: options.pop(name) for name in shared}
            with open_output(given["out"], script) as output:
                contest = Contest(
                    _chosen_sizes(given.get("size", ()), smoke=given["smoke"]),
                    _chosen_places(given["directory"], where),
                    _chosen_names(given.get("contender"), packages, floors, output),
                    1 if given["smoke"] else given["repetitions"],
                    given["timeout_s"],
                    given["smoke"],
                )
                run(contest, output, **options)

        _, _, *own = inspect.signature(run, eval_str=True).parameters.values()
        options = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=value, annotation=kind)
            for name, (kind, value) in shared.items()
        ]
        return _described(command, run, [*own, *options])

    return command_of


def among(known: Collection[str]) -> Callable[[list[str] | None], list[str] | None]:
    """For an option that takes names: refuses those that are not known."""

    def checked(wanted: list[str] | None) -> list[str] | None:
        for name in wanted or ():
            if name not in known:
                raise typer.BadParameter(f"{name!r}: expected one of {list(known)}")
        return wanted

    return checked


def _described(command: Command, run: Command, options: list[inspect.Parameter]) -> Command:
    """The command with the words of a function, and with these options."""
    command.__doc__ = run.__doc__
    command.__annotations__ = {option.name: option.annotation for option in options}
    vars(command)["__signature__"] = inspect.Signature(options)
    return command


def _chosen_sizes(wanted: Sequence[float], *, smoke: bool) -> tuple[GptSize, ...]:
    return (_SMOKE,) if smoke else tuple(gpt_size(int(gb * GB)) for gb in wanted)


def _chosen_places(wanted: Sequence[Path] | None, where: Where) -> tuple[Path, ...]:
    disk = Path(tempfile.gettempdir())
    memory = Path("/dev/shm")  # noqa: S108 - a memory file system
    return tuple(wanted or ((disk,) if where is Where.DISK else (disk, memory)))


def _chosen_names(
    wanted: Sequence[str] | None,
    packages: Mapping[str, str | None],
    floors: Collection[str],
    output: Output,
) -> tuple[str, ...]:
    """The wanted contenders, or all, without those that lack something here, which it says."""
    names = [name for name in packages if not wanted or name in {*wanted, *floors}]
    lacks = {name: missing_package(packages[name]) for name in names}
    for name, reason in lacks.items():
        if reason is not None:
            output.skip(name, reason)
    return tuple(name for name in names if lacks[name] is None)


def _stop(signal_number: int, _frame: object) -> NoReturn:
    """Leave through every ``finally``, so that nothing stays behind."""
    raise SystemExit(128 + signal_number)
