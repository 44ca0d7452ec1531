"""``dist-ckpt bench``: save and load on a file system, beside one plain stream per rank.

The ranks are processes that call ``bench_rank.measure``. The directory is left as it was, however
the command ends.
"""

from __future__ import annotations

import importlib.util
import shutil
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from dist_ckpt_strategies.cli.ranks import Event, RankError, run_ranks
from dist_ckpt_strategies.cli.render import (
    Table,
    bytes_text,
    counted,
    open_bars,
    print_json,
    print_table,
    printable,
)
from dist_ckpt_strategies.errors import CheckpointError

GB = 10**9
STEPS: Final = ("save", "load")
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

Sample = dict[str, Any]
"""One save or load: ``step``, ``contender``, ``repetition`` (0 is the warm-up), ``seconds``."""


class BenchError(CheckpointError):
    """The benchmark could not be run."""


@dataclass(frozen=True, slots=True)
class BenchTask:
    """The task of all ranks.

    Attributes:
        workspace: directory on the file system that is measured, for this benchmark alone.
        nbytes: of the whole state, about.
        repetitions: measured rounds; one for warm-up comes first.
        candidates: in the order of the first round.
    """

    workspace: Path
    nbytes: int
    repetitions: int
    candidates: tuple[str, ...]

    def turns(self) -> Iterator[tuple[int, str]]:
        """Every candidate once per round, forwards and backwards in turn; round 0 is the warm-up.

        So the machine's other load, and what each leaves behind for the next, affects all.
        """
        for repetition in range(self.repetitions + 1):
            forwards = repetition % 2 == 0
            for name in self.candidates if forwards else reversed(self.candidates):
                yield repetition, name


def bench_directory(
    directory: Path | None, nbytes: int, num_ranks: int, repetitions: int, *, as_json: bool
) -> None:
    """Measure saves and loads of a state of about ``nbytes``, and show them.

    Args:
        directory: on the file system that is measured; None: the temporary directory.
        nbytes: of the state, about.
        num_ranks: how many hold it in equal parts.
        repetitions: measured rounds.
        as_json: print one JSON object instead of the table.

    Raises:
        BenchError: the directory does not exist or has no space, or a rank failed.
    """
    directory = (directory or Path(tempfile.gettempdir())).resolve()
    _require_space(directory, nbytes)
    missing = {
        name: package
        for name, package in CANDIDATES.items()
        if package is not None and importlib.util.find_spec(package) is None
    }
    candidates = tuple(name for name in CANDIDATES if name not in missing)
    state, samples = _measured(directory, nbytes, num_ranks, repetitions, candidates)
    timings = summarise(samples, candidates, state["nbytes"])
    if as_json:
        options = {"path": str(directory), "num_ranks": num_ranks, "repetitions": repetitions}
        results = {"lacking": missing, "timings": timings, "samples": samples}
        print_json("bench", options | state | results)
        return
    console = Console(highlight=False)
    what = f"{bytes_text(state['nbytes'])}, {counted(state['num_arrays'], 'array')}"
    rounds = f"{counted(num_ranks, 'rank')}, {counted(repetitions, 'round')}"
    console.print(f"{printable(str(directory))}: {what}, {rounds}", soft_wrap=True, markup=False)
    print_table(console, build_table(timings))
    for name, package in missing.items():
        console.print(f"{name} was not measured: {package} is not installed", soft_wrap=True)


def _require_space(directory: Path, nbytes: int) -> None:
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


def _measured(
    directory: Path, nbytes: int, num_ranks: int, repetitions: int, candidates: tuple[str, ...]
) -> tuple[dict[str, int], list[Sample]]:
    """The size of the state, and the samples of the measured rounds."""
    state: dict[str, int] = {}
    samples: list[Sample] = []
    timeout_s = _TIMEOUT_S + _TIMEOUT_S_PER_GB * nbytes / GB
    with (
        open_bars() as open_bar,
        tempfile.TemporaryDirectory(prefix="dist-ckpt-bench-", dir=directory) as workspace,
    ):
        task = BenchTask(Path(workspace), nbytes, repetitions, candidates)
        show, num_steps = open_bar("saving and loading"), len(STEPS) * len(list(task.turns()))

        def take(event: Event) -> None:
            if event.pop("event") == "state":
                state.update(event)
            else:
                samples.append(event)
                show(len(samples), num_steps)

        try:
            run_ranks(
                "dist_ckpt_strategies.cli.bench_rank:measure",
                task,
                num_ranks,
                timeout_s=timeout_s,
                on_event=take,
                silence_s=2 * timeout_s,
            )
        except RankError as error:
            raise BenchError(str(error)) from error
    return state, [sample for sample in samples if sample["repetition"] > 0]


def summarise(
    samples: Sequence[Sample], candidates: Sequence[str], nbytes: int
) -> list[dict[str, Any]]:
    """The medians of each step and candidate, from the measured rounds, as the JSON has them."""
    timings = []
    for step in STEPS:
        seconds = {
            name: [s["seconds"] for s in samples if (s["step"], s["contender"]) == (step, name)]
            for name in candidates
        }
        # Samples of each candidate are in the order of the rounds.
        for name, own in seconds.items():
            median = statistics.median(own)
            ratios = [a / b for a, b in zip(own, seconds[BASELINE], strict=True)]
            timings.append(
                {
                    "step": step,
                    "contender": name,
                    "seconds": median,
                    "shortest": min(own),
                    "longest": max(own),
                    "nbytes_per_second": nbytes / median,
                    "floor_ratio": statistics.median(ratios),
                }
            )
    return timings


def build_table(timings: Sequence[Mapping[str, Any]]) -> Table:
    """A row for each step of each candidate."""
    rows = tuple(
        (
            f"{one['step']}, {one['contender']}",
            f"{one['seconds']:.3f}",
            f"{one['shortest']:.3f} - {one['longest']:.3f}",
            f"{bytes_text(round(one['nbytes_per_second']))}/s",
            f"{one['floor_ratio']:.2f}",
        )
        for one in timings
    )
    titles = ("step, candidate", "seconds", "from - to", "speed", "of baseline")
    return Table(titles, rows, titles[1:])
