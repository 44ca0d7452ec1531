"""``dist-ckpt bench``: save and load on a file system, beside one plain stream per rank.

The command starts its ranks, each of which is the same command in a workspace below the directory,
and runs ``bench_rank``. The directory is left as it was, however the command ends.
"""

import itertools
import os
import shutil
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from dist_ckpt_strategies.cli.ranks import CLI, run_ranks
from dist_ckpt_strategies.cli.render import bytes_text, counted, print_json, print_table, printable
from dist_ckpt_strategies.cli.status import Status
from dist_ckpt_strategies.errors import StorageError
from dist_ckpt_strategies.storage.files import opened_file

GB = 10**9
STEPS: Final = ("save", "load")
BASELINE: Final = "one stream"
_TIMEOUT_S = 120.0
_TIMEOUT_S_PER_GB = 120.0
"""A network file system may be slow; less than 8 MB per second is an error."""
_SPACE = 1.3
"""Space that has to be free, in times of the state: one checkpoint, and metadata."""


def bench_directory(
    directory: Path | None, nbytes: int, num_ranks: int, repetitions: int, **flags: bool
) -> int:
    """Measure saves and loads of a state of about ``nbytes``, show them, return the exit status.

    The temporary directory is measured if ``directory`` is None. ``flags`` are ``json`` and
    ``debug``, as on the command line.
    """
    directory = (directory or Path(tempfile.gettempdir())).resolve()
    _require_space(directory, nbytes)
    with tempfile.TemporaryDirectory(prefix="dist-ckpt-bench-", dir=directory) as workspace:
        options = ["--size", str(nbytes / GB), "--repetitions", str(repetitions)]
        options += [f"--{name}" for name, is_set in flags.items() if is_set]
        status = run_ranks(
            num_ranks, CLI, ["bench", workspace, *options], timeout_s=limit_s(nbytes)
        )
    # What a load misses here has been taken away from bench, and is no damage to a checkpoint.
    return Status.FAILED if status == Status.DAMAGED else status


def limit_s(nbytes: int) -> float:
    """Longest wait for a rank, in seconds."""
    return _TIMEOUT_S + _TIMEOUT_S_PER_GB * nbytes / GB


def _require_space(directory: Path, nbytes: int) -> None:
    if not directory.is_dir():
        raise StorageError(
            f"{directory}: expected a directory, found none; make it", path=str(directory)
        )
    free, wanted = shutil.disk_usage(directory).free, round(_SPACE * nbytes)
    if free < wanted:
        raise StorageError(
            f"{directory}: expected {bytes_text(wanted)} of free space, found {bytes_text(free)}; "
            "--size takes less",
            path=str(directory),
        )


def show_results(
    facts: Mapping[str, Any],
    samples: Iterable[Mapping[str, Any]],
    names: Sequence[str],
    lacking: Mapping[str, str],
    *,
    as_json: bool,
) -> None:
    """Print what was measured; ``lacking`` has the package that a candidate would have needed.

    ``facts`` are those of the run, as the JSON has them.
    """
    measured = [sample for sample in samples if sample["repetition"] > 0]
    timings = _timings(measured, names, facts["nbytes"])
    if as_json:
        results = {"lacking": lacking, "timings": timings, "samples": measured}
        print_json("bench", {**facts, **results})
        return
    console = Console(highlight=False)
    state = f"{bytes_text(facts['nbytes'])}, {counted(facts['num_arrays'], 'array')}"
    rounds = f"{counted(facts['num_ranks'], 'rank')}, {counted(facts['repetitions'], 'round')}"
    console.print(f"{printable(facts['path'])}: {state}, {rounds}", soft_wrap=True, markup=False)
    titles = ("step, candidate", "seconds", "from - to", "speed", "of baseline")
    print_table(console, titles, [*map(_row, timings)], titles[1:])
    for name, package in lacking.items():
        console.print(f"{name} was not measured: {package} is not installed", soft_wrap=True)


def _timings(
    samples: Iterable[Mapping[str, Any]], names: Sequence[str], nbytes: int
) -> list[dict[str, Any]]:
    """The medians of each step and candidate, from the measured rounds, as the JSON has them."""
    seconds: dict[tuple[str, str], dict[int, float]] = defaultdict(dict)
    for sample in samples:
        of_candidate = seconds[sample["step"], sample["candidate"]]
        of_candidate[sample["repetition"]] = sample["values"]["seconds"]
    timings = []
    for step, name in itertools.product(STEPS, names):
        of_candidate, others = seconds[step, name], seconds[step, BASELINE]
        median = statistics.median(of_candidate.values())
        ratios = [of_candidate[number] / other for number, other in others.items()]
        timings.append(
            {
                "step": step,
                "candidate": name,
                "seconds": median,
                "shortest": min(of_candidate.values()),
                "longest": max(of_candidate.values()),
                "nbytes_per_second": nbytes / median,
                "baseline_ratio": statistics.median(ratios),
            }
        )
    return timings


def _row(timing: dict[str, Any]) -> tuple[str, ...]:
    return (
        f"{timing['step']}, {timing['candidate']}",
        f"{timing['seconds']:.3f}",
        f"{timing['shortest']:.3f} - {timing['longest']:.3f}",
        f"{bytes_text(round(timing['nbytes_per_second']))}/s",
        f"{timing['baseline_ratio']:.2f}",
    )


def drop_cache(files: Iterable[Path]) -> None:
    """Drop files, which are flushed, from the page cache; where the kernel can do that."""
    for path in files if hasattr(os, "posix_fadvise") else ():
        with opened_file(path, os.O_RDONLY) as handle:
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
