"""``dist-ckpt bench``: save and load on a file system, beside one plain stream per rank.

Ranks on the CPU hold equal parts of a state like a GPT's, and save and load it through
Megatron-Core's own ``dist_checkpointing``, every contender in turn. Every load is compared with
what was saved. The directory is left as it was, however the command ends.
"""

from __future__ import annotations

import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from dist_ckpt_strategies.cli.bench.task import CONTENDERS, BenchError, BenchTask, lacking
from dist_ckpt_strategies.cli.bench.timings import Timing, build_table, summarise
from dist_ckpt_strategies.cli.demo.events import Event, StepTimed
from dist_ckpt_strategies.cli.demo.ranks import run_rank_processes
from dist_ckpt_strategies.cli.demo.task import DemoError
from dist_ckpt_strategies.cli.json_form import print_json
from dist_ckpt_strategies.cli.text import bytes_text, counted, printable

GB = 10**9
_TIMEOUT_S = 120.0
_TIMEOUT_S_PER_GB = 120.0
"""A network file system may take its time; 8 MB per second is not waited for."""
_SPACE = 1.3
"""Space that has to be free, in times of the state: one checkpoint, and files' own needs."""

TaskRunner = Callable[[BenchTask, Callable[[Event], None]], None]
"""Carries out a task in new processes, calling with each event."""


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """What is asked for.

    Attributes:
        directory: on the file system that is measured; None: the temporary directory.
        nbytes: of the state, about.
        num_ranks: how many hold it in equal parts.
        repetitions: rounds that count.
    """

    directory: Path | None
    nbytes: int
    num_ranks: int
    repetitions: int


def run_task(task: BenchTask, on_event: Callable[[Event], None]) -> None:
    """Carry out a task with one new process per rank.

    Raises:
        DemoError: a rank failed, or nothing happens any more.
    """
    # -P: a file of the user's working directory must not pass for a module.
    worker = [sys.executable, "-P", "-m", "dist_ckpt_strategies.cli.bench.worker"]
    commands = [[*worker, str(rank), task.to_json()] for rank in range(task.num_ranks)]
    run_rank_processes(commands, task.scratch, on_event, 2 * task.timeout_s)


def bench_directory(options: BenchOptions, *, as_json: bool, start: TaskRunner = run_task) -> None:
    """Measure saves and loads, and show them.

    Args:
        options: what is asked for.
        as_json: print one JSON object instead of the table.
        start: carries out the task.

    Raises:
        BenchError: the directory is not there or has no room, or a rank failed.
    """
    directory = (options.directory or Path(tempfile.gettempdir())).resolve()
    _require_room(directory, options.nbytes)
    lacks = lacking(tuple(CONTENDERS))
    names = tuple(name for name in CONTENDERS if name not in lacks)
    with _places(directory) as (workspace, scratch), _progress() as progress:
        timeout_s = _TIMEOUT_S + _TIMEOUT_S_PER_GB * options.nbytes / GB
        task = BenchTask(
            workspace, scratch, options.nbytes, options.num_ranks, options.repetitions, names,
            timeout_s,
        )  # fmt: skip
        timed = _run(task, progress, start)
    _show(directory, options, timed, lacks, as_json=as_json)


def _run(task: BenchTask, progress: Progress, start: TaskRunner) -> list[StepTimed]:
    """All timings; a rank's failure is told in one line."""
    timed: list[StepTimed] = []
    bar = progress.add_task(f"starting {counted(task.num_ranks, 'rank')}", total=task.num_steps)

    def take(event: Event) -> None:
        if isinstance(event, StepTimed):
            timed.append(event)
            what = f"{event.step}, {event.contender}: {event.seconds:.3f} s"
            progress.update(bar, description=what, completed=len(timed))

    try:
        start(task, take)
    except DemoError as error:
        raise BenchError(str(error).partition("\n")[0]) from error
    return timed


def _require_room(directory: Path, nbytes: int) -> None:
    if not directory.is_dir():
        raise BenchError(f"{directory}: expected a directory, found none", path=str(directory))
    free = shutil.disk_usage(directory).free
    wanted = round(_SPACE * nbytes)
    if free < wanted:
        raise BenchError(
            f"{directory}: expected {bytes_text(wanted)} of free space, found {bytes_text(free)}; "
            "--size takes less",
            path=str(directory),
        )


@contextmanager
def _places(directory: Path) -> Iterator[tuple[Path, Path]]:
    """A new directory to save in, and one for all else; both are gone after SIGTERM, too."""
    previous = signal.signal(signal.SIGTERM, _stop)
    try:
        with (
            tempfile.TemporaryDirectory(prefix="dist-ckpt-bench-") as scratch,
            tempfile.TemporaryDirectory(prefix="dist-ckpt-bench-", dir=directory) as workspace,
        ):
            yield Path(workspace), Path(scratch)
    finally:
        signal.signal(signal.SIGTERM, previous)


def _stop(signal_number: int, _frame: object) -> NoReturn:
    """Leave through every ``finally``, so that nothing stays behind."""
    raise SystemExit(128 + signal_number)


def _progress() -> Progress:
    """A bar on stderr; nothing where that is no terminal."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def _show(
    directory: Path,
    options: BenchOptions,
    timed: list[StepTimed],
    lacks: Mapping[str, str],
    *,
    as_json: bool,
) -> None:
    timings = summarise(timed, [name for name in CONTENDERS if name not in lacks])
    if as_json:
        print_json("bench", directory, _fields(options, timed, timings, lacks))
        return
    console = Console(highlight=False)
    first = timed[0]
    state = f"{bytes_text(first.nbytes)}, {counted(first.num_arrays, 'array')}"
    rounds = f"{counted(options.num_ranks, 'rank')}, {counted(options.repetitions, 'round')}"
    console.print(build_table(f"{printable(str(directory))}: {state}, {rounds}", timings))
    for name, package in lacks.items():
        console.print(f"{name} did not take part: {package} is not installed", soft_wrap=True)


def _fields(
    options: BenchOptions,
    timed: list[StepTimed],
    timings: list[Timing],
    lacks: Mapping[str, str],
) -> dict[str, object]:
    return {
        "nbytes": timed[0].nbytes,
        "num_arrays": timed[0].num_arrays,
        "num_ranks": options.num_ranks,
        "repetitions": options.repetitions,
        "lacking": dict(lacks),
        "timings": list(map(asdict, timings)),
        "samples": [
            {
                "step": one.step,
                "contender": one.contender,
                "repetition": one.repetition,
                "seconds": one.seconds,
            }
            for one in timed
            if one.repetition > 0
        ],
    }
