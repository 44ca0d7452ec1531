"""``dist-ckpt bench``: save and load on a file system, beside one plain stream per rank.

The ranks are processes that run ``bench_rank``. Every candidate takes its turn in every round. The
directory is left as it was, however the command ends.
"""

from __future__ import annotations

import importlib.util
import shutil
import signal
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn

from rich.console import Console

from dist_ckpt_strategies.cli.ranks import Event, RankError, rank_commands, run_rank_processes
from dist_ckpt_strategies.cli.render import (
    Row,
    Table,
    bytes_text,
    counted,
    open_bars,
    print_json,
    print_table,
    printable,
)
from dist_ckpt_strategies.errors import CheckpointError
from dist_ckpt_strategies.formats.issues import Watch

GB = 10**9
SAVE: Final = "save"
LOAD: Final = "load"
STEPS: Final = (SAVE, LOAD)
BASELINE: Final = "one stream"
CANDIDATES: Final[Mapping[str, str | None]] = {
    BASELINE: None,
    "zarr 1": None,
    "zarr 2": None,
    "torch_dist": "psutil",
}
"""The baseline and the candidates, and the package that each needs beside ours."""
_TIMEOUT_S = 120.0
_TIMEOUT_S_PER_GB = 120.0
"""A network file system may be slow; less than 8 MB per second is an error."""
_SPACE = 1.3
"""Space that has to be free, in times of the state: one checkpoint, and metadata."""


class BenchError(CheckpointError):
    """The benchmark could not be run."""


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """The user's choices.

    Attributes:
        directory: on the file system that is measured; None: the temporary directory.
        nbytes: of the state, about.
        num_ranks: how many hold it in equal parts.
        repetitions: measured rounds.
    """

    directory: Path | None
    nbytes: int
    num_ranks: int
    repetitions: int


@dataclass(frozen=True, slots=True)
class BenchTask:
    """The task of all ranks.

    Attributes:
        workspace: directory on the file system that is measured, for this benchmark alone.
        scratch: directory of this start alone: rendezvous, events and failures.
        nbytes: of the whole state, about.
        num_ranks: how many hold equal parts of it.
        repetitions: measured rounds; one for warm-up comes first.
        candidates: in the order of the first round.
        timeout_s: longest wait for another rank, in seconds.
    """

    workspace: Path
    scratch: Path
    nbytes: int
    num_ranks: int
    repetitions: int
    candidates: tuple[str, ...]
    timeout_s: float

    def turns(self) -> Iterator[tuple[int, str]]:
        """Every candidate once per round, forwards and backwards in turn; round 0 is the warm-up.

        So the machine's other load, and what each leaves behind for the next, affects all.
        """
        for repetition in range(self.repetitions + 1):
            forwards = repetition % 2 == 0
            for name in self.candidates if forwards else reversed(self.candidates):
                yield repetition, name


@dataclass(frozen=True, slots=True)
class Sample:
    """One save or load.

    Attributes:
        step: SAVE or LOAD.
        candidate: what saved or loaded.
        repetition: number of the round; 0 is the warm-up.
        seconds: from the first rank's start to the last rank's end.
        nbytes: of all ranks.
        num_arrays: of the state.
    """

    step: str
    candidate: str
    repetition: int
    seconds: float
    nbytes: int
    num_arrays: int


@dataclass(frozen=True, slots=True)
class Timing:
    """The samples of one step of one candidate.

    Attributes:
        step: SAVE or LOAD.
        candidate: what saved or loaded.
        seconds: median over the measured rounds.
        shortest: seconds.
        longest: seconds.
        nbytes_per_second: of all ranks together, at the median.
        baseline_ratio: median, over the rounds, of the ratio to the baseline of the same round.
    """

    step: str
    candidate: str
    seconds: float
    shortest: float
    longest: float
    nbytes_per_second: float
    baseline_ratio: float


TaskRunner = Callable[[BenchTask, Callable[[Event], None]], None]
"""Carries out a task in new processes, calling with each event."""


def run_task(task: BenchTask, on_event: Callable[[Event], None]) -> None:
    """Carry out a task with one new process per rank.

    Raises:
        RankError: a rank failed, or the ranks made no progress.
    """
    module = "dist_ckpt_strategies.cli.bench_rank"
    commands = rank_commands(module, task.num_ranks, task)
    run_rank_processes(commands, task.scratch, on_event, 2 * task.timeout_s)


