"""``dist-ckpt bench``: save and load on a file system, beside one plain stream per rank.

The ranks are processes that call ``bench_rank.measure``. The directory is left as it was, however
the command ends.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import statistics
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from dist_ckpt_strategies.cli.ranks import Event, run_ranks
from dist_ckpt_strategies.cli.render import (
    bytes_text,
    counted,
    open_bars,
    print_json,
    print_table,
    printable,
)
from dist_ckpt_strategies.errors import StorageError

GB = 10**9
STEPS: Final = ("save", "load")
BASELINE: Final = "one stream"
BACKENDS: Final = {"zarr 1": ("zarr", 1), "zarr 2": ("zarr", 2), "torch_dist": ("torch_dist", 1)}
_PACKAGES: Final = {"torch_dist": "psutil"}
"""What candidates need beside this package's own requirements."""
_TIMEOUT_S = 120.0
_TIMEOUT_S_PER_GB = 120.0
"""A network file system may be slow; less than 8 MB per second is an error."""
_SPACE = 1.3
"""Space that has to be free, in times of the state: one checkpoint, and metadata."""

Sample = dict[str, Any]
"""One save or load: ``step``, ``contender``, ``repetition`` (0 is the warm-up), ``seconds``."""


def bench_directory(
    directory: Path | None, nbytes: int, num_ranks: int, repetitions: int, *, as_json: bool
) -> None:
    """Measure saves and loads of a state of about ``nbytes``, and show them.

    Args:
        directory: on the file system that is measured; None: the temporary directory.
        nbytes: of the state, about.
        num_ranks: how many hold it in equal shards.
        repetitions: measured rounds.
        as_json: print one JSON object instead of the table.

    Raises:
        StorageError: the directory does not exist or has no space.
        RankError: a rank failed.
    """
    directory = (directory or Path(tempfile.gettempdir())).resolve()
    _require_space(directory, nbytes)
    lacking = {
        name: package
        for name, package in _PACKAGES.items()
        if importlib.util.find_spec(package) is None
    }
    candidates = [BASELINE, *(name for name in BACKENDS if name not in lacking)]
    state, samples = _measured(directory, nbytes, num_ranks, repetitions, candidates)
    timings = _timings(samples, candidates, state["nbytes"])
    if as_json:
        options = {"path": str(directory), "num_ranks": num_ranks, "repetitions": repetitions}
        results = {"lacking": lacking, "timings": timings, "samples": samples}
        print_json("bench", options | state | results)
        return
    console = Console(highlight=False)
    what = f"{bytes_text(state['nbytes'])}, {counted(state['num_arrays'], 'array')}"
    rounds = f"{counted(num_ranks, 'rank')}, {counted(repetitions, 'round')}"
    console.print(f"{printable(str(directory))}: {what}, {rounds}", soft_wrap=True, markup=False)
    titles = ("step, candidate", "seconds", "from - to", "speed", "of baseline")
    print_table(console, titles, [*map(_row, timings)], titles[1:])
    for name, package in lacking.items():
        console.print(f"{name} was not measured: {package} is not installed", soft_wrap=True)


def _require_space(directory: Path, nbytes: int) -> None:
    if not directory.is_dir():
        raise StorageError(f"{directory}: expected a directory, found none", path=str(directory))
    free, wanted = shutil.disk_usage(directory).free, round(_SPACE * nbytes)
    if free < wanted:
        raise StorageError(
            f"{directory}: expected {bytes_text(wanted)} of free space, found {bytes_text(free)}; "
            "--size takes less",
            path=str(directory),
        )


def _measured(
    directory: Path, nbytes: int, num_ranks: int, repetitions: int, candidates: list[str]
) -> tuple[dict[str, int], list[Sample]]:
    """The size of the state, and the samples of the measured rounds."""
    state: dict[str, int] = {}
    samples: list[Sample] = []
    timeout_s = _TIMEOUT_S + _TIMEOUT_S_PER_GB * nbytes / GB
    with (
        open_bars() as open_bar,
        tempfile.TemporaryDirectory(prefix="dist-ckpt-bench-", dir=directory) as workspace,
    ):
        show = open_bar("saving and loading")
        num_samples = len(STEPS) * len(candidates) * (repetitions + 1)

        def take(event: Event) -> None:
            if event.pop("event") == "state":
                state.update(event)
            else:
                samples.append(event)
                show(len(samples), num_samples)

        run_ranks(
            "dist_ckpt_strategies.cli.bench_rank:measure",
            {
                "workspace": Path(workspace),
                "nbytes": nbytes,
                "repetitions": repetitions,
                "candidates": candidates,
            },
            num_ranks,
            timeout_s=timeout_s,
            on_event=take,
            silence_s=2 * timeout_s,
        )
    return state, [sample for sample in samples if sample["repetition"] > 0]


def _timings(samples: list[Sample], candidates: list[str], nbytes: int) -> list[dict[str, Any]]:
    """The medians of each step and candidate, from the measured rounds, as the JSON has them."""
    timings = []
    for step in STEPS:
        # Samples of each candidate are in the order of the rounds.
        seconds = {
            name: [s["seconds"] for s in samples if (s["step"], s["contender"]) == (step, name)]
            for name in candidates
        }
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


def _row(timing: dict[str, Any]) -> tuple[str, ...]:
    return (
        f"{timing['step']}, {timing['contender']}",
        f"{timing['seconds']:.3f}",
        f"{timing['shortest']:.3f} - {timing['longest']:.3f}",
        f"{bytes_text(round(timing['nbytes_per_second']))}/s",
        f"{timing['floor_ratio']:.2f}",
    )


def drop_cache(files: Iterable[Path]) -> None:
    """Drop files, which are flushed, from the page cache; where the kernel can do that."""
    for path in files if hasattr(os, "posix_fadvise") else ():
        handle = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)
