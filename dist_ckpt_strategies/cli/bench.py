"""``dist-ckpt bench``: save and load on a file system, beside one plain stream per rank.

The command starts its ranks, each of which is the same command in a workspace below the directory.
The directory is left as it was, however the command ends.
"""

import importlib.util
import itertools
import os
import shutil
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Self

from rich.console import Console

from dist_ckpt_strategies.cli.ranks import CLI, is_rank, run_ranks
from dist_ckpt_strategies.cli.render import (
    bytes_text,
    counted,
    open_bars,
    print_json,
    print_table,
    printable,
)
from dist_ckpt_strategies.cli.status import Status
from dist_ckpt_strategies.errors import StorageError

GB = 10**9
STEPS: Final = ("save", "load")
BASELINE: Final = "one stream"
_TIMEOUT_S = 120.0
_TIMEOUT_S_PER_GB = 120.0
"""A network file system may be slow; less than 8 MB per second is an error."""
_SPACE = 1.3
"""Space that has to be free, in times of the state: one checkpoint, and metadata."""


@dataclass(frozen=True, slots=True)
class Spread:
    """A median, the least and the greatest value."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """The spread of some values."""
        return cls(statistics.median(values), min(values), max(values))

    @classmethod
    def of_ratios(cls, own: Mapping[int, float], other: Mapping[int, float]) -> Self:
        """That of the ratios within a round; both are seconds by round, and share at least one."""
        return cls.of([own[number] / other[number] for number in own if number in other])


def bench_directory(
    directory: Path | None, nbytes: int, num_ranks: int, repetitions: int, **flags: bool
) -> int:
    """Measure saves and loads of a state of about ``nbytes``, show them, return the exit status.

    The temporary directory is measured if ``directory`` is None; in a rank it is the workspace.
    ``flags`` are ``json`` and ``debug``, as on the command line.
    """
    directory = (directory or Path(tempfile.gettempdir())).resolve()
    timeout_s = _TIMEOUT_S + _TIMEOUT_S_PER_GB * nbytes / GB
    if is_rank():
        _measure(directory, nbytes, repetitions, timeout_s, as_json=flags["json"])
        return Status.FINE
    _require_space(directory, nbytes)
    with tempfile.TemporaryDirectory(prefix="dist-ckpt-bench-", dir=directory) as workspace:
        options = ["--size", str(nbytes / GB), "--repetitions", str(repetitions)]
        options += [f"--{name}" for name, is_set in flags.items() if is_set]
        status = run_ranks(num_ranks, CLI, ["bench", workspace, *options], timeout_s=timeout_s)
    # What a load misses here has been taken away from bench, and is no damage to a checkpoint.
    return Status.FAILED if status == Status.DAMAGED else status


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


def _measure(
    workspace: Path, nbytes: int, repetitions: int, timeout_s: float, *, as_json: bool
) -> None:
    """Measure on one rank; the first shows the results. Collective."""
    from dist_ckpt_strategies.cli import bench_rank  # noqa: PLC0415 - loads torch
    from dist_ckpt_strategies.comm.torch_communicator import open_communicator  # noqa: PLC0415

    # What candidates need beside this package's own requirements.
    lacking = {} if importlib.util.find_spec("psutil") else {"torch_dist": "psutil"}
    names = [name for name in bench_rank.MAKERS if name not in lacking]
    comm = open_communicator(None, timeout_s=timeout_s, purpose="bench")
    size = bench_rank.gpt_size(nbytes, comm.size)
    samples = []
    with open_bars() as open_bar:
        show = open_bar("saving and loading")
        shards = bench_rank.build_shards(size, comm.rank, comm.size)
        num_samples = len(STEPS) * len(names) * (repetitions + 1)
        for sample in bench_rank.measure(comm, shards, workspace, names, repetitions):
            samples.append(asdict(sample))
            show(len(samples), num_samples)
    if comm.rank:
        return
    samples = [sample for sample in samples if sample["repetition"] > 0]
    timings = _timings(samples, names, size.nbytes)
    directory = str(workspace.parent)
    if as_json:
        options = {"path": directory, "num_ranks": comm.size, "repetitions": repetitions}
        state = {"nbytes": size.nbytes, "num_arrays": size.num_arrays}
        results = {"lacking": lacking, "timings": timings, "samples": samples}
        print_json("bench", options | state | results)
        return
    console = Console(highlight=False)
    what = f"{bytes_text(size.nbytes)}, {counted(size.num_arrays, 'array')}"
    rounds = f"{counted(comm.size, 'rank')}, {counted(repetitions, 'round')}"
    console.print(f"{printable(directory)}: {what}, {rounds}", soft_wrap=True, markup=False)
    titles = ("step, candidate", "seconds", "from - to", "speed", "of baseline")
    print_table(console, titles, [*map(_row, timings)], titles[1:])
    for name, package in lacking.items():
        console.print(f"{name} was not measured: {package} is not installed", soft_wrap=True)


def _timings(samples: list[dict[str, Any]], names: list[str], nbytes: int) -> list[dict[str, Any]]:
    """The medians of each step and candidate, from the measured rounds, as the JSON has them."""
    seconds: dict[tuple[str, str], dict[int, float]] = defaultdict(dict)
    for sample in samples:
        of_candidate = seconds[sample["step"], sample["candidate"]]
        of_candidate[sample["repetition"]] = sample["values"]["seconds"]
    timings = []
    for step, name in itertools.product(STEPS, names):
        own = seconds[step, name]
        found, ratios = Spread.of([*own.values()]), Spread.of_ratios(own, seconds[step, BASELINE])
        timings.append(
            {
                "step": step,
                "candidate": name,
                "seconds": found.median,
                "shortest": found.low,
                "longest": found.high,
                "nbytes_per_second": nbytes / found.median,
                "baseline_ratio": ratios.median,
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
        handle = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)