def bench_directory(options: BenchOptions, *, as_json: bool, start: TaskRunner = run_task) -> None:
    """Measure saves and loads, and show them.

    Args:
        options: the user's choices.
        as_json: print one JSON object instead of the table.
        start: carries out the task.

    Raises:
        BenchError: the directory does not exist or has no space, or a rank failed.
    """
    directory = (options.directory or Path(tempfile.gettempdir())).resolve()
    _require_room(directory, options.nbytes)
    missing = {
        name: package
        for name, package in CANDIDATES.items()
        if package is not None and importlib.util.find_spec(package) is None
    }
    candidates = tuple(name for name in CANDIDATES if name not in missing)
    with _workspaces(directory) as (workspace, scratch), open_bars() as open_bar:
        task = BenchTask(
            workspace,
            scratch,
            options.nbytes,
            options.num_ranks,
            options.repetitions,
            candidates,
            timeout_s=_TIMEOUT_S + _TIMEOUT_S_PER_GB * options.nbytes / GB,
        )
        samples = _measured(task, open_bar("saving and loading"), start)
    timings = summarise(samples, candidates)
    if as_json:
        fields = _fields(options, samples, timings)
        print_json("bench", {"path": str(directory), "lacking": missing} | fields)
        return
    console = Console(highlight=False)
    state = f"{bytes_text(samples[0].nbytes)}, {counted(samples[0].num_arrays, 'array')}"
    rounds = f"{counted(options.num_ranks, 'rank')}, {counted(options.repetitions, 'round')}"
    console.print(f"{printable(str(directory))}: {state}, {rounds}", soft_wrap=True, markup=False)
    print_table(console, build_table(timings))
    for name, package in missing.items():
        console.print(f"{name} was not measured: {package} is not installed", soft_wrap=True)


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
def _workspaces(directory: Path) -> Iterator[tuple[Path, Path]]:
    """A new directory to save in, and one for all else; both are removed after SIGTERM, too."""
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
    """Leave through every ``finally``, so that all directories are removed."""
    raise SystemExit(128 + signal_number)


def _measured(task: BenchTask, watch: Watch, start: TaskRunner) -> list[Sample]:
    """All samples, the warm-up too."""
    samples: list[Sample] = []
    num_steps = len(STEPS) * sum(1 for _ in task.turns())

    def take(event: Event) -> None:
        samples.append(Sample(**{name: value for name, value in event.items() if name != "event"}))
        watch(len(samples), num_steps)

    try:
        start(task, take)
    except RankError as error:
        raise BenchError(str(error).partition("\n")[0]) from error
    return samples


def summarise(samples: Sequence[Sample], candidates: Sequence[str]) -> list[Timing]:
    """One timing for each step and candidate, from the measured rounds."""
    return [_timing(samples, step, name) for step in STEPS for name in candidates]


def _timing(samples: Sequence[Sample], step: str, name: str) -> Timing:
    by_round: dict[int, dict[str, Sample]] = {}
    for one in samples:
        if one.step == step and one.repetition > 0:
            by_round.setdefault(one.repetition, {})[one.candidate] = one
    own = [found[name] for found in by_round.values()]
    seconds = [one.seconds for one in own]
    median = statistics.median(seconds)
    ratios = [found[name].seconds / found[BASELINE].seconds for found in by_round.values()]
    return Timing(
        step,
        name,
        median,
        min(seconds),
        max(seconds),
        own[0].nbytes / median,
        statistics.median(ratios),
    )


def build_table(timings: Sequence[Timing]) -> Table:
    """A row for each step of each candidate."""
    rows = tuple(
        Row(
            f"{one.step}, {one.candidate}",
            (
                f"{one.seconds:.3f}",
                f"{one.shortest:.3f} - {one.longest:.3f}",
                f"{bytes_text(round(one.nbytes_per_second))}/s",
                f"{one.baseline_ratio:.2f}",
            ),
        )
        for one in timings
    )
    titles = ("seconds", "from - to", "speed", "of baseline")
    return Table(Row("step, candidate", titles), rows, titles)


def _fields(
    options: BenchOptions, samples: Sequence[Sample], timings: Sequence[Timing]
) -> dict[str, object]:
    return {
        "nbytes": samples[0].nbytes,
        "num_arrays": samples[0].num_arrays,
        "num_ranks": options.num_ranks,
        "repetitions": options.repetitions,
        "timings": [
            {
                "step": one.step,
                "contender": one.candidate,
                "seconds": one.seconds,
                "shortest": one.shortest,
                "longest": one.longest,
                "nbytes_per_second": one.nbytes_per_second,
                "floor_ratio": one.baseline_ratio,
            }
            for one in timings
        ],
        "samples": [
            {
                "step": one.step,
                "contender": one.candidate,
                "repetition": one.repetition,
                "seconds": one.seconds,
            }
            for one in samples
            if one.repetition > 0
        ],
    }
